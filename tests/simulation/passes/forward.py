"""The graph that a forward pass leaves behind: a part on each worker, connected by messages."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from farprop.protocol.backward import ROOTS, Target, Unit

if TYPE_CHECKING:
    from tests.simulation.passes.worker import Worker
    from tests.simulation.passes.world import World


class Node(NamedTuple):
    """A local value: a leaf (no inputs), a receive (a target), or computed from other values."""

    inputs: tuple[int, ...]
    target: Target | None = None
    hooked: bool = False  # a leaf that runs once, with the sum; other leaves accumulate each gradient as it arrives


class Graph:
    """One worker's part. Nodes and sends are only ever added."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.sends: dict[int, tuple[int, ...]] = {}
        self.hidden: set[int] = set()  # gradients of recorded passes that run or have failed: programs don't have them
        self.has_forgotten = False
        self._reaches: dict[int, frozenset[int]] = {}

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def visible(self) -> list[int]:
        return [number for number in range(len(self.nodes)) if number not in self.hidden]

    def forget(self, message_ids: Iterable[int]) -> None:
        """Remove messages of a recorded pass that has failed."""
        for message_id in message_ids:
            self.has_forgotten |= self.sends.pop(message_id, None) is not None
            self._reaches.pop(message_id, None)

    def sinks(self) -> list[int]:
        """The values that nothing was made from, and that were not sent."""
        used = {number for node in self.nodes for number in node.inputs}
        used.update(number for numbers in self.sends.values() for number in numbers)
        return [number for number in self.visible() if number not in used]

    def reach(self, starts: Iterable[int]) -> frozenset[int]:
        seen: set[int] = set()
        stack = list(starts)
        while stack:
            number = stack.pop()
            if number not in seen:
                seen.add(number)
                stack += self.nodes[number].inputs
        return frozenset(seen)

    def reach_of(self, message_id: int) -> frozenset[int]:
        if message_id not in self._reaches:
            self._reaches[message_id] = self.reach(self.sends[message_id])
        return self._reaches[message_id]

    def reaches(self, roots: Iterable[int]) -> dict[int, frozenset[int]]:
        """The nodes that each source reaches."""
        found = {message_id: self.reach_of(message_id) for message_id in self.sends}
        if roots:
            found[ROOTS] = self.reach(roots)
        return found

    def leading(self, inputs: Iterable[int], targets: Iterable[Target]) -> frozenset[int]:
        """The nodes that lead to one of these values, or to a receive of one of these targets."""
        found, ends = set(inputs), set(targets)
        for number, node in enumerate(self.nodes):
            if node.target in ends or not found.isdisjoint(node.inputs):
                found.add(number)
        return frozenset(found)

    def targets(self, numbers: Iterable[int]) -> list[Target]:
        return [target for number in sorted(numbers) if (target := self.nodes[number].target) is not None]

    def units(self, reaches: dict[int, frozenset[int]], needed: Collection[Target] | None = None) -> list[Unit]:
        """The units as the runtime makes them: one for each source alone, one for each set of sources that share.

        ``needed``: the targets that count, if not all do.
        """
        masks: dict[int, set[int]] = {}
        for source, reach in reaches.items():
            for number in reach:
                masks.setdefault(number, set()).add(source)
        numbers: dict[frozenset[int], list[int]] = {frozenset((source,)): [] for source in reaches}
        for number, mask in sorted(masks.items()):
            node = self.nodes[number]
            is_leaf = not node.inputs and node.target is None
            if len(mask) == 1 or not is_leaf or node.hooked:
                numbers.setdefault(frozenset(mask), []).append(number)
        found = {mask: self.targets(members) for mask, members in numbers.items()}
        return [
            Unit(mask, tuple([target for target in targets if needed is None or target in needed]))
            for mask, targets in found.items()
        ]


def grow(world: World) -> None:
    """One step of a program under the context: a new value, a message with values, or a call."""
    rng = world.rng
    worker = rng.choice([worker for worker in world.live() if worker.context is not None])
    assert worker.context is not None
    graph = worker.context.graph
    (thing,) = rng.choices(("leaf", "value", "message", "call"), (1, 4, 2, 5))
    if thing == "leaf":
        graph.add(Node((), hooked=rng.random() < 0.3))
    elif thing == "value":
        graph.add(Node(some_values(world, graph)))
    elif thing == "call":
        _call(world, worker)
    else:
        message(world, worker.rank, _peer(world, worker), some_values(world, graph) if rng.random() < 0.9 else ())


def _call(world: World, caller: Worker, depth: int = 0) -> None:
    """Send values, compute something from them, and send it back. The called function may make calls, too."""
    callee = world.workers[_peer(world, caller)]
    if caller.context is None or callee.crashed:
        return
    message(world, caller.rank, callee.rank, some_values(world, caller.context.graph))
    if callee.context is None:
        return
    graph = callee.context.graph
    if depth < 4 and world.rng.random() < 0.6:
        _call(world, callee, depth + 1)
    others = some_values(world, graph) if world.rng.random() < 0.5 else ()
    graph.add(Node(tuple(sorted({len(graph.nodes) - 1, *others}))))
    message(world, callee.rank, caller.rank, (len(graph.nodes) - 1,))


def pipeline(world: World) -> None:
    """Nested calls, from the main worker to the far end and back, that use only the values they receive."""
    path = _path(world)
    for sender, receiver in itertools.pairwise([*path, *path[-2::-1]]):
        context = world.workers[sender].meet()
        assert context is not None
        context.graph.add(Node((len(context.graph.nodes) - 1,)))
        message(world, sender, receiver, (len(context.graph.nodes) - 1,))


