"""What must hold when something happens, and in the end. The histories are the truth, which no worker knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from farprop.errors import CallCancelledError, FarpropError, RpcTimeoutError, UsageError
from tests.simulation.job.scheduler import Violation, scheduler

if TYPE_CHECKING:
    from tests.simulation.job.process import Process
    from tests.simulation.job.world import World


class CallHistory:
    def __init__(self, token: int, caller: str, names: set[str]) -> None:
        self.token = token
        self.caller = caller
        self.names = names  # the workers that it depends on
        self.runs = 0
        self.outcomes = 0
        self.did_not_run = False  # so the caller was told
        self.may_time_out = False  # because of the references in it
        self.gave_up_at: float | None = None  # the caller
        self.is_cancelled = False  # by the caller
        self.cancel_was_read = False  # by the callee
        self.is_open: Process | None = None  # an asynchronous call of this process, without an outcome yet


class ValueHistory:
    def __init__(self, token: int, names: set[str]) -> None:
        self.token = token
        self.names = names  # the workers that made it or passed references to it
        self.may_time_out = False


class ContextHistory:
    """An autograd context, and the gradients that it should have."""

    def __init__(self, context_id: int, process: Process, names: set[str], x: torch.Tensor, world: World) -> None:
        self.id = context_id
        self.process = process
        self.names = names
        self.x = x
        self.world = world
        self.weights = {name: torch.tensor([w], dtype=torch.float64) for name, w in world.weights.items()}
        for weight in self.weights.values():
            weight.requires_grad_()
        self.expected_x = x.detach().clone().requires_grad_()

    def add(self, forward: Callable[[dict[str, torch.Tensor], torch.Tensor], Any]) -> None:
        """Another pass has ended."""
        forward(self.weights, self.expected_x).sum().backward()


# Calls


def runs(process: Process, history: CallHistory) -> None:
    """A called function runs."""
    world = process.world
    world.counts["runs"] += 1
    history.runs += 1
    if history.runs > 1:
        raise Violation(f"call {history.token} runs again, on {process}")
    if history.did_not_run:
        raise Violation(f"call {history.token} runs, but its caller was told that it does not")
    if history.cancel_was_read:
        raise Violation(f"call {history.token} begins on {process}, which has read that it is cancelled")
    if process.has_left:
        raise Violation(f"call {history.token} runs on {process}, which has left")
    if history.gave_up_at is not None and world.shares_clock and scheduler.now > history.gave_up_at:
        raise Violation(f"call {history.token} begins after its deadline")


def returned(history: CallHistory) -> None:
    history.outcomes += 1
    if history.outcomes > 1:
        raise Violation(f"call {history.token} ends twice")
    if history.runs != 1:
        raise Violation(f"call {history.token} returns, and ran {history.runs} times")


def failed(world: World, history: CallHistory, error: BaseException, timeout: float) -> None:
    world.counts["failed calls"] += 1
    history.outcomes += 1
    if history.outcomes > 1:
        raise Violation(f"call {history.token} ends twice")
    if not isinstance(error, FarpropError):
        raise Violation(f"call {history.token} fails with {error!r}, which is no error of farprop's") from error
    if isinstance(error, CallCancelledError):
        if not history.is_cancelled and not history.may_time_out:
            raise Violation(f"call {history.token} was cancelled, and not by its caller: {error!r}") from error
        return
    is_timeout = isinstance(error, RpcTimeoutError)
    is_in_time = not is_timeout or not (timeout or history.may_time_out)
    if is_in_time and not world.excused(history.names):
        raise Violation(f"call {history.token} fails for no reason: {error!r}") from error
    if is_in_time and is_timeout:
        raise Violation(
            f"call {history.token} waited for its deadline, though nothing could come: {error!r}"
        ) from error
    if is_timeout and timeout:
        history.gave_up_at = scheduler.now
    if not error.may_have_run:
        history.did_not_run = True
        if history.runs:
            raise Violation(f"call {history.token} ran, but its caller is told that it did not: {error!r}")


def cancel_read(process: Process, caller: str, call_id: int) -> None:
    """A worker has read that a call is cancelled."""
    history = process.world.cancelled.pop((caller, process.name, call_id), None)
    if history is not None:
        history.cancel_was_read = True


def completed(world: World, history: CallHistory, future: Any) -> None:
    """The future of an asynchronous call is done."""
    history.is_open = None
    try:
        future.value()
    except Exception as error:
        failed(world, history, error, 0.0)
    else:
        returned(history)


# References


def lost(world: World, history: ValueHistory, error: BaseException) -> None:
    world.counts["lost values"] += 1
    if not isinstance(error, FarpropError):
        raise Violation(f"value {history.token} is lost with {error!r}, which is no error of farprop's") from error
    if not history.may_time_out and not world.excused(history.names):
        raise Violation(f"value {history.token} is lost for no reason: {error!r}") from error


# Passes


def pass_failed(history: ContextHistory, error: BaseException, timeout: float) -> None:
    if not isinstance(error, FarpropError):
        raise Violation(f"a pass of context {history.id} fails with {error!r}") from error
    if not (timeout and isinstance(error, RpcTimeoutError)) and not history.world.excused(history.names):
        raise Violation(f"a pass of context {history.id} fails for no reason: {error!r}") from error
    if not timeout and isinstance(error, RpcTimeoutError):
        raise Violation(f"a pass of context {history.id} waited for its deadline: {error!r}") from error


def gradients(history: ContextHistory) -> None:
    """A pass has ended: the gradients of all workers in it must be right."""
    world = history.world
    _same(history, "the origin", history.process, history.x, history.expected_x.grad)
    for process in world.processes:
        if process.is_alive and process.name in history.names and not world.excused({process.name}):
            _same(history, str(process), process, process.weight, history.weights[process.name].grad)


def _same(history: ContextHistory, who: str, process: Process, leaf: torch.Tensor, wanted: torch.Tensor | None) -> None:
    context = process.agent.gradients.contexts.get(history.id)
    found = None if context is None else context.gradients.get(leaf)
    if (found is None) != (wanted is None) or (found is not None and not torch.equal(found, wanted)):  # type: ignore[arg-type]
        raise Violation(f"a pass of context {history.id} gave {who} the gradient {found}, not {wanted}")


# Watching


def told(world: World, watcher: Process, watched: Process) -> None:
    """A callback of ``on_failure`` is called."""
    key = watcher, watched
    if key in world.told:
        raise Violation(f"{watcher} is told twice that {watched} has died")
    world.told.add(key)
    # Who leaves a group with a size although its shutdown has failed counts as dead.
    if not watched.is_dead and not (world.is_static and watched.is_leaving):
        raise Violation(f"{watcher} is told that {watched} has died, and it lives")


def all_told(world: World, watcher: Process) -> bool:
    """Whether a worker was told of every death that it asked for."""
    return all((who, watched) in world.told for who, watched in world.watches if who is watcher and watched.is_dead)


# In the end


def calls_ended(world: World) -> None:
    for history in world.calls.values():
        if history.is_open is not None and history.is_open.is_alive:
            raise Violation(f"call {history.token} of {history.is_open} never ends")


def left_on(process: Process) -> dict[str, Any]:
    """What is left on a worker whose program has dropped everything."""
    agent = process.agent
    agent.references.users.drop_forgotten()
    counts: dict[str, Any] = dict(agent.references.counts())
    counts["contexts"] = len(agent.gradients.contexts)
    counts["open calls"] = agent.peers.open_calls
    counts["requests"] = agent._server.active
    for connection in agent._accepted.all():
        connection.served.validate()
        counts[f"requests of {connection.peer}"] = len(connection.served.open)
    counts["passes that wait"] = len(agent.gradients._waiters)
    counts["not idle"] = not agent.idle
    return {name: count for name, count in counts.items() if count}


def shut_down(process: Process, error: FarpropError | None) -> None:
    """``shutdown`` has returned."""
    world = process.world
    if error is not None:
        if isinstance(error, UsageError) or not world.is_troubled:
            raise Violation(f"the shutdown of {process} fails for no reason: {error!r}") from error
        return
    if not world.is_static or world.is_troubled:
        return
    for history in world.calls.values():
        if history.is_open is not None:
            raise Violation(f"{process} has shut down, and call {history.token} is still open")


def nothing_runs(world: World) -> None:
    """The heap is empty: nobody may wait for anything."""
    for thread in scheduler.parked:
        if thread.process is not None and not thread.process.is_dead:
            raise Violation(f"a thread of {thread.process} waits for ever ({thread.mode.name})")
    for stream in world.network.streams.values():
        if not stream.process.is_dead and not stream.is_closed:
            raise Violation(f"{stream.process} has a connection to {stream.other.process}, after its shutdown")
