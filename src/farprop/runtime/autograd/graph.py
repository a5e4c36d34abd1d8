"""The autograd graph of this worker: the nodes that a source reaches, and those that several sources share.

A *source* is where gradients enter the graph: the roots of a pass, or a send whose gradients arrive from another
worker. A node's ``next_functions`` never change, so results can be cached. Torch returns the same Python object for a
node as long as something refers to it; the sets here do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.autograd.graph import GradientEdge

from farprop.errors import UsageError
from farprop.protocol.backward import Target, Unit
from farprop.runtime.autograd.accumulate import has_hooks
from farprop.runtime.autograd.nodes import LEAF_TYPE, RECEIVE_TYPE

Node = Any
Edge = tuple[Node, int]  # an input of a node


class Reach:
    """The nodes that some edges reach. ``receives`` has one edge for each used tensor of a recv node.

    A pruned one has only the nodes that lead to what is wanted: ``captures``, and recv nodes of needed messages.
    """

    __slots__ = ("is_leaves_alone", "is_pruned", "leaves", "nodes", "receives", "sink_edges", "sinks", "targets")

    def __init__(
        self,
        nodes: set[Node],
        leaves: list[Node],
        receives: set[Edge],
        targets: dict[Target, Node],
        captures: Iterable[Edge] | None = None,
    ) -> None:
        self.nodes = nodes
        self.leaves = leaves
        self.receives = receives
        self.targets = targets
        self.is_leaves_alone = len(nodes) == len(leaves)  # the edges lead directly to leaves
        sinks: list[Edge] = []
        sink_edges: list[GradientEdge] = []
        for leaf in leaves:
            sinks.append((leaf, 0))
            sink_edges.append(GradientEdge(leaf, 0))
        for edge in receives:
            sinks.append(edge)
            sink_edges.append(GradientEdge(*edge))
        self.is_pruned = captures is not None
        for edge in captures or ():
            if edge not in receives and type(edge[0]) is not LEAF_TYPE:
                sinks.append(edge)
                sink_edges.append(GradientEdge(*edge))
        self.sinks = sinks
        self.sink_edges = tuple(sink_edges)  # leaves and recv nodes, in the form that torch's engine takes


def union_of(reaches: Sequence[Reach]) -> Reach:
    """What several sources reach together."""
    if len(reaches) == 1:
        return reaches[0]
    nodes: set[Node] = set()
    leaves: dict[Node, None] = {}
    receives: set[Edge] = set()
    targets: dict[Target, Node] = {}
    captures: set[Edge] | None = None
    for reach in reaches:
        nodes |= reach.nodes
        leaves.update(dict.fromkeys(reach.leaves))
        receives |= reach.receives
        targets |= reach.targets
        if reach.is_pruned:
            captures = (captures or set()).union(reach.sinks)
    return Reach(nodes, list(leaves), receives, targets, captures)


def reach_from(edges: Iterable[Edge], context_id: int | None) -> Reach:
    """Walk the graph from these edges. This is the only loop over all nodes of a pass, so it is kept short.

    Raises:
        UsageError: the graph leads to a message of another autograd context than this one (None: of any).
    """
    seen: set[Node] = {None}
    leaves: list[Node] = []
    receives: set[Edge] = set()
    targets: dict[Target, Node] = {}
    stack: list[Iterable[Edge]] = [edges]
    pop, push, add = stack.pop, stack.append, seen.add
    while stack:
        for node, index in pop():
            if node not in seen:
                add(node)
                kind = type(node)
                if kind is LEAF_TYPE:
                    leaves.append(node)
                elif kind is RECEIVE_TYPE:
                    if context_id is not None and node.context_id != context_id:
                        raise _wrong_context(node, context_id)
                    receives.add((node, index))
                    targets[node.target] = node
                else:
                    push(node.next_functions)
            elif type(node) is RECEIVE_TYPE:
                receives.add((node, index))
    seen.discard(None)
    return Reach(seen, leaves, receives, targets)


def _wrong_context(node: Node, context_id: int) -> UsageError:
    return UsageError(
        f"The graph leads to a tensor that came from worker {node.target.worker} in autograd context "
        f"{node.context_id}, but the backward pass is of context {context_id}. Use tensors only in the context that "
        "they came in, or detach() them."
    )


def leading_to(edges: Iterable[Edge], ends: Callable[[Node], bool]) -> set[Node]:
    """The nodes behind these edges that are ends, or lead to one."""
    leads: dict[Node, bool] = {}
    stack: list[tuple[Node, bool]] = [(node, False) for node, _ in edges if node is not None]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            leads[node] = ends(node) or any(leads[n] for n, _ in node.next_functions if n is not None)
        elif node not in leads:
            is_last = type(node) in (LEAF_TYPE, RECEIVE_TYPE)
            leads[node] = is_last and ends(node)
            if not is_last:
                stack.append((node, True))
                stack.extend([(n, False) for n, _ in node.next_functions if n is not None])
    return {node for node, is_leading in leads.items() if is_leading}


class Plan:
    """How the sources of a worker share its graph."""

    captures: frozenset[Edge] = frozenset()
    """Where gradients are taken without an end of the graph there."""

    def __init__(self, sources: Mapping[int, Reach]) -> None:
        self.sources = sources
        self.units: list[Unit] = []
        self.unit_of: dict[Node, int] = {}  # for nodes that more than one source reaches
        shared: set[Node] = set()
        seen: set[Node] = set()
        for reach in sources.values():
            if not seen.isdisjoint(reach.nodes):
                shared |= seen & reach.nodes
            seen |= reach.nodes
        self.is_constant = not shared  # otherwise the plan depends on the hooks of leaves, which may change
        if shared:
            self._divide(shared)
        else:
            for source, reach in sources.items():
                self.units.append(Unit(frozenset((source,)), tuple(reach.targets)))

    def _divide(self, shared: set[Node]) -> None:
        """Make one unit per source, of the nodes that it alone reaches, and one per set of sources that share nodes."""
        numbers: dict[frozenset[int], int] = {}
        targets: list[list[Target]] = []
        for source, reach in self.sources.items():
            numbers[frozenset((source,))] = len(targets)
            targets.append([target for target, node in reach.targets.items() if node not in shared])
        for node in shared:
            if type(node) is LEAF_TYPE and not has_hooks(node):
                continue  # a leaf without hooks adds gradients as they arrive
            sharers = frozenset(source for source, reach in self.sources.items() if node in reach.nodes)
            number = numbers.get(sharers)
            if number is None:
                number = numbers[sharers] = len(targets)
                targets.append([])
            self.unit_of[node] = number
            if type(node) is RECEIVE_TYPE and node.target in self.sources[min(sharers)].targets:
                targets[number].append(node.target)
        self.units = [Unit(sharers, tuple(targets[number])) for sharers, number in numbers.items()]

    def nodes(self) -> set[Node]:
        return set().union(*[reach.nodes for reach in self.sources.values()])

    def reach_from(self, edges: Iterable[Edge]) -> Reach:
        """What these edges reach, which are edges of the plan's graph."""
        return reach_from(edges, None)


