"""Running parts of the local graph on torch's engine.

Rules that hold here:

- A node runs once, with the sum of all gradients that reach it. Where that is not there yet, it is kept in ``pending``.
- The engine never sees a node that is not ready, because it would run that node's tensor hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from farprop._torch import backward_hooks, input_metadata, run_backward
from farprop.runtime.gradients.graph import Edge, Node, Plan, Reach, reach_from
from farprop.runtime.gradients.hooks import run_behind, run_in_front
from farprop.runtime.gradients.leaves import add
from farprop.runtime.gradients.nodes import LEAF_TYPE, RECEIVE_TYPE, noting

Gradient = torch.Tensor | None
Gradients = dict[Edge, torch.Tensor]
_FEW = 64  # nodes


class _Stop(Exception):
    """Ends the engine after one node."""


def _run_engine(roots: Gradients, sinks: tuple[GradientEdge, ...], keep_graph: bool) -> Sequence[Gradient]:
    """Run from the roots to these sinks; what comes out at them. Without sinks everything behind the roots runs, and
    leaves there would get their ``.grad``.
    """
    captured = run_backward(
        tuple([GradientEdge(node, index) for node, index in roots]),
        tuple(roots.values()),
        keep_graph,
        False,
        sinks,
        True,  # some sinks may get nothing
        not sinks,  # to .grad
    )
    return captured or ()


def run_graph(roots: Gradients, reach: Reach, keep_graph: bool) -> Gradients:
    """Run all that the roots reach, with all hooks but those of leaves' nodes; the gradients that come out at leaves
    and receives.
    """
    if reach.is_leaves_alone and not any(backward_hooks(leaf.variable) for leaf in reach.leaves):
        return roots  # the engine would give them back as they are
    if not roots:
        return {}
    if not reach.leaves and len(reach.nodes) > _FEW and all(node.on_cpu for node, _ in reach.receives):
        return _run_to_the_end(roots, keep_graph)
    captured = _run_engine(roots, reach.sink_edges(), keep_graph)
    gradients = {edge: gradient for edge, gradient in zip(reach.sinks, captured, strict=True) if gradient is not None}
    for node in {node for node, _ in reach.receives if node.is_hooked}:
        _run_hooks(node, gradients)
    return gradients


def _run_to_the_end(roots: Gradients, keep_graph: bool) -> Gradients:
    """Where there are no leaves, the engine need not stop anywhere: receives note what they get. If the graph is large,
    it is slower if it has to be told where to stop.
    """
    outer, noting.gradients = noting.gradients, {}
    try:
        _run_engine(roots, (), keep_graph)
        return noting.gradients
    finally:
        noting.gradients = outer


def _run_hooks(node: Node, gradients: Gradients) -> None:
    """The hooks of a receive that the engine stopped at."""
    came = tuple([gradients.pop((node, index), None) for index in range(node.count)])
    if any(gradient is not None for gradient in came):
        came = run_in_front(node, came)
        run_behind(node, (None,), came)
        for index, gradient in enumerate(came):
            if gradient is not None:
                gradients[node, index] = gradient


def put(edge: Edge, gradient: torch.Tensor, gradients: Gradients) -> None:
    """One more gradient for an edge."""
    old = gradients.get(edge)
    gradients[edge] = gradient if old is None else add(old, gradient)


class Execution:
    """The part of one pass that runs here. Runs must not overlap: the protocol sees to it."""

    def __init__(self, plan: Plan, keep_graph: bool) -> None:
        self._plan = plan
        self._keep_graph = keep_graph
        self._pending: dict[int, Gradients] = {}  # what waits at units that are not ready
        self._ready: set[int] = set()

    def run(self, start: Iterable[tuple[Edge, Gradient]], reach: Reach | None, units: Iterable[int]) -> Gradients:
        """Feed gradients to the graph and run what is ready; the gradients that come out at leaves and receives.

        ``reach`` is what the edges in ``start`` lead to, ``units`` are those that are ready from now on.
        """
        roots: Gradients = {}
        self._ready.update(units)
        for unit in units:
            roots.update(self._pending.pop(unit, {}))
        is_new = not roots
        for edge, gradient in start:
            # A view of a leaf that was made with grad off says that it requires grad, and leads nowhere.
            if gradient is not None and edge[0] is not None:
                self._place(edge, gradient, roots)
        if self._plan.unit_of:
            if len(self._ready) < len(self._plan.units):
                roots = self._by_hand(roots)
                is_new = False
            if not is_new or reach is None:
                reach = reach_from(roots)
        return run_graph(roots, reach, self._keep_graph) if reach is not None else {}

    def _waits(self, node: Node) -> bool:
        unit = self._plan.unit_of.get(node)
        return unit is not None and unit not in self._ready

    def _place(self, edge: Edge, gradient: torch.Tensor, ready: Gradients) -> None:
        """To what is ready, or to what waits."""
        node = edge[0]
        if self._waits(node):
            ready = self._pending.setdefault(self._plan.unit_of[node], {})
        put(edge, gradient, ready)

    # One node at a time

    def _by_hand(self, roots: Gradients) -> Gradients:
        """Run the nodes that lead to one that waits; what the other ready ones get is returned."""
        order = self._in_front_of_waiting(roots)
        if not order:
            return roots
        inputs: dict[Node, Gradients] = {node: {} for node in order}
        others: Gradients = {}
        for edge, gradient in roots.items():
            inputs.get(edge[0], others)[edge] = gradient
        for node in order:
            came = inputs[node]
            if came:
                outputs = self._run_one(node, came)
                for edge, output in zip(node.next_functions, outputs, strict=True):
                    if edge[0] is not None and output is not None:
                        self._place(edge, output, inputs.get(edge[0], others))
        return others

    def _run_one(self, node: Node, roots: Gradients) -> Sequence[Gradient]:
        """Run a node, with all of its hooks, and nothing behind it."""
        outputs: list[Sequence[Gradient]] = []
        thread = threading.get_ident()
        # The engine has threads of its own for other devices, and ends the process if one of them is to be stopped so.
        # There it runs on to the next nodes, with their tensors' hooks.
        on_cpu = all(data.device.type == "cpu" for data in input_metadata(node) or roots.values())

        def take(gradients: Sequence[Gradient], _: Any) -> None:
            if not on_cpu:
                outputs.append(gradients)
            elif threading.get_ident() == thread:  # else another pass runs the same node
                outputs.append(gradients)
                raise _Stop

        handle = node.register_hook(take)
        try:
            sinks = tuple([GradientEdge(*edge) for edge in node.next_functions if edge[0] is not None])
            _run_engine(roots, sinks, self._keep_graph)
        except _Stop:
            pass
        finally:
            handle.remove()
        return outputs[0]

    def _in_front_of_waiting(self, roots: Iterable[Edge]) -> list[Node]:
        """The ready nodes that lead to one that waits, through ready ones; each in front of those that it leads to."""
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
