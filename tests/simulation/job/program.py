"""What the programs of the workers do: calls, references, backward passes. Called functions are here, too."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import farprop.autograd as dist_autograd
from farprop import rpc
from farprop.errors import FarpropError, UsageError
from tests.simulation.job import checks
from tests.simulation.job.scheduler import Time, Violation, scheduler

if TYPE_CHECKING:
    from tests.simulation.job.process import Process
    from tests.simulation.job.world import World


class Plan(NamedTuple):
    """A call, and those that its function makes."""

    name: str
    token: int
    seconds: float  # how long it takes
    used: bool = True
    children: tuple[Any, ...] = ()

    def names(self) -> set[str]:
        return {self.name}.union(*(Plan(*child).names() for child in self.children))


def here() -> Process:
    thread = scheduler.current
    assert thread is not None
    assert thread.process is not None
    return thread.process


def make_plan(world: World, caller: str, depth: int, is_pass: bool = False) -> Plan:
    rng = world.rng
    name = rng.choice([name for name in world.names if name != caller or rng.random() < 0.1] or [caller])
    children = []
    if depth:
        for _ in range(rng.choice((0, 1, 1, 2) if is_pass else (0, 0, 1))):
            children.append(tuple(make_plan(world, name, depth - 1, is_pass)))
    seconds = rng.choice((0.0, 0.0, rng.uniform(0.0, 0.05)))
    plan = Plan(name, world.new_token(), seconds, not is_pass or rng.random() < 0.8, tuple(children))
    world.calls[plan.token] = checks.CallHistory(plan.token, caller, plan.names() | {caller})
    return plan


# Functions that are called


def work(plan: tuple[Any, ...]) -> int:
    """Take some time, and make calls."""
    begin(Plan(*plan))
    for child in Plan(*plan).children:
        call(Plan(*child), work, child)
    return Plan(*plan).token


def begin(plan: Plan) -> None:
    checks.runs(here(), here().world.calls[plan.token])
    if plan.seconds:
        Time.sleep(plan.seconds)


def make(plan: tuple[Any, ...]) -> tuple[str, int]:
    """Make a value for a reference."""
    return "value", work(plan)


def take(plan: tuple[Any, ...], tokens: list[int], *rrefs: Any) -> int:
    """Take references, and keep or use them."""
    process = here()
    begin(Plan(*plan))
    for token, rref in zip(tokens, rrefs, strict=True):
        if process.world.rng.random() < 0.5:
            if not process.is_settling:
                process.held.append((token, rref))
        else:
            use(process, token, rref)
    return Plan(*plan).token


def give(plan: tuple[Any, ...]) -> tuple[int, Any] | None:
    """Give the caller a reference that this worker holds."""
    process = here()
    begin(Plan(*plan))
    if not process.held:
        return None
    token, rref = process.world.rng.choice(process.held)
    history, value = process.world.calls[Plan(*plan).token], process.world.values[token]
    history.names |= value.names
    history.may_time_out = value.may_time_out
    return token, rref


def hop(plan: tuple[Any, ...], x: torch.Tensor) -> torch.Tensor:
    """Compute something with this worker's weight, and with what others compute from it."""
    process = here()
    begin(Plan(*plan))
    y = x * process.weight
    for child in Plan(*plan).children:
        z = call(Plan(*child), hop, child, y)
        if Plan(*child).used:
            y = y + z
    return y


