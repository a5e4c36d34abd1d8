"""How the end of a context reaches other workers: with requests, or by itself when none follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farprop.runtime.autograd.context_cleanup import EndedContexts
from farprop.wire.message import MAX_ENDED


class Peers:
    """Records what is sent on the control channel, and the timers."""

    def __init__(self) -> None:
        self.cleaned: list[tuple[int, int]] = []
        self.timers: list[Callable[[], None]] = []

    def clean_up(self, rank: int, context_id: int) -> None:
        self.cleaned.append((rank, context_id))

    def call_at(self, when: float, callback: Callable[[], None]) -> Any:
        self.timers.append(callback)

    def tick(self) -> None:
        (timer,) = self.timers
        self.timers.clear()
        timer()


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
def ended(peers: Peers) -> EndedContexts:
    return EndedContexts(peers)  # type: ignore[arg-type]


def test_every_request_names_a_context_until_one_is_answered(peers: Peers, ended: EndedContexts) -> None:
    ended.add(1, 70)
    ended.add(2, 70)
    first, second = ended.for_request(1), ended.for_request(1)
    assert first == second == (70,)
    ended.on_answered(1, first)
    assert ended.for_request(1) == ()
    assert not ended.is_empty
    ended.on_answered(2, ended.for_request(2))
    assert ended.is_empty
    ended.on_answered(1, second)  # the other answer
    peers.tick()
    assert peers.cleaned == []
    assert not peers.timers


def test_context_that_no_request_carries_is_sent_by_itself(peers: Peers, ended: EndedContexts) -> None:
    ended.add(1, 70)
    peers.tick()  # it may have been added a moment ago
    ended.add(1, 71)
    assert peers.cleaned == []
    peers.tick()
    assert peers.cleaned == [(1, 70)]
    peers.tick()
    assert peers.cleaned == [(1, 70), (1, 71)]
    assert ended.is_empty
    assert not peers.timers


def test_answer_between_two_ticks_leaves_nothing_to_send(peers: Peers, ended: EndedContexts) -> None:
    ended.add(1, 70)
    peers.tick()
    ended.add(1, 71)
    ended.on_answered(1, [70])
    peers.tick()
    assert peers.cleaned == []
    peers.tick()
    assert peers.cleaned == [(1, 71)]


def test_request_names_only_so_many_contexts(ended: EndedContexts) -> None:
    for number in range(MAX_ENDED + 5):
        ended.add(1, number)
    assert ended.for_request(1) == tuple(range(MAX_ENDED))


def test_dead_worker_is_told_nothing(peers: Peers, ended: EndedContexts) -> None:
    ended.add(1, 70)
    ended.forget(1)
    assert ended.is_empty
    peers.tick()
    assert not peers.timers
