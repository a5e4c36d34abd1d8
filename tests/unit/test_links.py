"""Who reads a link's answers, when the loop and callers take turns."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from farprop.errors import ConnectionLostError
from farprop.runtime.links import FutureCall, Link, SyncCall
from farprop.runtime.loop import HANGUP, IN
from farprop.transport.connection import Connection
from farprop.transport.segments import SegmentPool
from farprop.wire.codec import encode_value
from farprop.wire.frames import ANSWER, PLAIN, REQUEST, Frame, pack


class StillLoop:
    """A loop that never turns: it notes what it is asked to watch."""

    def __init__(self) -> None:
        self.events: dict[int, int] = {}

    def add(self, fd: int, events: int, _: Any) -> None:
        self.events[fd] = events

    def change(self, fd: int, events: int) -> None:
        self.events[fd] = events

    def remove(self, fd: int) -> None:
        self.events.pop(fd, None)

    def on_pool_thread(self) -> bool:
        return False

    def submit(self, *_: Any) -> None:
        raise AssertionError("nothing here has callbacks")

    push_answer = submit


class QueueLoop(StillLoop):
    """One whose pool runs when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        self.jobs.append((function, args))

    def run_jobs(self) -> None:
        while self.jobs:
            function, args = self.jobs.pop(0)
            function(*args)


def make_link(loop: StillLoop | None = None) -> tuple[Link, socket.socket, StillLoop, Connection]:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    loop = loop or StillLoop()
    link = Link(loop, "peer", 1, lambda *_: None, lambda *_: None)  # type: ignore[arg-type]
    connection = Connection(ours, "peer", SegmentPool(0), 1 << 20, 1 << 20, link.want_output, lambda: None)
    link.attach(connection)
    connection.open_passage()
    theirs.recv(1000)
    return link, theirs, loop, connection


def test_a_caller_that_comes_while_the_loop_follows_up_an_old_event_gets_its_answer() -> None:
    """The loop saw input; before it came to read, a caller had read it, and was gone. Then the next caller comes."""
    link, theirs, loop, connection = make_link()
    answers = []
    caller = threading.Thread(target=lambda: answers.append(link.call_sync(0, b"x", encode_value(None), 5.0)))
    receive = connection.receive

    def receive_slowly() -> Any:
        caller.start()
        theirs.recv(1000)
        return receive()

    connection.receive = receive_slowly  # type: ignore[method-assign]
    try:
        link._on_events(IN)
    finally:
        connection.receive = receive  # type: ignore[method-assign]
    if not caller.ident:
        caller.start()
        theirs.recv(1000)
    assert isinstance(link._reader, SyncCall)
    link._on_events(IN)  # and once more, while the caller reads
    theirs.sendall(pack(ANSWER, PLAIN, 1, 0.0, b"", encode_value(None).meta))
    caller.join()
    assert len(answers) == 1
    assert link._reader is None
    link.validate()
    theirs.close()
    link._on_events(HANGUP)  # here the loop does read, up to the end
    assert connection.closed
    assert not loop.events


class Noted(FutureCall):
    """A call that notes how often it ended, and how."""

    __slots__ = ("ends", "quick")

    def __init__(self, quick: bool) -> None:
        super().__init__(0.0)
        self.quick = quick
        self.ends: list[tuple[Frame | None, Exception | None]] = []

    def finish(self, frame: Frame | None, error: Exception | None) -> None:
        self.ends.append((frame, error))


@pytest.mark.parametrize("quick", [True, False])
def test_an_interrupt_while_answers_are_delivered_costs_nobody_else_an_answer(
    monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    """Ctrl-C comes to a caller that has read its own answer and those of others, and has delivered only its own."""
    loop = QueueLoop()
    link, theirs, _, connection = make_link(loop)
    others = [Noted(quick) for _ in range(3)]
    for other in others:
        link.call_async(0, b"x", encode_value(None), other)

    def interrupted(self: SyncCall) -> None:
        raise KeyboardInterrupt

    answer = encode_value(None)
    theirs.sendall(b"".join(pack(ANSWER, answer.flags, number, 0.0, b"", answer.meta) for number in (1, 4, 2)))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SyncCall, "ring", interrupted)
        link.call_sync(0, b"x", encode_value(None), 5.0)
    loop.run_jobs()
    # The third's answer had not come; the stream ended for it.
    assert [len(other.ends) for other in others] == [1, 1, 1]
    assert [other.ends[0][0] is not None for other in others] == [True, True, False]
    assert isinstance(others[2].ends[0][1], ConnectionLostError)
    assert connection.closed
    link.validate()
    theirs.close()


@pytest.mark.parametrize("more", [True, False])
def test_nothing_can_be_sent_on_a_closed_connection(more: bool) -> None:
    """Also not what would wait for more, which nobody would ever send."""
    _, theirs, _, connection = make_link()
    connection.close()
    with pytest.raises(ConnectionLostError):
        connection.send(REQUEST, 0, 1, 0.0, b"x", encode_value(None), more)
    theirs.close()


def test_a_connection_whose_passage_can_not_be_opened_leaves_no_socket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    theirs.close()
    connection = Connection(ours, "peer", SegmentPool(0), 1 << 20, 1 << 20, lambda _: None, lambda: None)
    before = set(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        with pytest.raises(OSError) as caught:  # which keeps what is forgotten
            connection.open_passage()
        assert len(set(os.listdir("/proc/self/fd")) - before) == 0
        del caught
    finally:
        gc.enable()
        connection.close()