class PrunedPlan(Plan):
    """The plan of a pass that computes only some gradients: nodes that lead to none of them are left out.

    Args:
        reaches: what each source that is needed reaches.
        captures: the edges whose gradients are wanted.
        targets: the sends of other workers, and of this one, that are needed.
    """

    def __init__(
        self, reaches: Mapping[int, tuple[Sequence[Edge], Reach]], captures: Iterable[Edge], targets: Iterable[Target]
    ) -> None:
        self.captures = frozenset(captures)
        self._ends = {node for node, _ in self.captures}
        self._targets = frozenset(targets)
        edges = [edge for some, _ in reaches.values() for edge in some]
        self._leading = leading_to(edges, self._is_end)
        super().__init__({source: self._pruned(reach) for source, (_, reach) in reaches.items()})

    def _is_end(self, node: Node) -> bool:
        return node in self._ends or (type(node) is RECEIVE_TYPE and node.target in self._targets)

    def _pruned(self, reach: Reach) -> Reach:
        nodes = reach.nodes & self._leading
        leaves = [node for node in reach.leaves if node in nodes]
        receives = {edge for edge in reach.receives if edge[0].target in self._targets}
        targets = {target: node for target, node in reach.targets.items() if target in self._targets}
        return Reach(nodes, leaves, receives, targets, [edge for edge in self.captures if edge[0] in nodes])

    def reach_from(self, edges: Iterable[Edge]) -> Reach:
        return self._pruned(reach_from(edges, None))
