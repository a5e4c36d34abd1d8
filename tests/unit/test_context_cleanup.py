"""The end of contexts whose workers die, or whose functions go on after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farprop.errors import ConnectionLostError
from farprop.runtime.autograd.context_cleanup import ContextCleanup
from farprop.runtime.autograd.contexts import COUNTER_BITS, ContextContainer
from farprop.wire.dialect import PICKLES
from farprop.wire.fast_codec import encode_value
from farprop.wire.message import ANSWER, CONTEXT, Message, Method

ME, MAKER, BETWEEN = 0, 1, 2
OF_MAKER = (MAKER << COUNTER_BITS) + 7


class Peers:
    """Nobody can be reached while ``is_cut``. Jobs and timers run when the test says so."""

    label = "worker (rank 0)"
    dialect = PICKLES
    is_static = True

    def __init__(self) -> None:
        self.is_cut = True
        self.exists = True
        self.suspected: list[int] = []
        self.dead: set[int] = set()
        self.due: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        self.due.append((function, args))

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        self.due.append((callback, ()))

    def clean_up(self, rank: int, context_id: int) -> None:
        """It gets there, or not."""

    def is_dead(self, rank: int) -> bool:
        return rank in self.dead

    def suspect(self, rank: int) -> None:
        self.suspected.append(rank)

    def call_method(self, rank: int, method: Method, message: Message, timeout: float | None, system: bool) -> Message:
        if self.is_cut:
            raise ConnectionLostError("it can't be reached")
        answer = encode_value(self.exists)
        answer.kind = ANSWER
        return answer

    def run_due(self) -> None:
        due, self.due = self.due, []
        for function, args in due:
            function(*args)


def _with_a_context_from_another(peers: Peers) -> tuple[ContextContainer, ContextCleanup]:
    contexts = ContextContainer(ME)
    context = contexts.meet(OF_MAKER)
    assert context is not None
    context.known.add(BETWEEN)
    return contexts, ContextCleanup(ME, peers, contexts, None)  # type: ignore[arg-type]


def test_maker_that_can_not_be_asked_is_suspected() -> None:
    """It may have died, too. Without a connection to it nothing else would tell this worker, and the context stayed."""
    peers = Peers()
    contexts, cleanup = _with_a_context_from_another(peers)
    cleanup.on_death(BETWEEN)
    peers.run_due()
    assert peers.suspected == [MAKER]
    cleanup.on_death(MAKER)
    assert not len(contexts)
    asked = len(peers.suspected)
    peers.run_due()  # the question that was to be asked again
    peers.run_due()
    assert len(peers.suspected) == asked


def test_maker_that_can_not_be_asked_is_asked_again() -> None:
    peers = Peers()
    contexts, cleanup = _with_a_context_from_another(peers)
    cleanup.on_death(BETWEEN)
    peers.run_due()
    assert len(contexts) == 1
    peers.is_cut = peers.exists = False
    while peers.due and len(contexts):
        peers.run_due()
    assert not len(contexts)


def test_message_of_a_context_that_has_ended_does_not_carry_it() -> None:
    """The caller's connection broke, it has ended the context, and the function goes on here and calls others."""
    contexts = ContextContainer(ME)
    context = contexts.meet(OF_MAKER)
    assert context is not None
    contexts.release(OF_MAKER)
    message = encode_value(None)
    context.attach(message, BETWEEN, [torch.ones(1, requires_grad=True)])
    assert message.autograd is None
    assert not message.flags & CONTEXT
    assert not context.sends


def test_request_of_a_dead_worker_that_runs_late_leaves_no_context() -> None:
    """It waited for a thread while its caller was declared dead, and then made the context again."""
    peers = Peers()
    peers.dead = {MAKER}
    contexts, cleanup = _with_a_context_from_another(peers)
    cleanup.on_orphaned(OF_MAKER)
    peers.run_due()
    assert not len(contexts)


def test_context_of_a_process_that_took_the_rank_of_a_dead_one_stays() -> None:
    """A third worker brought it here before this one heard of the death. It ended, with its gradients."""
    peers = Peers()
    peers.is_static = peers.is_cut = False
    contexts, cleanup = _with_a_context_from_another(peers)
    cleanup.on_death(MAKER)
    peers.run_due()
    assert len(contexts) == 1
    peers.exists = False  # it was one of the old process, after all
    cleanup.on_death(MAKER)
    peers.run_due()
    assert not len(contexts)


def test_context_of_a_dead_worker_ends_if_nobody_has_its_rank() -> None:
    peers = Peers()
    peers.is_static = False
    peers.dead = {MAKER}
    contexts, cleanup = _with_a_context_from_another(peers)
    cleanup.on_death(MAKER)
    peers.run_due()
    assert not len(contexts)
