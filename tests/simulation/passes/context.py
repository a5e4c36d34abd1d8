"""The autograd context on one worker, and how its end reaches all workers that have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farprop.protocol.backward import PassId
from tests.simulation.passes.forward import Graph, Node
from tests.simulation.passes.local_pass import LocalPass
from tests.simulation.passes.threads import PassError, Steps, start

if TYPE_CHECKING:
    from tests.simulation.passes.world import World


class Context:
    def __init__(self) -> None:
        self.graph = Graph()
        self.known: set[int] = set()
        self.passes: dict[PassId, LocalPass] = {}
        self.aborted: set[PassId] = set()


class ContextHolder:
    """The part of a worker that manages the context."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.crashed = False
        self.dead: set[int] = set()  # the workers that it knows to be dead
        self.context: Context | None = None
        self._has_ended = False

    def fail(self, local: LocalPass, error: PassError) -> Steps:
        raise NotImplementedError

    def meet(self) -> Context | None:
        if self.context is None and not self._has_ended and not self.crashed:
            self.context = Context()
            self.context.graph.add(Node(()))
        return self.context

    def on_release(self) -> None:
        """The context has ended: tell all workers that are known to have it."""
        context, self.context, self._has_ended = self.context, None, True
        if context is not None:
            self.world.trace("%d releases the context", self.rank)
            for local in [local for local in context.passes.values() if local.machine.active]:
                start(self, self.fail(local, PassError("the context has ended")))
            for worker in sorted(context.known):
                self.clean_up(worker)

    def clean_up(self, worker: int) -> None:
        """Reference batches deliver it reliably, unless one of the two workers dies."""
        self.world.counts["clean-ups"] += 1
        self.world.clock.after(self.world.network.delay(), self.world.clean_up, self.rank, worker)

    def find(self) -> Context:
        if self.context is None:
            raise PassError("there is no such context")
        return self.context

    def ask_maker(self) -> Steps:
        """The worker that sent the context here is gone. If its maker no longer has it either, it has ended."""
        maker = self.world.maker
        while maker not in self.dead:
            try:
                if not (yield self.world.network.call(self.rank, maker, "exists", self.rank)):
                    self.on_release()
                return
            except PassError:
                yield 0.3

    def on_exists(self, asker: int) -> Steps:
        yield 0.0
        if self.context is not None:
            self.context.known.add(asker)
        return self.context is not None
