"""Mutants of the simulated runtime. The state machines rely on it, so the simulation has to kill these, too."""

from __future__ import annotations

from typing import Any

from farprop.protocol.backward import PassId
from tests.simulation.harness import mutant
from tests.simulation.passes import origin
from tests.simulation.passes.context import ContextHolder
from tests.simulation.passes.local_pass import LocalPass
from tests.simulation.passes.threads import PassError, Steps, start
from tests.simulation.passes.worker import Worker

_HEALTHY: dict[str, Any] = {**vars(ContextHolder), **vars(Worker)}


def runtime_mutant(method: str, owner: Any = Worker) -> Any:
    return mutant(owner, method, kind="passes")


@runtime_mutant("is_over")
def decided_is_done(self: Worker, local: LocalPass) -> bool:
    """Actions decided before a failure are performed after it, also to workers that will not learn of the failure."""
    return False


@runtime_mutant("fail")
def undone_where_noticed(self: Worker, local: LocalPass, error: PassError) -> Steps:
    """A worker that loses an answer undoes the pass, though the pass may have ended before."""
    yield from _HEALTHY["fail"](self, local, error)
    if local.machine.failed:
        local.undone = True


@runtime_mutant("orphaned")
def undone_with_its_origin(self: Worker, local: LocalPass) -> None:
    """A worker undoes a pass that ended when the origin dies long afterwards."""
    self.undo(local)


@runtime_mutant("lost")
def lost_only_if_active(self: Worker, rank: int) -> None:
    """An inactive worker does not report the loss of a partner, which may hold the credit that it sent there."""
    for local in list(self.context.passes.values() if self.context is not None else ()):
        if rank in local.partners and local.machine.active:
            start(self, self.fail(local, PassError(f"the connection to {rank} is lost")))


@runtime_mutant("tell_origin")
def failure_told_once(self: Worker, local: LocalPass, error: PassError) -> Steps:
    """The report of a failure is not sent again if the connection breaks."""
    if local.id.origin == self.rank:
        yield from _HEALTHY["tell_origin"](self, local, error)
    else:
        try:
            yield self.call(local, local.id.origin, "failed", local.id)
        except PassError:
            pass


@runtime_mutant("abort", origin)
def abort_asked_once(worker: Worker, pass_id: PassId, rank: int) -> Steps:
    """A worker that can't be reached at once is not told that a pass failed."""
    try:
        return (yield worker.world.network.call(worker.rank, rank, "abort", pass_id))
    except PassError:
        return None


@runtime_mutant("abort", origin)
def abort_stops_at_the_dead(worker: Worker, pass_id: PassId, rank: int) -> Steps:
    """Those that only a dead worker knew are not told that a pass failed."""
    answer = yield from _abort(worker, pass_id, rank)
    return [] if answer is None else answer


_abort = origin.abort


@runtime_mutant("on_abort")
def abort_not_remembered(self: Worker, pass_id: PassId) -> Steps:
    """Gradients that arrive after an abort start the pass again."""
    answer = yield from _HEALTHY["on_abort"](self, pass_id)
    if self.context is not None:
        self.context.aborted.discard(pass_id)
    return answer


@runtime_mutant("clean_up", ContextHolder)
def clean_up_by_the_maker_only(self: Worker, worker: int) -> None:
    """The end of a context is not passed on."""
    if self.rank == self.world.maker:
        _HEALTHY["clean_up"](self, worker)


@runtime_mutant("ask_maker", ContextHolder)
def maker_not_asked(self: Worker) -> Steps:
    """A worker waits for a dead one to tell it of the end of the context."""
    yield 0.0
