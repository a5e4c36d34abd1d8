"""The sender of operations on references, when an attempt gets lost: nobody hears of its end."""

from __future__ import annotations

from typing import Any

import pytest

from farprop.errors import ConnectionLostError
from farprop.protocol.references.control_plane import Batch, ControlReply
from farprop.runtime.future_call import FutureCall
from farprop.runtime.references import control_sender
from farprop.runtime.references.control_sender import ControlSender
from farprop.runtime.timers import TimerHandle, TimerHeap
from farprop.wire.dialect import PICKLES

ANN = 1
BATCH = Batch(1, ())


class Transport:
    """Keeps what was sent. ``run_until`` moves the clock on."""

    label = "worker0 (rank 0)"
    dialect = PICKLES
    is_static = True

    def __init__(self) -> None:
        self.now = 100.0
        self.sent = 0
        self.waiting: Batch | None = BATCH
        self.suspected: list[int] = []
        self.timers = TimerHeap()
        self.call_at_lockfree = self.timers.call_at_lockfree

    def name_of_rank(self, rank: int) -> str:
        return f"worker{rank}"

    def is_ready(self, rank: int) -> bool:
        return True

    def connect(self, rank: int, timeout: float) -> Any:
        return rank

    def send_batch(self, connection: Any, batch: Batch, call: FutureCall) -> None:
        self.sent += 1

    def submit(self, function: Any, *args: Any) -> None:
        function(*args)

    def call_at(self, when: float, callback: Any) -> TimerHandle:
        return self.timers.call_at(when, callback)

    def suspect(self, rank: int) -> None:
        self.suspected.append(rank)

    def run_until(self, end: float) -> None:
        while (due := self.timers.next_deadline) is not None and due <= end:
            self.now = max(self.now, due)
            self.timers.run_due(self.now)
        self.now = end


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Transport:
    made = Transport()
    monkeypatch.setattr(control_sender, "_now", lambda: made.now)
    return made


def _sender(transport: Transport) -> ControlSender:
    def replied(peer: int, reply: ControlReply) -> None:
        transport.waiting = None

    return ControlSender(transport, lambda peer: transport.waiting, replied)


def test_batch_whose_attempt_got_lost_is_sent_again(transport: Transport) -> None:
    """Although no further operation comes, and nothing else calls ``send``."""
    sender = _sender(transport)
    sender.send(ANN)
    sender.send(ANN)
    assert transport.sent == 1
    transport.run_until(200.0)
    assert transport.sent >= 2
    assert transport.suspected


def test_nothing_is_sent_again_after_a_reply(transport: Transport) -> None:
    sender = _sender(transport)
    sender.send(ANN)
    transport.now = 101.0
    sender.answered(ANN, ControlReply(1, b""))
    transport.run_until(1000.0)
    assert transport.sent == 1
    assert not len(transport.timers)


def test_batch_that_was_sent_lately_does_not_expire(transport: Transport) -> None:
    """The timer was set for an earlier one."""
    sender = _sender(transport)
    sender.send(ANN)
    transport.run_until(120.0)
    sender.answered(ANN, ControlReply(1, b""))
    transport.waiting = BATCH
    sender.send(ANN)
    transport.run_until(140.0)
    assert transport.sent == 2


def test_nothing_is_sent_after_close(transport: Transport) -> None:
    sender = _sender(transport)
    sender.send(ANN)
    sender.close()
    transport.run_until(1000.0)
    assert transport.sent == 1
    assert not len(transport.timers)


def test_peer_for_which_there_is_nothing_is_not_dialled(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be dead: to dial it would fail, and be tried again for ever."""
    transport.waiting = None
    monkeypatch.setattr(transport, "connect", _refuse)
    sender = _sender(transport)
    sender.send(ANN)
    assert sender.under_way == 0


def _refuse(rank: int, timeout: float) -> None:
    raise ConnectionLostError("it has died")
