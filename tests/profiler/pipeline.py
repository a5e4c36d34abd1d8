"""A pipeline of three stages, each of which calls the next, and what else the workers of these tests run."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import farprop
import farprop.autograd as dist_autograd
import farprop.distributed
import farprop.rpc as rpc
from farprop.profiler import Profile
from farprop.runtime.recorder import recorder

MICROBATCHES = 4
STAGES = ("worker1", "worker2", "worker3")
_worked: list[tuple[float, float]] = []
hooks_run: list[int] = []
calls_made: list[int] = []
waiting = threading.Event()
hangs = threading.Event()
never_set: list[torch.futures.Future[Any]] = []


class Stage(torch.nn.Module):
    """Computes for a while, and has the next stage go on. Notes when it computes."""

    def __init__(self, following: rpc.RRef[Any] | None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        # It takes most of the time of a backward pass, so that what is drawn in the middle of one is drawn in the hook.
        self.layer.weight.register_post_accumulate_grad_hook(lambda _: (hooks_run.append(1), time.sleep(0.002)))
        self._following = following

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        began = time.monotonic()
        for _ in range(200):
            y = torch.relu(self.layer(x))
        _worked.append((began, time.monotonic()))
        if self._following is None:
            return y
        result: torch.Tensor = self._following.rpc_sync().forward(y)
        return result


def make_stages() -> rpc.RRef[Any]:
    following = None
    for worker in reversed(STAGES):
        following = rpc.remote(worker, Stage, args=(following,))
    assert following is not None
    return following


def worked() -> list[tuple[float, float]]:
    return list(_worked)


def count_hooks() -> int:
    return len(hooks_run)


def result_of(profile: Profile) -> dict[str, Any]:
    """What a test checks of a profile, as plain data."""
    summary = profile.summary()
    return {
        "summary": {found.worker: found for found in summary.workers},
        "text": str(summary),
        "slowest": list(profile.slowest(100)),
        "slowest_text": str(profile.slowest(3)),
        "missing": profile.missing,
        "clock_error": profile.clock_error,
        "bubble": summary.bubble,
    }


def train(path: str, **options: Any) -> dict[str, Any]:
    """A step of the pipeline under a profile."""
    first = make_stages()
    first.rpc_sync().forward(torch.ones(2, 8))  # connections are made outside of the profile
    began = time.monotonic()
    with farprop.profile(path, **options) as profile:
        inside = time.monotonic()
        with dist_autograd.context() as context_id:
            futures = [first.rpc_async().forward(torch.ones(2, 8)) for _ in range(MICROBATCHES)]
            loss = torch.stack([future.wait().sum() for future in futures]).sum()
            dist_autograd.backward(context_id, [loss])
        within = time.monotonic() - inside
    around = time.monotonic() - began
    return {**result_of(profile), "within": within, "around": around}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# Other ways for a profile to go


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def call_often(to: str, times: int) -> None:
    for _ in range(times):
        rpc.rpc_sync(to, double, args=(torch.ones(2),))


def call_in_profile(path: str | None, times: int, **options: Any) -> dict[str, Any]:
    rpc.rpc_sync("worker1", double, args=(torch.ones(2),))
    with farprop.profile(path, **options) as profile:
        call_often("worker1", times)
    return result_of(profile)


def double_with_hook(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(torch.sinh)
    return y


def backward_in_profile(path: str, **options: Any) -> dict[str, Any]:
    with farprop.profile(path, **options) as profile, dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", double_with_hook, args=(torch.ones(2, requires_grad=True),))
        dist_autograd.backward(context_id, [y.sum()])
    return result_of(profile)


def pid_of(worker: str) -> int:
    return int(rpc.rpc_sync(worker, os.getpid))


def kill_in_profile(path: str, victim: str) -> dict[str, Any]:
    pid = pid_of(victim)
    with farprop.profile(path) as profile:
        call_often("worker1", 3)
        os.kill(pid, signal.SIGKILL)
        try:
            rpc.rpc_sync(victim, double, args=(torch.ones(1),))  # returns when the connection is lost
        except RuntimeError:
            pass
    return result_of(profile)


def interrupt_in_profile(path: str) -> None:
    with farprop.profile(path):
        call_often("worker1", 3)
        os.kill(os.getpid(), signal.SIGINT)
        waiting.wait(60)


def wait_in_profile() -> None:
    with farprop.profile():
        waiting.wait(60)


def go_on() -> None:
    waiting.set()


def hang() -> None:
    """Block a thread of this worker, until ``go_on`` is called here."""
    hangs.set()
    waiting.wait(60)


def hang_by_way_of(worker: str) -> None:
    rpc.rpc_sync(worker, hang, timeout=0)


@rpc.functions.async_execution
def hang_in_a_future() -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    never_set.append(future)
    return future


def end_future() -> None:
    never_set.pop().set_result(None)


def has_future() -> bool:
    return bool(never_set)


def wait_for_future(worker: str) -> None:
    rpc.rpc_async(worker, hang_in_a_future, timeout=0).wait()


def is_hanging() -> bool:
    return hangs.is_set()


def leave_calls_open(path: str) -> dict[str, Any]:
    """A profile that ends while calls of all kinds have no answers, and one call has given up."""
    call_often("worker1", 1)
    with farprop.profile(path) as profile:
        thread = threading.Thread(target=hang_by_way_of, args=("worker1",), name="hangs")
        thread.start()
        future = rpc.rpc_async("worker1", hang_in_a_future, timeout=0)
        reference = rpc.remote("worker1", hang, timeout=0)
        try:
            rpc.rpc_sync("worker1", hang, timeout=0.5)
        except RuntimeError:
            pass
        while not rpc.rpc_sync("worker1", is_hanging) or not rpc.rpc_sync("worker1", has_future):
            pass
    rpc.rpc_sync("worker1", end_future)
    rpc.rpc_sync("worker1", go_on)
    thread.join()
    future.wait()
    reference.to_here()
    return result_of(profile)


def is_recording() -> bool:
    return recorder.is_on


def set_lease(seconds: float) -> None:
    from farprop.protocol import recording

    recording.LEASE_SECONDS = seconds


def call_until_told(to: str) -> int:
    """Make calls until ``go_on`` is called."""
    while not waiting.is_set():
        rpc.rpc_sync(to, double, args=(torch.ones(2),))
        calls_made.append(1)
    return len(calls_made)


def has_called() -> bool:
    return bool(calls_made)


def reduce_in_group(rank: int, store: str) -> None:
    dist.init_process_group("farprop", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        dist.all_reduce(torch.ones(100))
        dist.all_reduce(torch.ones(100), async_op=True).wait()
    finally:
        dist.destroy_process_group()


def reduce_in_profile(path: str, store: str) -> dict[str, Any]:
    with farprop.profile(path) as profile:
        other = rpc.rpc_async("worker1", reduce_in_group, args=(1, store))
        reduce_in_group(0, store)
        other.wait()
    return result_of(profile)


@rpc.functions.async_execution
def later() -> torch.futures.Future[int]:
    return rpc.rpc_async("worker0", int, args=(7,))


def call_later_in_profile(path: str) -> dict[str, Any]:
    rpc.rpc_sync("worker1", double, args=(torch.ones(2),))
    with farprop.profile(path) as profile:
        assert rpc.rpc_sync("worker1", later) == 7
        reference = rpc.remote("worker1", double, args=(torch.ones(2),))
        reference.to_here()
    return result_of(profile)