def chains(world: World) -> None:
    """Values of a far worker, each of which comes to the main one alone. Their gradients are a series of messages."""
    path = _path(world)[::-1]
    for _ in range(world.rng.randint(2, 5)):
        for sender, receiver in itertools.pairwise(path):
            context = world.workers[sender].meet()
            assert context is not None
            received = () if sender == path[0] else (len(context.graph.nodes) - 1,)
            context.graph.add(Node(received))
            message(world, sender, receiver, (len(context.graph.nodes) - 1,))


def _path(world: World) -> list[int]:
    """From the main worker to the far end."""
    path = [world.main_rank]
    while away := [rank for rank, towards in world.next_hops.items() if towards == path[-1]]:
        path.append(world.rng.choice(away))
    return path


def parallel(world: World) -> None:
    """Calls from the main worker to one other, whose functions use only what they receive and, some of them, a leaf."""
    rng, caller = world.rng, world.main_rank
    callee = rng.choice([rank for rank in range(len(world.workers)) if rank != caller])
    here, there = world.workers[caller].meet(), world.workers[callee].meet()
    assert here is not None
    assert there is not None
    for _ in range(rng.randint(2, 4)):
        here.graph.add(Node(()))
        message(world, caller, callee, (len(here.graph.nodes) - 1,))
        received = len(there.graph.nodes) - 1
        there.graph.add(Node((0, received) if rng.random() < 0.5 and not there.graph.nodes[0].hooked else (received,)))
        message(world, callee, caller, (len(there.graph.nodes) - 1,))


def _peer(world: World, worker: Worker) -> int:
    return world.rng.choice(world.peers(worker.rank)) if world.rng.random() < 0.9 else worker.rank


def message(world: World, sender: int, receiver: int, values: tuple[int, ...]) -> None:
    """A call or an answer with these values. The receiver has the context from now on."""
    context = world.workers[sender].context
    assert context is not None
    their_context = world.workers[receiver].meet()
    if their_context is None:
        return
    if sender != receiver:
        context.known.add(receiver)
        their_context.known.add(sender)
    if values:
        message_id = world.next_message_id(sender)
        world.trace("%d -> %d: values %s in the forward pass, pair %d", sender, receiver, list(values), message_id)
        context.graph.sends[message_id] = values
        their_context.graph.add(Node((), Target(sender, message_id)))


def gather(world: World) -> None:
    """Send all unused values to the main worker, so that every send is used; in a sparse world, hop by hop."""
    for rank, towards in reversed(world.next_hops.items()):
        worker = world.workers[rank]
        if worker.context is not None:
            if world.is_sparse:
                message(world, rank, towards, tuple(worker.context.graph.sinks()))
            else:
                message(world, rank, world.main_rank, tuple(worker.context.graph.sinks()))


def some_values(world: World, graph: Graph) -> tuple[int, ...]:
    """Some values, mostly newer ones, so that graphs become deep."""
    rng = world.rng
    visible = graph.visible()
    count = min(len(visible), rng.choice((1, 1, 2, 3)))
    return tuple(sorted({rng.choice(visible[-4:] if rng.random() < 0.6 else visible) for _ in range(count)}))


def needed_sends(
    world: World, origin: int, roots: tuple[int, ...], inputs: dict[int, frozenset[int]]
) -> dict[int, set[int]]:
    """The sources of each worker that a pass from these roots to these values has to reach. All graphs at once."""
    used = used_sends(world, origin, roots)
    graphs = {rank: context.graph for rank in used if (context := world.workers[rank].context) is not None}
    leading: set[Target] = set()
    while True:
        news = set()
        for rank, graph in graphs.items():
            nodes = graph.leading(inputs.get(rank, ()), leading)
            for source in used[rank]:
                reach = graph.reach(roots) if source == ROOTS else graph.reach_of(source)
                if not nodes.isdisjoint(reach):
                    news.add(Target(rank, source))
        if news <= leading:
            break
        leading |= news
    return {rank: {s for s in sources if (rank, s) in leading} for rank, sources in used.items()}


def used_sends(world: World, origin: int, roots: tuple[int, ...]) -> dict[int, set[int]]:
    """The sources of each worker that a pass from these roots has to reach."""
    used: dict[int, set[int]] = {origin: {ROOTS}}
    context = world.workers[origin].context
    assert context is not None
    stack = context.graph.targets(context.graph.reach(roots))
    while stack:
        worker, message_id = stack.pop()
        if message_id not in used.setdefault(worker, set()):
            used[worker].add(message_id)
            theirs = world.workers[worker].context
            if theirs is not None:
                stack += theirs.graph.targets(theirs.graph.reach_of(message_id))
    return used


def reaches_forgotten(world: World, origin: int, root: int) -> bool:
    """Whether a root hangs on a message of a recorded pass that failed. No program gets such a tensor."""
    contexts = [worker.context for worker in world.workers if worker.context is not None]
    if not any(context.graph.has_forgotten for context in contexts):
        return False
    context = world.workers[origin].context
    assert context is not None
    seen = set()
    stack = context.graph.targets(context.graph.reach((root,)))
    while stack:
        target = stack.pop()
        theirs = world.workers[target.worker].context
        if target in seen or theirs is None:
            continue
        if target.message_id not in theirs.graph.sends:
            return True
        seen.add(target)
        stack += theirs.graph.targets(theirs.graph.reach_of(target.message_id))
    return False
