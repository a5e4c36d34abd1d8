"""Passes that compute the gradients of some tensors only, and leave the gradients of the context alone.

Such a pass has three steps. The origin finds out which sends lead to the inputs (``protocol.needed_sends``). It tells
each of these workers what it has to do. Then the pass runs as any other: no source is missing, so nobody is blocked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from farprop.errors import FarpropError
from farprop.protocol.backward import ROOTS, BackwardStateMachine, PassId, Target
from farprop.protocol.needed_sends import Needed, NeededSends, Reached, pack_needed, unpack_reached
from farprop.runtime.autograd.contexts import Context
from farprop.runtime.autograd.engine import Gradients, LocalPass, Outgoing, put
from farprop.runtime.autograd.graph import Edge, Plan, PrunedPlan, Reach, reach_from
from farprop.runtime.autograd.messages import LEAST_SECONDS, PeerCaller, ask
from farprop.runtime.autograd.nodes import RECEIVE_TYPE, edge_of
from farprop.wire.message import Gradient, Method


class Wanted(NamedTuple):
    """The edges of tensors whose gradients a pass computes, and what keeps their nodes alive."""

    edges: Sequence[Edge]
    held: list[torch.Tensor]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Wanted:
        held: list[torch.Tensor] = []
        return cls([edge_of(tensor, held) for tensor in tensors], held)


class GradRequest(Protocol):
    """What the caller of ``grad`` wants. If a method raises, the pass has failed, and is undone.

    ``seconds`` are those that the rest of the pass may take.
    """

    wanted: Wanted
    """The inputs on this worker."""

    def register(self, pass_id: PassId, seconds: float | None) -> None:
        """Have the owners of the other inputs put them into their context's ``wanted``."""

    def collect(self, pass_id: PassId, gradients: Sequence[Gradient], seconds: float | None) -> None:
        """The pass has ended: these are the gradients of ``wanted``. The owners of the others have theirs."""


class GradPass(LocalPass):
    """One such pass on one worker. It can't run before ``prepare``."""

    def __init__(
        self,
        context: Context,
        own_rank: int,
        pass_id: PassId,
        fast: bool,
        keep_graph: bool,
        anomaly: bool,
        roots: tuple[Edge, ...] = (),
        create_graph: bool = False,
    ) -> None:
        super().__init__(context, own_rank, pass_id, False, keep_graph, anomaly, roots, create_graph, Plan({}))
        self._wanted: Sequence[Edge] = ()
        self._targets: frozenset[Target] = frozenset()
        self._captured: Gradients = {}

    def reached_by(self, sources: Sequence[int]) -> list[Reached]:
        """What these sources reach here."""
        wanted = self.context.wanted.get(self.id)
        inputs = set() if wanted is None else {node for node, _ in wanted.edges}
        answers: list[Reached] = []
        for source in sources:
            reach = self._reach_of(source)[1]
            answers.append(Reached(frozenset(reach.targets), not inputs.isdisjoint(reach.nodes)))
        return answers

    def _reach_of(self, source: int) -> tuple[Sequence[Edge], Reach]:
        if source == ROOTS:
            return self._roots, reach_from(self._roots, self.context.id)
        send, reach = self.context.sends.get(source), self.context.reach_of(source)
        if send is None or reach is None:
            raise FarpropError(
                f"worker {self.machine.own_rank} has not sent message {source} of context {self.context.id}, or a "
                "failed pass has sent it"
            )
        return send.edges or send.next_functions, reach

    def prepare(self, needed: Needed) -> None:
        """The origin says what this worker has to do."""
        wanted = self.context.wanted.get(self.id)
        self._wanted = () if wanted is None else wanted.edges
        self._targets = needed.targets
        reaches = {source: self._reach_of(source) for source in needed.sources}
        plan = PrunedPlan(reaches, self._wanted, needed.targets)
        with self.lock:
            if self.machine.failed:
                raise FarpropError(f"The backward pass of context {self.context.id} has ended with an error.")
            self._plan = plan
            self.machine = BackwardStateMachine(
                self.machine.own_rank, self.id.origin, False, plan.units, frozenset(plan.sources)
            )

    def _distribute(self, captured: Gradients, outgoing: Outgoing) -> None:
        captures = self._plan.captures
        for edge, gradient in captured.items():
            node, index = edge
            if edge in captures:
                with self.context.lock:
                    put(edge, gradient, self._captured)
            if type(node) is RECEIVE_TYPE and node.target in self._targets:
                gradients = outgoing.get(node.target)
                if gradients is None:
                    gradients = outgoing[node.target] = [None] * node.count
                gradients[index] = gradient

    def take(self) -> list[Gradient]:
        """Remove and return the gradients of the wanted tensors of this worker, when the pass has ended."""
        wanted = self.context.wanted.pop(self.id, None)
        gradients = [self._captured.get(edge) for edge in (() if wanted is None else wanted.edges)]
        self._captured = {}
        return gradients

    def undo(self) -> None:
        super().undo()
        self.context.wanted.pop(self.id, None)
        self._captured = {}


def find_needed(peers: PeerCaller, local: GradPass, head: bytes, deadline: float | None) -> dict[int, Needed]:
    """Find what every worker has to do, and tell the others. ``head`` is the pass's."""
    own_rank = local.machine.own_rank
    (roots,) = local.reached_by([ROOTS])
    sends = NeededSends(own_rank, roots)
    while questions := sends.questions():
        for worker, message_ids in questions.items():
            if worker == own_rank:
                answers = dict(zip(message_ids, local.reached_by(message_ids), strict=True))
            else:
                local.partners.add(worker)
                numbers = ask(peers, worker, Method.REACH, _left(deadline), head, *message_ids)
                answers = unpack_reached(message_ids, list(numbers))
            sends.on_answer(worker, answers)
    needed = sends.needed()
    for worker, part in needed.items():
        if worker != own_rank:
            ask(peers, worker, Method.PREPARE, _left(deadline), head, *pack_needed(part))
    return needed


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), LEAST_SECONDS)
