"""Looking at the graph that torch built on this worker: what a source reaches, and what several sources share.

``next_functions`` is a constant of a node, so what was found once stays true. Torch's objects for nodes are the same
as long as somebody holds them; the sets here do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.autograd.graph import GradientEdge

from farprop.errors import UsageError
from farprop.protocol.passes import Target, Unit
from farprop.runtime.gradients.leaves import has_hooks
from farprop.runtime.gradients.nodes import LEAF_TYPE, RECEIVE_TYPE

Node = Any
Edge = tuple[Node, int]  # an input of a node


class Reach:
    """What can be reached from some edges. Receives are there once for each of their tensors that is used."""

    __slots__ = ("_edges", "is_leaves_alone", "leaves", "nodes", "receives", "sinks")

    def __init__(self, nodes: set[Node], leaves: list[Node], receives: set[Edge]) -> None:
        self.nodes = nodes
        self.leaves = leaves
        self.receives = receives
        self.is_leaves_alone = len(nodes) == len(leaves)  # nothing lies between the edges and leaves
        self.sinks: list[Edge] = [*[(leaf, 0) for leaf in leaves], *receives]
        self._edges: tuple[GradientEdge, ...] | None = None

    def sink_edges(self) -> tuple[GradientEdge, ...]:
        """The sinks, for torch's engine."""
        if self._edges is None:
            self._edges = tuple([GradientEdge(node, index) for node, index in self.sinks])
        return self._edges

    def targets(self) -> dict[Target, Node]:
        return {node.target: node for node, _ in self.receives}


def reach_from(edges: Iterable[Edge]) -> Reach:
    """Walk the graph. This is the one loop over all nodes of a pass, so it is kept short."""
    seen: set[Node] = {None}
    leaves: list[Node] = []
    receives: set[Edge] = set()
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
                    receives.add((node, index))
                else:
                    push(node.next_functions)
            elif type(node) is RECEIVE_TYPE:
                receives.add((node, index))
    seen.discard(None)
    return Reach(seen, leaves, receives)


class Plan:
    """How the sources of a worker share its graph."""

    def __init__(self, sources: Mapping[int, Reach]) -> None:
        self.sources = sources
        self.units: list[Unit] = []
        self.unit_of: dict[Node, int] = {}  # of nodes that more than one source reaches
        shared = _shared(sources)
        self.is_constant = not shared  # else the hooks of leaves matter, which come and go
        masks: dict[frozenset[int], int] = {}
        targets: list[list[Target]] = []
        for source, reach in sources.items():
            masks[frozenset((source,))] = len(targets)
            targets.append([target for target, node in reach.targets().items() if node not in shared])
        for node in shared:
            if type(node) is LEAF_TYPE and not has_hooks(node):
                continue  # gradients are added as they come
            mask = frozenset(source for source, reach in sources.items() if node in reach.nodes)
            number = masks.get(mask)
            if number is None:
                number = masks[mask] = len(targets)
                targets.append([])
            self.unit_of[node] = number
            if type(node) is RECEIVE_TYPE:
                targets[number].append(node.target)
        self.units = [Unit(mask, tuple(targets[number])) for mask, number in masks.items()]

    def nodes(self) -> set[Node]:
        return set().union(*[reach.nodes for reach in self.sources.values()])


def _shared(sources: Mapping[int, Reach]) -> set[Node]:
    shared: set[Node] = set()
    seen: set[Node] = set()
    for reach in sources.values():
        if not seen.isdisjoint(reach.nodes):
            shared |= seen & reach.nodes
        seen |= reach.nodes
    return shared


def check_context(reach: Reach, context_id: int) -> None:
    """A pass can't go on through a message of another context."""
    for node, _ in reach.receives:
        if node.context_id != context_id:
            raise UsageError(
                f"The graph leads to a tensor that came from worker {node.target.worker} in autograd context "
                f"{node.context_id}, but the backward pass is of context {context_id}. Use tensors only in the context "
                "that they came in, or detach() them."
            )
