"""One backward pass on one worker: the protocol's machine, and the graph that it speaks of."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch

from farprop.protocol.passes import ROOTS, GradientPass, PassId, Run, Target
from farprop.runtime.gradients.anomaly import current_trail, watched
from farprop.runtime.gradients.contexts import Context
from farprop.runtime.gradients.execution import Execution, Gradient, Gradients
from farprop.runtime.gradients.graph import Edge
from farprop.runtime.gradients.leaves import add, first_gradient, tell_hooks, through_hooks
from farprop.runtime.gradients.nodes import LEAF_TYPE
from farprop.runtime.gradients.payload import moved
from farprop.runtime.gradients.records import RECEIVE, recorded


class LocalPass:
    """``lock`` guards the machine; the graph runs outside of it, one run at a time."""

    def __init__(
        self,
        context: Context,
        me: int,
        pass_id: PassId,
        fast: bool,
        keep_graph: bool,
        anomaly: bool,
        roots: tuple[Edge, ...] = (),
    ) -> None:
        self.context = context
        self.id = pass_id
        self.fast = fast
        self.keep_graph = keep_graph
        self.anomaly = anomaly
        self.lock = threading.Lock()
        self.partners: set[int] = set()  # workers that gradients were sent to
        self._plan = context.plan(roots, again=keep_graph)
        self._roots = roots
        self.machine = GradientPass(me, pass_id.origin, fast, self._plan.units, frozenset(self._plan.sources))
        self._execution = Execution(self._plan, keep_graph)
        self._came: dict[int, list[Gradient]] = {}
        self._going: dict[Target, list[Gradient]] = {}
        self._before: dict[torch.Tensor, torch.Tensor | None] = {}  # gradients of the context that this pass changed

    def bring(self, source: int, gradients: list[Gradient]) -> None:
        """Keep the gradients of a source until the machine wants them."""
        self._came[source] = gradients

    def execute(self, run: Run) -> None:
        """Run what the machine wants run."""
        if not self.anomaly:
            self._execute(run)
            return
        trail = current_trail.get() if run.source == ROOTS else self.context.trails.get(run.source or 0, "")
        with watched(self._plan.nodes(), trail, f"worker {self.machine.me}"):
            self._execute(run)

    def _execute(self, run: Run) -> None:
        if run.source is None:
            captured = self._execution.run((), None, run.units)
        else:
            gradients = self._came.pop(run.source)
            if run.source == ROOTS:
                edges = self._roots
            else:
                send = self.context.sends[run.source]
                edges = send.next_functions
                if send.devices is not None:
                    gradients = moved(gradients, send.devices)
            start = zip(edges, gradients, strict=True)
            captured = self._execution.run(start, self._plan.sources[run.source], run.units)
        self._distribute(captured)

    def take_gradients(self, target: Target) -> list[Gradient]:
        """The gradients for a target; all None if the graph computed none."""
        with recorded(RECEIVE):
            return self._going.pop(target, [])

    def _distribute(self, captured: Gradients) -> None:
        # a + b has one gradient for both.
        uses = Counter(map(id, captured.values())) if len(captured) > 1 else None
        for (node, index), gradient in captured.items():
            if type(node) is LEAF_TYPE:
                self._accumulate(node, gradient, uses is None or uses[id(gradient)] == 1)
            else:
                going = self._going.get(node.target)
                if going is None:
                    going = self._going[node.target] = [None] * node.count
                going[index] = gradient

    def _accumulate(self, node: Any, gradient: torch.Tensor, is_alone: bool) -> None:
        leaf = node.variable
        hooked = through_hooks(node, gradient)
        if hooked is None:
            return
        is_alone = is_alone and hooked is gradient
        context = self.context
        with context.lock:
            if self.machine.failed:
                return
            old = context.gradients.get(leaf)
            self._before.setdefault(leaf, old)
            context.gradients[leaf] = first_gradient(leaf, hooked, is_alone) if old is None else add(old, hooked)
        tell_hooks(node, hooked)

    def undo(self) -> None:
        """After a failure: the context's gradients are as they were before the pass."""
        gradients = self.context.gradients
        with self.context.lock:
            for leaf, gradient in self._before.items():
                if gradient is None:
                    gradients.pop(leaf, None)
                else:
                    gradients[leaf] = gradient
            self._before.clear()
