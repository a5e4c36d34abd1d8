"""One backward pass on one worker: its state machine, its part of the graph, and torch's engine.

Rules that hold here:

- A node runs once, with the sum of all gradients that reach it. Until the sum is complete, it is kept as pending.
- Torch's engine never sees a node that is not ready, because it would run that node's tensor hooks.
- A *recorded* pass (``create_graph``) runs in grad mode, and its messages are messages of the context: a later pass can
  go through it. It takes no short cut.
- ``LocalPass.lock`` guards the machine. The graph runs outside of it: one run at a time, or sources that share nothing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from itertools import starmap
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from farprop._torch import (
    backward_hooks,
    graph_exec_group,
    input_metadata,
    post_accumulate_hooks,
    profiler_enabled,
    run_backward,
    set_grad_enabled,
    set_graph_exec_group,
)
from farprop.errors import BackwardError, UsageError
from farprop.locks import lock_maker
from farprop.protocol.backward import ROOTS, BackwardStateMachine, PassId, Run, Target
from farprop.protocol.events import BACKWARD
from farprop.runtime import checkpoint_regions
from farprop.runtime.autograd.accumulate import (
    accumulated,
    add,
    hooks_of,
    recorded_sum,
    run_behind,
    run_in_front,
    run_post_hooks,
)
from farprop.runtime.autograd.anomaly import current_call_trace, watched
from farprop.runtime.autograd.contexts import Context
from farprop.runtime.autograd.graph import Edge, Node, Plan, Reach, union_of
from farprop.runtime.autograd.nodes import LEAF_TYPE, RECEIVE_TYPE, noting
from farprop.runtime.recorder import recorder
from farprop.wire.message import Gradient, Message

Gradients = dict[Edge, torch.Tensor]
Outgoing = dict[Target, list[Gradient]]
_FEW = 64  # nodes
_now = time.monotonic
_new_lock = lock_maker("local_pass")
_variable = attrgetter("variable")

# Torch's names for the events of a pass in profiles.
PASS = "torch::distributed::autograd::backward"
SEND = "torch::distributed::autograd::SendRpcBackward"
RECEIVE = "torch::distributed::autograd::RecvRpcBackward"
_NOT_PROFILED = nullcontext()

# The pass that runs in this thread, for hooks of leaves.
running_pass: ContextVar[LocalPass | None] = ContextVar("farprop_running_pass", default=None)


# Says which step changed a leaf that a pass needed; farprop.optim sets it. Takes the error, the leaves and the context.
explain_changed_leaf: Callable[[Exception, Iterable[torch.Tensor], int], str | None] | None = None

# How a run of the engine is kept apart from steps that change parameters; None while no optimizer needs that.
reading: Callable[[], AbstractContextManager[None]] | None = None


def profiled(name: str) -> AbstractContextManager[object]:
    """``with profiled(PASS):`` shows the block in the profile that this thread is under, if any."""
    return torch.autograd.profiler.record_function(name) if profiler_enabled() else _NOT_PROFILED


def size_of(gradients: Sequence[Gradient]) -> int:
    """Their size in bytes; of sparse ones, that of their dense form."""
    return sum([gradient.numel() * gradient.element_size() for gradient in gradients if gradient is not None])


class LocalPass:
    """One backward pass on one worker."""

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
        plan: Plan | None = None,
    ) -> None:
        self.context = context
        self.id = pass_id
        self.fast = fast
        self.keep_graph = keep_graph
        self.anomaly = anomaly
        self.create_graph = create_graph
        self._takes_short_cuts = not (anomaly or create_graph)
        self.lock = _new_lock()
        self.partners: set[int] = set()  # ranks of the workers that gradients were exchanged with
        if plan is None:
            plan = context.plan(roots, again=keep_graph, fast=fast)
        self._plan = plan
        self._roots = roots
        self.machine = BackwardStateMachine(own_rank, pass_id.origin, fast, plan.units, frozenset(plan.sources))
        self._execution: _Execution | None = None
        self._arrived: dict[int, Sequence[Gradient]] = {}
        self._outgoing: Outgoing = {}
        # For ``undo``: earlier gradients, and the messages of a recorded pass.
        self._before: dict[torch.Tensor, torch.Tensor | None] = {}
        self._messages: list[int] = []

    # A source that shares nothing with others

    def start_unshared(self, source: int) -> Sequence[Target] | None:
        """Begin the short cut for a source that shares no nodes with others.

        Returns:
            The targets of its gradients; the caller then calls ``run_unshared``. None if the short cut does not apply:
            the caller stores the gradients with ``store``, and performs the machine's actions.
        """
        if not self._takes_short_cuts or profiler_enabled():
            return None
        with self.lock:
            return self.machine.start_unshared(source)

    def run_unshared(self, source: int, gradients: Sequence[Gradient]) -> Outgoing:
        """Feed a source's gradients to the graph; returns the gradients for its targets."""
        return self._run_from((source,), self._entries(source, gradients), self._plan.sources[source])

    def _run_from(self, sources: Sequence[int], entries: Iterable[tuple[Edge, Gradient]], reach: Reach) -> Outgoing:
        roots: Gradients = {}
        for edge, gradient in entries:
            if gradient is not None and edge[0] is not None:
                roots[edge] = gradient if edge not in roots else add(roots[edge], gradient)
        outgoing: Outgoing = {}
        began = _now() if recorder.is_on else 0.0
        outer = running_pass.set(self)
        try:
            self._distribute(run_graph(roots, reach, self.keep_graph, False), outgoing)
        except BaseException as error:
            raise self._blamed(sources[0], error) from error
        finally:
            running_pass.reset(outer)
            if began:
                self._record(began, sources)
        return outgoing

    def start_together(self, sources: Sequence[int], to: int | None) -> list[Sequence[Target]] | None:
        """Begin the short cut for several sources that lead to no other worker than ``to``, as ``start_unshared``."""
        if not self._takes_short_cuts or profiler_enabled():
            return None
        with self.lock:
            return self.machine.start_together(sources, to)

    def run_together(self, sources: Sequence[int], gradients: Sequence[Sequence[Gradient]]) -> Outgoing:
        """Feed the gradients of several sources to the graph at once; returns the gradients for their targets."""
        entries = [entry for pair in zip(sources, gradients, strict=True) for entry in self._entries(*pair)]
        return self._run_from(sources, entries, union_of([self._plan.sources[source] for source in sources]))

    def _blamed(self, source: int | None, error: BaseException) -> BaseException:
        """The error to report. Errors of its own graph reach the caller of ``backward`` unchanged."""
        if not isinstance(error, Exception) or isinstance(error, BackwardError):
            return error
        if explain_changed_leaf is not None and isinstance(error, RuntimeError):
            leaves = [node.variable for node in self._plan.nodes() if type(node) is LEAF_TYPE]
            text = explain_changed_leaf(error, leaves, self.context.id)
            if text is not None:
                error.add_note(text)
        if source == ROOTS:
            return error
        blamed = BackwardError(f"Error on Node {self.machine.own_rank}: {error}")
        for note in getattr(error, "__notes__", ()):
            blamed.add_note(note)
        return blamed

    # Any source

    def store(self, source: int, gradients: Sequence[Gradient]) -> None:
        """Keep the gradients of a source until the machine returns a ``Run`` for it."""
        self._arrived[source] = gradients

    def store_outgoing(self, outgoing: Outgoing) -> None:
        """Keep outgoing gradients until ``take_gradients`` takes them."""
        self._outgoing.update(outgoing)

    def run(self, run: Run) -> None:
        """Perform a ``Run`` of the machine."""
        began = _now() if recorder.is_on else 0.0
        outer = running_pass.set(self)
        grad_mode = torch.is_grad_enabled()
        try:
            if self.create_graph:
                set_grad_enabled(True)
            if not self.anomaly:
                self._run(run)
                return
            source = run.source
            trace = current_call_trace.get() if source == ROOTS else self.context.call_traces.get(source or 0, "")
            with watched(self._plan.nodes(), trace, f"worker {self.machine.own_rank}"):
                self._run(run)
        except BaseException as error:
            raise self._blamed(run.source, error) from error
        finally:
            set_grad_enabled(grad_mode)
            running_pass.reset(outer)
            if began:
                self._record(began, () if run.source is None else (run.source,))

    def _record(self, began: float, sources: Sequence[int]) -> None:
        """Tell who listens that a part of the graph has run, and for which of this worker's sends."""
        recorder.span(BACKWARD, "backward", began, **self.details, messages=[source for source in sources if source])

    @property
    def details(self) -> dict[str, Any]:
        """What events of this pass have in common."""
        return {"context": self.context.id, "origin": self.id.origin, "pass": self.id.number}

    def _run(self, run: Run) -> None:
        execution = self._execution
        if execution is None:
            execution = self._execution = _Execution(self._plan, self.keep_graph, self.create_graph)
        if run.source is None:
            captured = execution.run((), None, run.units)
        else:
            entries = self._entries(run.source, self._arrived.pop(run.source))
            captured = execution.run(entries, self._plan.sources[run.source], run.units)
        self._distribute(captured, self._outgoing)

    def _entries(self, source: int, gradients: Sequence[Gradient]) -> Iterable[tuple[Edge, Gradient]]:
        """The edges of a source, with their gradients. If ``gradients`` is empty, no tensor of the source was used."""
        if not gradients:
            return ()
        if source == ROOTS:
            return zip(self._roots, gradients, strict=True)
        send = self.context.sends[source]
        if send.devices is not None:
            # To the devices that the inverse device map would give. The send remembers them, so no map is needed.
            pairs = zip(gradients, send.devices, strict=True)
            gradients = [None if gradient is None else gradient.to(device) for gradient, device in pairs]
        return zip(send.edges or send.next_functions, gradients, strict=True)

    def outgoing_bytes(self, target: Target) -> int:
        """The size of the gradients for a target."""
        return size_of(self._outgoing.get(target, ()))

    def take_gradients(self, target: Target) -> list[Gradient]:
        """Remove and return the gradients for a target; an empty list if the graph computed none."""
        with profiled(RECEIVE):
            return self._outgoing.pop(target, [])

    def _distribute(self, captured: Gradients, outgoing: Outgoing) -> None:
        """Distribute gradients to the leaves of this worker and to the outgoing messages."""
        if not captured:
            return
        uses: Counter[int] | None = None  # how often each gradient occurs, if any occurs twice: a + b has one for both
        if len(set(map(id, captured.values()))) < len(captured):
            uses = Counter(map(id, captured.values()))
        for (node, index), gradient in captured.items():
            if type(node) is LEAF_TYPE:
                self._accumulate(node, gradient, uses is None or uses[id(gradient)] == 1)
            else:
                target = node.target
                gradients = outgoing.get(target)
                if gradients is None:
                    gradients = outgoing[target] = [None] * node.count
                gradients[index] = gradient

    def _accumulate(self, node: Node, gradient: torch.Tensor, is_alone: bool) -> None:
        leaf = node.variable
        in_front, behind = hooks_of(node)
        hooked = gradient
        if in_front:
            (result,) = run_in_front(in_front, (gradient,), self.create_graph)
            if result is None:
                return
            hooked = result
        context = self.context
        with context.lock:
            if self.machine.failed:
                return
            old = context.gradients.get(leaf)
            self._before.setdefault(leaf, old)
            if self.create_graph:
                context.gradients[leaf] = recorded_sum(leaf, old, hooked)
            else:
                context.gradients[leaf] = accumulated(leaf, old, hooked, is_alone and hooked is gradient)
        after = post_accumulate_hooks(leaf)
        if after or behind:
            run_post_hooks(leaf, after, behind, hooked, self.create_graph)

    def replace(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Replace the gradient that the pass has computed for a leaf."""
        with self.context.lock:
            if not self.machine.failed:
                self._before.setdefault(leaf, self.context.gradients.get(leaf))
                self.context.gradients[leaf] = gradient

    # Messages of a recorded pass

    def record(self, message: Message, to: int, tensors: Sequence[torch.Tensor]) -> None:
        """Make a message with gradients one of the context's, before it is sent. ``tensors`` are those that require
        grad.
        """
        self.context.attach(message, to, tensors)
        if message.autograd is not None and message.autograd.message_id:
            self._note_message(message.autograd.message_id)

    def note_received(self, gradients: Sequence[Gradient]) -> None:
        """Gradients arrived in a message of the context."""
        nodes: set[Node] = {gradient.grad_fn for gradient in gradients if gradient is not None}
        for node in nodes:
            if type(node) is RECEIVE_TYPE:
                self._note_message(node.target.message_id)

    def _note_message(self, message_id: int) -> None:
        self._messages.append(message_id)
        # In this order: whoever undoes the pass has marked it as failed before.
        if self.machine.failed:
            self.context.forget_messages((message_id,))

    def undo(self) -> None:
        """After a failure, restore the context's gradients from before the pass, and remove its messages."""
        if self._messages:
            self.context.forget_messages(self._messages)
        with self.context.lock:
            gradients = self.context.gradients
            if self.context.is_released:
                self._before.clear()
            for leaf, gradient in self._before.items():
                if gradient is None:
                    gradients.pop(leaf, None)
                else:
                    gradients[leaf] = gradient
            self._before.clear()


# Torch's engine


class _Stop(Exception):
    """Ends the engine after one node."""


def _run_engine(
    roots: Gradients, sinks: tuple[GradientEdge, ...], keep_graph: bool, create_graph: bool
) -> Sequence[Gradient]:
    """Run torch's engine from the roots; returns the gradients at the sinks.

    Without sinks, all nodes behind the roots run, and leaves accumulate into ``.grad``.
    """
    edges = tuple(starmap(GradientEdge, roots))
    allow_unreachable = True  # some sinks may get no gradient
    accumulate = not sinks  # into .grad
    values = tuple(roots.values())
    args = edges, values, keep_graph, create_graph, sinks, allow_unreachable, accumulate
    if reading is None and not checkpoint_regions.is_used:
        return run_backward(*args) or ()
    with nullcontext() if reading is None else reading():
        local = running_pass.get()
        if local is None or graph_exec_group() is not None:
            return run_backward(*args) or ()
        try:
            # The pass goes on with what a checkpointed function has computed again, in its next runs of the engine.
            set_graph_exec_group(local.id)
            return run_backward(*args) or ()
        finally:
            set_graph_exec_group(None)


def run_graph(roots: Gradients, reach: Reach, keep_graph: bool, create_graph: bool) -> Gradients:
    """Run all nodes that the roots reach; returns the gradients at leaves and recv nodes.

    All hooks run, except for those of the leaves' nodes.
    """
    if reach.is_leaves_alone and not any(map(backward_hooks, map(_variable, reach.leaves))):
        return roots  # the engine would return them unchanged
    if not roots:
        return {}
    if reach.is_pruned or create_graph:
        if not reach.sinks:
            return {}
    elif not reach.leaves and len(reach.nodes) > _FEW and all(node.on_cpu for node, _ in reach.receives):
        return _run_to_the_end(roots, reach, keep_graph)
    gradients: Gradients = {}
    hooked: set[Node] = set()
    captured = _run_engine(roots, reach.sink_edges, keep_graph, create_graph)
    for edge, gradient in zip(reach.sinks, captured, strict=True):
        if gradient is not None:
            gradients[edge] = gradient
    for node, _ in reach.receives:
        if node.is_hooked:
            hooked.add(node)
    for node in hooked:
        _run_hooks(node, gradients, create_graph)
    return gradients


def _run_to_the_end(roots: Gradients, reach: Reach, keep_graph: bool) -> Gradients:
    """Run a graph without leaves. The engine needs no sinks, because recv nodes record their gradients; with sinks it
    is slower in large graphs.
    """
    outer, noting.gradients = noting.gradients, {}
    try:
        _run_engine(roots, (), keep_graph, create_graph=False)
        if not noting.gradients.keys() <= reach.receives:
            raise UsageError(
                "A backward function ran a backward pass of its own, which came to a call. Such a pass does not go on "
                "at other workers. Use torch.utils.checkpoint for functions that make calls, or keep calls out of it."
            )
        return noting.gradients
    finally:
        noting.gradients = outer


def _run_hooks(node: Node, gradients: Gradients, create_graph: bool) -> None:
    """Run the hooks of a recv node at which the engine stopped."""
    came = tuple([gradients.pop((node, index), None) for index in range(node.count)])
    if any(gradient is not None for gradient in came):
        in_front, behind = hooks_of(node)
        if in_front:
            came = run_in_front(in_front, came, create_graph)
        if behind:
            run_behind(behind, (None,), came, create_graph)
        for index, gradient in enumerate(came):
            if gradient is not None:
                gradients[node, index] = gradient


def put(edge: Edge, gradient: torch.Tensor, gradients: Gradients) -> None:
    """Add a gradient to the sum for an edge."""
    old = gradients.get(edge)
    gradients[edge] = gradient if old is None else add(old, gradient)


class _Execution:
    """Runs units of a graph whose sources share nodes. Runs must not overlap; the state machine ensures it."""

    def __init__(self, plan: Plan, keep_graph: bool, create_graph: bool) -> None:
        self._plan = plan
        self._keep_graph = keep_graph
        self._create_graph = create_graph
        self._pending: dict[int, Gradients] = {}  # gradients for units that are not ready
        self._ready: set[int] = set()
        self._captured: Gradients = {}  # at nodes that this run has executed one by one

    def run(self, start: Iterable[tuple[Edge, Gradient]], reach: Reach | None, units: Iterable[int]) -> Gradients:
        """Feed gradients to the graph and run the nodes that are ready.

        Args:
            start: edges and their gradients.
            reach: what the edges in ``start`` reach.
            units: the units that become ready now.

        Returns:
            The gradients at leaves and recv nodes.
        """
        roots: Gradients = {}
        self._ready.update(units)
        for unit in units:
            roots.update(self._pending.pop(unit, {}))
        is_new = not roots
        for edge, gradient in start:
            # A view of a leaf that was made with grad off requires grad, but has no edge.
            if gradient is not None and edge[0] is not None:
                self._place(edge, gradient, roots)
        if self._plan.unit_of:
            if len(self._ready) < len(self._plan.units):
                roots = self._by_hand(roots)
                is_new = False
            if not is_new or reach is None:
                reach = self._plan.reach_from(roots)
        gradients = run_graph(roots, reach, self._keep_graph, self._create_graph) if reach is not None else {}
        if self._captured:
            gradients = gradients | self._captured
            self._captured.clear()
        return gradients

    def _waits(self, node: Node) -> bool:
        unit = self._plan.unit_of.get(node)
        return unit is not None and unit not in self._ready

    def _place(self, edge: Edge, gradient: torch.Tensor, ready: Gradients) -> None:
        """Add a gradient to ``ready``, or to the pending ones if its node is not ready."""
        node = edge[0]
        if self._waits(node):
            ready = self._pending.setdefault(self._plan.unit_of[node], {})
        put(edge, gradient, ready)

    # One node at a time

    def _by_hand(self, roots: Gradients) -> Gradients:
        """Run one by one the ready nodes that lead to a pending one; returns the gradients for other ready nodes."""
        order = self._in_front_of_waiting(roots)
        if not order:
            return roots
        inputs: dict[Node, Gradients] = {node: {} for node in order}
        others: Gradients = {}
        for edge, gradient in roots.items():
            inputs.get(edge[0], others)[edge] = gradient
        for node in order:
            came = inputs[node]
            for edge in self._plan.captures.intersection(came):
                self._captured[edge] = came[edge]
            if came:
                outputs = self._run_one(node, came)
                for edge, output in zip(node.next_functions, outputs, strict=True):
                    if edge[0] is not None and output is not None:
                        self._place(edge, output, inputs.get(edge[0], others))
        return others

    def _run_one(self, node: Node, roots: Gradients) -> Sequence[Gradient]:
        """Run a single node, with all of its hooks."""
        outputs: list[Sequence[Gradient]] = []
        thread = threading.get_ident()
        # The engine has its own threads for other devices, and an exception to stop it there would end the process. On
        # other devices it therefore runs the next nodes, too, with the hooks of their tensors.
        on_cpu = all(data.device.type == "cpu" for data in input_metadata(node) or roots.values())

        def take(gradients: Sequence[Gradient], _: Any) -> None:
            if not on_cpu:
                outputs.append(gradients)
            elif threading.get_ident() == thread:  # otherwise another pass runs the same node
                outputs.append(gradients)
                raise _Stop

        handle = node.register_hook(take)
        try:
            sinks = tuple([GradientEdge(*edge) for edge in node.next_functions if edge[0] is not None])
            _run_engine(roots, sinks, self._keep_graph, self._create_graph)
        except _Stop:
            pass
        finally:
            handle.remove()
        return outputs[0]

    def _in_front_of_waiting(self, roots: Iterable[Edge]) -> list[Node]:
        """The ready nodes that lead to a pending one through ready ones, in topological order."""
        leads: dict[Node, bool] = {}
        order: list[Node] = []
        stack: list[tuple[Node, bool]] = [(node, False) for node, _ in roots]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                if any(self._waits(n) or leads.get(n, False) for n, _ in node.next_functions if n is not None):
                    leads[node] = True
                    order.append(node)
            elif node not in leads:
                leads[node] = False
                if type(node) not in (LEAF_TYPE, RECEIVE_TYPE):
                    stack.append((node, True))
                    stack.extend([(n, False) for n, _ in node.next_functions if n is not None and not self._waits(n)])
        order.reverse()
        return order
