"""A process group on the side: some of the workers are its ranks. Its mesh and its algorithms are the real ones."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from farprop.distributed.native.hierarchical import Hierarchical
from farprop.distributed.native.mesh import Mesh
from farprop.distributed.reduction import Reduction
from farprop.errors import CollectiveError, CollectiveTimeoutError, RankLostError
from farprop.transport import sockets
from tests.simulation.job.network import Stream
from tests.simulation.job.scheduler import Mode, Signal, Time, Violation, scheduler

if TYPE_CHECKING:
    from tests.simulation.job.process import Process
    from tests.simulation.job.world import World


class ReadingThread:
    """Takes the place of the thread of a mesh."""

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target = target
        self._has_ended = Signal()

    def start(self) -> None:
        thread = scheduler.current
        assert thread is not None
        scheduler.after(0.0, thread.process, Mode.POOL, self._run)

    def _run(self) -> None:
        self._target()
        self._has_ended.set()

    def join(self) -> None:
        self._has_ended.wait()


class StopEnd:
    """One end of the socket pair that ends the thread of a mesh."""

    def __init__(self) -> None:
        self.is_readable = False
        self.reader: Any = None
        self.other: StopEnd

    def close(self) -> None:
        self.other.is_readable = True
        if self.other.reader is not None:
            scheduler.wake(self.other.reader)


def _socketpair() -> tuple[StopEnd, StopEnd]:
    one, other = StopEnd(), StopEnd()
    one.other, other.other = other, one
    return one, other


class Selector:
    """Takes the place of ``selectors.DefaultSelector``."""

    def __init__(self) -> None:
        self._keys: dict[Any, Any] = {}

    def register(self, fileobj: Any, _: int, data: Any = None) -> None:
        self._keys[fileobj] = types.SimpleNamespace(fileobj=fileobj, data=data)

    def unregister(self, fileobj: Any) -> None:
        del self._keys[fileobj]

    def _ready(self) -> list[tuple[Any, int]]:
        return [(key, 1) for fileobj, key in self._keys.items() if fileobj.is_readable]

    def select(self, seconds: float | None = None) -> list[tuple[Any, int]]:
        ready = self._ready()
        if ready or seconds == 0:
            return ready
        for fileobj in self._keys:
            fileobj.reader = scheduler.current
        try:
            scheduler.park(seconds)
        finally:
            for fileobj in self._keys:
                fileobj.reader = None
        return self._ready()

    def close(self) -> None:
        self._keys.clear()


threading = types.SimpleNamespace(Thread=ReadingThread, Event=Signal, current_thread=lambda: None)
selectors = types.SimpleNamespace(DefaultSelector=Selector, EVENT_READ=1, EVENT_WRITE=2)
mesh_sockets = types.SimpleNamespace(
    can_probe=sockets.can_probe, prepare_probes=lambda _: None, tcp_facts=lambda stream: stream.facts()
)
SOCKET_NAMES = {"socketpair": _socketpair}


class Group:
    """The truth about a group: who has joined it, and how each collective ended on each rank."""

    def __init__(self, world: World, members: list[Process]) -> None:
        self.world = world
        self.members = members
        self.length = world.rng.randint(1, 4)
        self.odd = (world.rng.randrange(len(members)), world.rng.randint(1, self.length))  # who calls something else
        self.has_odd = world.rng.random() < 0.15
        self.outcomes: dict[tuple[int, int], str] = {}  # by number and rank
        self.has_left: set[int] = set()
        streams: dict[int, dict[int, Stream]] = {rank: {} for rank in range(len(members))}
        for one in range(len(members)):
            for other in range(one):
                streams[one][other], streams[other][one] = world.network.pair(members[one], members[other])
        for rank, process in enumerate(members):
            process.run(self._run, process, rank, streams[rank])

    def _run(self, process: Process, rank: int, streams: dict[int, Stream]) -> None:
        mesh = Mesh(rank, streams, 1 << 30, lambda: None)  # type: ignore[arg-type]
        algorithms = Hierarchical(mesh, [[number] for number in range(len(self.members))], None)
        for number in range(1, self.length + 1):
            Time.sleep(self.world.rng.uniform(0.0, 0.1))
            if process.is_leaving:
                break
            try:
                self._collective(mesh, algorithms, rank, number)
            except CollectiveError as error:
                self.world.trace("%s: collective %d fails: %r", process, number, error)
                self._failed(process, rank, number, error)
                break
            self.outcomes[number, rank] = "completed"
            self.world.counts["collectives"] += 1
        self.has_left.add(rank)
        mesh.close()

    def _collective(self, mesh: Mesh, algorithms: Hierarchical, rank: int, number: int) -> None:
        is_odd = self.has_odd and (rank, number) == self.odd
        call = mesh.state.begin("something else" if is_odd else f"allreduce {number}", 60.0)
        tensor = torch.tensor([float(rank + 1), float(number)], dtype=torch.float64)
        try:
            if is_odd:
                algorithms.broadcast(call, tensor, rank)
                return
            algorithms.allreduce(call, tensor, Reduction(dist.ReduceOp.SUM))
        except CollectiveError:
            raise
        except Exception as error:
            mesh.state.fail_local(error)
            raise
        size = len(self.members)
        if tensor.tolist() != [size * (size + 1) / 2, float(size * number)]:
            raise Violation(f"collective {number} gave rank {rank} {tensor.tolist()}")

    def _failed(self, process: Process, rank: int, number: int, error: CollectiveError) -> None:
        self.outcomes[number, rank] = "failed"
        self.world.counts["failed collectives"] += 1
        harmed = self.world.excused({member.name for member in self.members})
        if not harmed and not self.has_odd:
            raise Violation(f"collective {number} fails on rank {rank} for no reason: {error!r}")
        if isinstance(error, CollectiveTimeoutError):
            raise Violation(f"rank {rank} waited for its deadline in collective {number}: {error!r}")
        if isinstance(error, RankLostError) and not harmed and not self.has_left:
            raise Violation(f"rank {rank} has lost a rank, and all are there: {error!r}")

    def check(self) -> None:
        """A collective that fails on one rank fails on all, or has completed there with the right value; and nobody
        begins another one after that.
        """
        for rank, process in enumerate(self.members):
            if not process.is_alive or process.is_leaving:
                continue
            mine = [self.outcomes.get((number, rank)) for number in range(1, self.length + 1)]
            if "failed" not in mine and None in mine:
                raise Violation(f"rank {rank} of the group waits for ever")
            is_unaware = self.has_odd and rank != self.odd[0] and all(outcome == "completed" for outcome in mine)
            if is_unaware and not self.world.is_troubled:
                raise Violation(f"rank {rank} does not know that rank {self.odd[0]} called something else")
