"""One backward pass on one worker: the protocol's machine, and the graph that it speaks of."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from farprop.protocol.passes import ROOTS, GradientPass, PassId, Run, Target
from farprop.runtime.gradients.anomaly import current_trail, watched
from farprop.runtime.gradients.contexts import Context
from farprop.runtime.gradients.execution import Execution, Gradient, Gradients, put, run_graph
from farprop.runtime.gradients.graph import Edge
from farprop.runtime.gradients.leaves import add, first_gradient, tell_hooks, through_hooks
from farprop.runtime.gradients.nodes import LEAF_TYPE
from farprop.runtime.gradients.payload import moved
from farprop.runtime.gradients.records import RECEIVE, is_recording, recorded
from farprop.runtime.gradients.running import running_pass

Going = dict[Target, list[Gradient]]


class LocalPass:
    """``lock`` guards the machine. The graph runs outside of it: one run at a time, or sources that share nothing."""

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
        self._came: dict[int, Sequence[Gradient]] = {}
        self._going: Going = {}
        self._before: dict[torch.Tensor, torch.Tensor | None] = {}  # gradients of the context that this pass changed

    def bring(self, source: int, gradients: Sequence[Gradient]) -> None:
        """Keep the gradients of a source until the machine wants them."""
        self._came[source] = gradients

    def straight(self, source: int) -> Sequence[Target] | None:
        """If the source need not wait for anything, and nobody looks on: where its gradients lead. Then
        ``execute_straight`` has to follow; else ``bring``, and what the machine wants.
        """
        if self.anomaly or is_recording():
            return None
        with self.lock:
            return self.machine.straight(source)

    def execute_straight(self, source: int, gradients: Sequence[Gradient]) -> Going:
        """Feed a source's gradients to the graph; those that come out for its targets."""
        roots: Gradients = {}
        for edge, gradient in self._start(source, gradients):
            if gradient is not None and edge[0] is not None:
                put(edge, gradient, roots)
        going: Going = {}
        outer = running_pass.set(self)
        try:
            self._distribute(run_graph(roots, self._plan.sources[source], self.keep_graph), going)
        finally:
            running_pass.reset(outer)
        return going

    def keep(self, going: Going) -> None:
        """Keep these until ``take_gradients`` asks for them."""
        self._going.update(going)

    def execute(self, run: Run) -> None:
        """Run what the machine wants run."""
        outer = running_pass.set(self)
        try:
            self._watch_and_execute(run)
        finally:
            running_pass.reset(outer)

    def _watch_and_execute(self, run: Run) -> None:
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
            start = self._start(run.source, self._came.pop(run.source))
            captured = self._execution.run(start, self._plan.sources[run.source], run.units)
        self._distribute(captured, self._going)

    def _start(self, source: int, gradients: Sequence[Gradient]) -> Iterable[tuple[Edge, Gradient]]:
        """The edges behind a source, with what they get. No gradients at all: nothing of it was used."""
        if not gradients:
            return ()
        if source == ROOTS:
            return zip(self._roots, gradients, strict=True)
        send = self.context.sends[source]
        if send.devices is not None:
            gradients = moved(gradients, send.devices)
        return zip(send.next_functions, gradients, strict=True)

    def take_gradients(self, target: Target) -> list[Gradient]:
        """The gradients for a target; all None if the graph computed none."""
        with recorded(RECEIVE):
            return self._going.pop(target, [])

    def _distribute(self, captured: Gradients, going: Going) -> None:
        """To leaves here, and to what is going to others."""
        uses: Counter[int] | None = None
        for (node, index), gradient in captured.items():
            if type(node) is LEAF_TYPE:
                if uses is None:
                    uses = Counter(map(id, captured.values()))  # a + b has one gradient for both
                self._accumulate(node, gradient, uses[id(gradient)] == 1)
            else:
                gradients = going.get(node.target)
                if gradients is None:
                    gradients = going[node.target] = [None] * node.count
                gradients[index] = gradient

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

    def replace(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Another gradient in the place of the one that the pass has found."""
        with self.context.lock:
            if not self.machine.failed:
                self._before.setdefault(leaf, self.context.gradients.get(leaf))
                self.context.gradients[leaf] = gradient

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