def expected(world: World, plan: Plan, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same as ``hop``, in one process."""
    y = x * weights[plan.name]
    for child in plan.children:
        z = expected(world, Plan(*child), y, weights)
        if Plan(*child).used:
            y = y + z
    return y


# Calls


def call(plan: Plan, function: Any, *args: Any, timeout: float = 0.0) -> Any:
    """Call a function and wait."""
    world = here().world
    history = world.calls[plan.token]
    options = {"timeout": timeout} if timeout else {}
    world.trace("%s calls %s on %s: %s", here(), function.__name__, plan.name, plan)
    try:
        value = rpc.rpc_sync(plan.name, function, args=args, **options)
    except Exception as error:
        world.trace("%s: call %d fails: %r", here(), plan.token, error)
        checks.failed(world, history, error, timeout)
        raise
    world.trace("%s: call %d returns", here(), plan.token)
    checks.returned(history)
    return value


def call_async(process: Process, plan: Plan, waits: bool) -> None:
    world = process.world
    history = world.calls[plan.token]
    world.trace("%s calls work on %s: %s, and %s", process, plan.name, plan, "waits" if waits else "goes on")
    try:
        future = rpc.rpc_async(plan.name, work, args=(tuple(plan),))
    except FarpropError as error:
        checks.failed(world, history, error, 0.0)
        return
    history.is_open = process
    if not waits:
        future.add_done_callback(lambda done: checks.completed(world, history, done))
        if world.has_cancels:
            cancel(process, plan, future)
        return
    try:
        future.wait()
    except Exception as error:
        checks.failed(world, history, error, 0.0)
    else:
        checks.returned(history)
    history.is_open = None


def cancel(process: Process, plan: Plan, future: Any) -> None:
    """Cancel a call, after a while."""
    world = process.world
    history = world.calls[plan.token]
    Time.sleep(world.cancels.choice((0.0, 0.0, world.cancels.uniform(0.0, 0.05))))
    call, history.is_cancelled = future.call, True
    number = getattr(call, "call_id", 0) or (getattr(call, "sent", None) or (None, 0))[1]
    key = process.name, plan.name, number
    world.cancelled[key] = history
    if future.cancel():
        world.trace("%s cancels call %d", process, plan.token)
        world.counts["cancelled calls"] += 1
        if not future.done() or not future.cancelled():
            raise Violation(f"call {plan.token} was cancelled, and its future is not done")
    else:
        history.is_cancelled = False
        world.cancelled.pop(key, None)


# References


def use(process: Process, token: int, rref: Any) -> None:
    """Fetch the value of a reference."""
    world = process.world
    history = world.values[token]
    history.names.add(process.name)
    try:
        value = rref.to_here()
    except Exception as error:
        world.trace("%s: value %d is lost: %r", process, token, error)
        checks.lost(world, history, error)
    else:
        if tuple(value) != ("value", token):
            raise Violation(f"{process} has a reference to value {token}, and gets {value}")


def remote(process: Process) -> None:
    world = process.world
    plan = make_plan(world, process.name, 1)
    token = plan.token
    history = world.calls[token]
    world.values[token] = checks.ValueHistory(token, set(history.names))
    world.trace("%s has value %d made on %s", process, token, plan.name)
    timeout = world.timeout()
    try:
        rref = rpc.remote(plan.name, make, args=(tuple(plan),), **({"timeout": timeout} if timeout else {}))
    except Exception as error:
        checks.failed(world, history, error, timeout)
        return
    world.values[token].may_time_out = bool(timeout)
    process.held.append((token, rref))
    if world.has_cancels and world.cancels.random() < 0.3:
        world.values[token].may_time_out = True  # to use it raises
        cancel(process, plan, rref._get_future())


def own(process: Process) -> None:
    token = process.world.new_token()
    process.world.values[token] = checks.ValueHistory(token, {process.name})
    process.held.append((token, rpc.RRef(("value", token))))


def pass_references(process: Process) -> None:
    world = process.world
    plan = make_plan(world, process.name, 0)
    chosen = world.rng.sample(process.held, min(len(process.held), world.rng.choice((1, 1, 2))))
    names = set(plan.names()) | {process.name}
    for token, _ in chosen:
        names |= world.values[token].names
    for token, _ in chosen:
        world.values[token].names |= names
    world.calls[plan.token].names |= names
    world.calls[plan.token].may_time_out = any(world.values[token].may_time_out for token, _ in chosen)
    try:
        call(plan, take, tuple(plan), [token for token, _ in chosen], *(rref for _, rref in chosen))
    except FarpropError:
        pass


def get_reference(process: Process) -> None:
    plan = make_plan(process.world, process.name, 0)
    try:
        got = call(plan, give, tuple(plan))
    except FarpropError:
        return
    if got is not None:
        token, rref = got
        process.world.values[token].names |= {process.name, plan.name}
        process.held.append((token, rref))


# Backward passes


def passes(process: Process) -> None:
    """A forward pass over several workers, and one or two backward passes."""
    world, rng = process.world, process.world.rng
    plans = [make_plan(world, process.name, rng.choice((0, 1, 2)), is_pass=True) for _ in range(rng.choice((1, 1, 2)))]
    names = {process.name}.union(*(plan.names() for plan in plans))
    x = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    with dist_autograd.context() as context_id:
        try:
            ys = [call(plan, hop, tuple(plan), x) for plan in plans]
        except FarpropError:
            return
        loss = sum(ys[1:], ys[0]).sum()
        history = checks.ContextHistory(context_id, process, names, x, world)
        count = rng.choice((1, 1, 2))
        for number in range(count):
            fast = all(_all_used(plan) for plan in plans) and rng.random() < 0.3
            try:
                timeout = world.timeout()
                dist_autograd.backward(
                    context_id, [loss], number + 1 < count, mode="fast" if fast else "smart", timeout=timeout or None
                )
            except Exception as error:
                world.counts["failed passes"] += 1
                world.trace("%s: the pass of context %d fails: %r", process, context_id, error)
                checks.pass_failed(history, error, timeout)
                if not isinstance(error, FarpropError) or rng.random() < 0.5:
                    return
            else:
                world.counts["passes"] += 1
                history.add(lambda weights, x: sum(expected(world, plan, x, weights) for plan in plans))
                checks.gradients(history)


def _all_used(plan: Plan) -> bool:
    return plan.used and all(_all_used(Plan(*child)) for child in plan.children)


# Programs

_ACTIONS = {"call": 5, "async": 3, "remote": 4, "own": 1, "use": 2, "pass": 4, "get": 2, "drop": 2, "backward": 4}


def run(process: Process, steps: int) -> None:
    """One thing after the other."""
    rng = process.world.rng
    for _ in range(steps):
        if not process.is_alive or process.is_leaving:
            return
        Time.sleep(rng.uniform(0.0, 0.1))
        (action,) = rng.choices(list(_ACTIONS), list(_ACTIONS.values()))
        try:
            act(process, action)
        except UsageError:
            if not process.is_leaving:  # which ends RPC for its other threads
                raise


def act(process: Process, action: str) -> None:
    world, rng = process.world, process.world.rng
    if action == "call":
        plan = make_plan(world, process.name, 2)
        try:
            call(plan, work, tuple(plan), timeout=world.timeout())
        except FarpropError:
            pass
    elif action == "async":
        call_async(process, make_plan(world, process.name, 1), waits=rng.random() < 0.4)
    elif action == "remote":
        remote(process)
    elif action == "own":
        own(process)
    elif action == "backward":
        passes(process)
    elif action == "get":
        get_reference(process)
    elif process.held:
        if action == "pass":
            pass_references(process)
        elif action == "use":
            use(process, *rng.choice(process.held))
        else:
            process.held.pop(rng.randrange(len(process.held)))


def join(process: Process) -> None:
    process.agent.join_group()
    process.has_joined = True


def watch(process: Process) -> None:
    """Ask to be told when another worker dies."""
    world = process.world
    if process.is_leaving:
        return
    others = [other for other in world.live() if other is not process and other.has_joined]
    for watched in world.rng.sample(others, min(len(others), world.rng.randint(1, 2))):
        if world.excused({watched.name}):
            continue  # the name may be that of another process by now
        rpc.on_failure(watched.name, partial(_told, process, watched))
        world.watches.append((process, watched))


def _told(process: Process, watched: Process, _info: Any, _reason: str) -> None:
    checks.told(process.world, process, watched)


def use_all(process: Process) -> None:
    for token, rref in list(process.held):
        use(process, token, rref)


def settle(process: Process) -> None:
    """Drop everything, and wait until nothing is left, and everybody was told who has died."""
    began = scheduler.now
    looks = 0
    process.is_settling = True
    process.held.clear()
    while left := checks.left_on(process):
        if scheduler.now > began + 100.0:
            raise Violation(f"in the end, {process} still has {left}")
        Time.sleep(0.5)
        looks += 1
        if looks == 5:
            gc.collect()  # the frames of an exception may hold a reference
    while not checks.all_told(process.world, process):
        if scheduler.now > began + 100.0:
            raise Violation(f"{process} was not told that a worker has died")
        Time.sleep(0.5)


def leave(process: Process) -> None:
    """Shut down gracefully."""
    process.is_leaving = True
    process.held.clear()
    began = scheduler.now
    try:
        rpc.shutdown()
    except FarpropError as error:
        process.world.trace("%s leaves with %r", process, error)
        checks.shut_down(process, error)
    else:
        process.world.trace("%s has left", process)
        if not process.world.is_troubled and scheduler.now > began + 30.0:
            raise Violation(f"the shutdown of {process} took {scheduler.now - began:.0f} s")
        checks.shut_down(process, None)
    process.has_left = True
    process.is_listening = False
