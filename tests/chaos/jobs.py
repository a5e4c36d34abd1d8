"""The jobs. All of it runs in the workers; ``scenario`` drives it.

All numbers are small integers in doubles, so results don't depend on the order of sums, and are compared bit for bit.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import farprop.autograd as dist_autograd
import farprop.distributed  # noqa: F401 - it registers the backend
import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, OverloadedError, RpcTimeoutError
from farprop.nn.parallel import DistributedDataParallel
from tests.chaos.operations import Operation, Operations
from tests.support.clocks import now

_START_SECONDS = 30.0
_END_SECONDS = 10.0
_SECONDS = 5.0
_FLOOD_SECONDS = 20.0
_SHORT_SECONDS = 1.0  # less than some stops last
_PAUSE = 0.002  # between operations
_WIDTH = 32
_WITNESS_CALLS = 100
_WITNESS_PAUSE = 0.02
_OLDEST = 600.0  # seconds; no scenario takes as long

Left = Callable[[], float]


@dataclass(frozen=True)
class Setting:
    """What all workers of a scenario know."""

    job: str
    fault: str
    seed: int
    size: int
    directory: str  # where they meet
    meeting: str = "env"  # or "file", or "dynamic": a file, and the group has no size
    errors: tuple[type[BaseException], ...] = ()  # that are right while it runs
    join_errors: tuple[type[BaseException], ...] = ()  # that are right when a worker joins for the first time
    has_victim: bool = False  # a worker is killed, and nobody takes its place


@dataclass
class Findings:
    """What a worker knows at the end. The driver compares those of all workers."""

    operations: list[Operation]
    server: int = 0  # the process that has applied these pushes
    applied: list[tuple[int, int]] = field(default_factory=list)
    acknowledged: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by the server's process
    refused: list[tuple[int, int]] = field(default_factory=list)  # their errors say that they did not run
    problems: list[str] = field(default_factory=list)


class Job:
    """A worker's part in a job."""

    def __init__(self, setting: Setting, rank: int) -> None:
        self.setting = setting
        self.rank = rank
        self.name = f"worker{rank}"
        self.operations = Operations(rank, setting.errors)
        self.dice = random.Random(f"{setting.seed}/{rank}")

    def seconds(self) -> float:
        """The deadline of the next operation."""
        if self.setting.fault == "flood":
            return _FLOOD_SECONDS  # what the flooding worker sends to the same one, for others too, is behind its flood
        return self.dice.choice((_SHORT_SECONDS, _SECONDS)) if RpcTimeoutError in self.setting.errors else _SECONDS

    def begin(self, attempt: int) -> bool:
        """Join the others; returns whether that worked."""
        self.operations.expected = self.setting.errors if attempt else self.setting.errors + self.setting.join_errors
        joined = self.join(attempt)
        self.operations.expected = self.setting.errors
        return joined

    def join(self, attempt: int) -> bool:
        raise NotImplementedError

    def meet(self) -> None:
        """Wait for the others, in a group without a size."""
        raise NotImplementedError

    def leave_early(self) -> None:
        """Leave, because others could not join."""
        raise NotImplementedError

    def run(self, until: float) -> None:
        """Train until this time."""
        while now() < until:
            self.step()
            time.sleep(_PAUSE)

    def step(self) -> None:
        """Do an operation or several."""
        raise NotImplementedError

    def finish(self, survivors: Sequence[int]) -> None:
        """Show that the survivors can go on."""
        raise NotImplementedError

    def end(self) -> None:
        """Leave."""
        raise NotImplementedError

    def findings(self) -> Findings:
        return Findings(self.operations.done)


def integers(dice: random.Random, *shape: int) -> torch.Tensor:
    """A tensor of small integers."""
    made = torch.Generator().manual_seed(dice.getrandbits(32))
    return torch.randint(-3, 4, shape, generator=made, dtype=torch.float64)


def _rows(dice: random.Random) -> int:
    """Rows of a batch. Many make it large enough for shared memory."""
    return dice.choice((1, 4, 512))


# Calls


class Calls(Job):
    """A job of workers that call each other."""

    def join(self, attempt: int) -> bool:
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=_SECONDS)
        if self.setting.meeting == "dynamic":
            options.init_method = f"file://{self.setting.directory}/meet"
        elif attempt or self.setting.meeting == "file":
            options.init_method = f"file://{self.setting.directory}/meet{attempt}"
        size = None if self.setting.meeting == "dynamic" else self.setting.size
        joined = self.operations.run(
            "join",
            _START_SECONDS,
            lambda left: rpc.init_rpc(self.name, rank=self.rank, world_size=size, rpc_backend_options=options),
        )
        return joined.right

    def meet(self) -> None:
        names = [f"worker{rank}" for rank in range(self.setting.size)]
        self.operations.run("meet", _START_SECONDS, lambda left: rpc.wait_for_workers(names, left()))

    def leave_early(self) -> None:
        self.operations.run("leave early", _END_SECONDS, lambda left: rpc.shutdown(graceful=False))

    def finish(self, survivors: Sequence[int]) -> None:
        for rank in survivors:
            # Twice as long: who was cut off dials every three seconds.
            self.operations.run(
                "go on", 2 * _SECONDS, lambda left, rank=rank: _product(f"worker{rank}", left), _is_product
            )

    def end(self) -> None:
        self.operations.run("shutdown", _END_SECONDS, lambda left: rpc.shutdown(timeout=left()))


def _product(worker: str, left: Left) -> list[torch.Tensor]:
    x = torch.arange(3.0, requires_grad=True)
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync(worker, torch.mul, args=(x, 3), timeout=left()).sum()
        dist_autograd.backward(context, [loss], timeout=left())
        return list(dist_autograd.get_gradients(context).values())


def _is_product(gradients: list[torch.Tensor]) -> bool:
    return [gradient.tolist() for gradient in gradients] == [[3.0, 3.0, 3.0]]


def same(value: Any) -> Any:
    return value


def gradients_here(context: int) -> list[torch.Tensor]:
    """The gradients of a context on this worker."""
    return list(dist_autograd.get_gradients(context).values())


# A flood

_ran: list[float] = []  # when the calls of a flood ran here


def sink(value: Any) -> int:
    """Take a call of a flood."""
    _ran.append(now())
    return value if isinstance(value, int) else len(value)


def flood_times() -> list[float]:
    """When the calls of a flood ran on this worker."""
    return _ran


def flood(rank: int, target: str, calls: int, size: int) -> list[Operation]:
    """Make many calls at once. It runs beside the job, in a thread of its own."""
    operations = Operations(rank, (OverloadedError, RpcTimeoutError, *_current().setting.errors))
    value = torch.zeros(size, dtype=torch.uint8) if size else None

    def all_at_once(left: Left) -> list[int]:
        futures = [
            rpc.rpc_async(target, sink, args=(number if value is None else value,), timeout=left())
            for number in range(calls)
        ]
        return [future.wait() for future in futures]

    right = [size] * calls if size else list(range(calls))
    operations.run("flood", _FLOOD_SECONDS, all_at_once, lambda values: values == right)
    return operations.done


def witness(rank: int, target: str) -> tuple[list[Operation], list[tuple[float, float]]]:
    """Call the target of a flood, one call at a time; returns when each was sent, and when it ran."""
    operations = Operations(rank, _current().setting.errors)
    times = []
    for _ in range(_WITNESS_CALLS):
        sent = now()
        called = operations.run("witness", _SECONDS, lambda left: rpc.rpc_sync(target, now, timeout=left()))
        if called.right:
            times.append((sent, called.value))
        time.sleep(_WITNESS_PAUSE)
    return operations.done, times


# A parameter server


class _Parameters:
    """The state of the server: its weights, and which pushes made them what they are."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.weights = torch.ones(_WIDTH, _WIDTH, dtype=torch.float64)
        self.applied: list[tuple[int, int]] = []


_parameters = _Parameters()


def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the weights; returns them, too."""
    with _parameters.lock:
        weights = _parameters.weights.clone()
    return x @ weights.clone().requires_grad_(), weights


def push(who: tuple[int, int], gradient: torch.Tensor) -> int:
    """Subtract a gradient; returns the process that did."""
    with _parameters.lock:
        _parameters.applied.append(who)
        _parameters.weights -= gradient
        return os.getpid()


class Server(Calls):
    """Worker 0 has the weights; the others train."""

    def __init__(self, setting: Setting, rank: int) -> None:
        super().__init__(setting, rank)
        self._pushes = 0
        self._acknowledged: dict[int, list[tuple[int, int]]] = {}
        self._refused: list[tuple[int, int]] = []

    def step(self) -> None:
        if self.rank == 0:
            self.operations.run("call itself", self.seconds(), self._call_itself, lambda value: value == 7)
            time.sleep(0.02)
            return
        x = integers(self.dice, _rows(self.dice), _WIDTH)
        trained = self.operations.run(
            "gradient", self.seconds(), lambda left: _train(x, left), lambda found: _is_trained(x, found)
        )
        if trained.right:
            self._push(trained.value[2][0])

    def _call_itself(self, left: Left) -> int:
        return rpc.rpc_sync(self.name, same, args=(7,), timeout=left())

    def _push(self, gradient: torch.Tensor) -> None:
        self._pushes += 1
        who = (os.getpid(), self._pushes)
        pushed = self.operations.run(
            "push",
            self.seconds(),
            lambda left: rpc.rpc_sync("worker0", push, args=(who, gradient), timeout=left()),
        )
        if pushed.right:
            self._acknowledged.setdefault(pushed.value, []).append(who)
        elif not pushed.may_have_run:
            self._refused.append(who)

    def findings(self) -> Findings:
        found = super().findings()
        found.acknowledged, found.refused = self._acknowledged, self._refused
        with _parameters.lock:
            found.server, found.applied = os.getpid(), list(_parameters.applied)
        twice = [who for who, times in Counter(found.applied).items() if times > 1]
        if twice:
            found.problems.append(f"pushes that were applied more than once: {twice}")
        return found


def _train(x: torch.Tensor, left: Left) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The gradient of the batch, the weights, and the gradients of the weights, which are on the server."""
    x = x.clone().requires_grad_()
    with dist_autograd.context() as context:
        y, weights = rpc.rpc_sync("worker0", forward, args=(x,), timeout=left())
        dist_autograd.backward(context, [y.sum()], timeout=left())
        own = dist_autograd.get_gradients(context)[x]
        return own, weights, rpc.rpc_sync("worker0", gradients_here, args=(context,), timeout=left())


def _is_trained(x: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]) -> bool:
    own, weights, far = found
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    (x @ weights).sum().backward()
    return torch.equal(own, x.grad) and len(far) == 1 and torch.equal(far[0], weights.grad)


# A pipeline


class Stage:
    """A part of the model."""

    def __init__(self, seed: int) -> None:
        self.weights = integers(random.Random(seed), _WIDTH, _WIDTH).requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weights)

    def forward_through(self, x: torch.Tensor, following: Any, seconds: float) -> torch.Tensor:
        """This stage and the following one, which this worker calls."""
        return following.rpc_sync(timeout=seconds).forward(self.forward(x))

    def is_there(self) -> bool:
        return True

    def gradient(self, context: int) -> torch.Tensor:
        return dist_autograd.get_gradients(context)[self.weights]


class Pipeline(Calls):
    """Worker 0 trains a model whose stages are on the two others."""

    def __init__(self, setting: Setting, rank: int) -> None:
        super().__init__(setting, rank)
        self._stages: list[Any] = []

    def step(self) -> None:
        if self.rank != 0:
            to = f"worker{self.dice.randrange(1, self.setting.size)}"
            operation = lambda left: rpc.rpc_sync(to, same, args=(self.rank,), timeout=left())  # noqa: E731
            self.operations.run("call", self.seconds(), operation, lambda value: value == self.rank)
            time.sleep(0.02)
            return
        if not self._stages:
            made = self.operations.run("stages", self.seconds(), self._make)
            self._stages = made.value if made.right else []
            return
        x, nested = integers(self.dice, _rows(self.dice), _WIDTH), self.dice.random() < 0.5
        trained = self.operations.run(
            "pass", self.seconds(), lambda left: self._train(x, nested, left), lambda found: _is_passed(x, found)
        )
        if not trained.right:
            self._stages = []  # they may be lost

    def _make(self, left: Left) -> list[Any]:
        stages = [rpc.remote(f"worker{rank}", Stage, args=(rank,), timeout=left()) for rank in (1, 2)]
        for stage in stages:
            stage.rpc_sync(timeout=left()).is_there()
        return stages

    def _train(self, x: torch.Tensor, nested: bool, left: Left) -> list[torch.Tensor]:
        first, second = self._stages
        x = x.clone().requires_grad_()
        with dist_autograd.context() as context:
            if nested:
                y = first.rpc_sync(timeout=left()).forward_through(x, second, left())
            else:
                y = second.rpc_sync(timeout=left()).forward(first.rpc_sync(timeout=left()).forward(x))
            dist_autograd.backward(context, [y.sum()], timeout=left())
            futures = [stage.rpc_async(timeout=left()).gradient(context) for stage in self._stages]
            return [dist_autograd.get_gradients(context)[x], *(future.wait() for future in futures)]

    def end(self) -> None:
        self._stages = []
        super().end()


def _is_passed(x: torch.Tensor, found: list[torch.Tensor]) -> bool:
    first, second = Stage(1), Stage(2)
    x = x.clone().requires_grad_()
    second.forward(first.forward(x)).sum().backward()
    return all(map(torch.equal, found, (x.grad, first.weights.grad, second.weights.grad)))


# Actors


class Tally:
    """An actor: it counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0

    def add(self) -> int:
        with self._lock:
            self._total += 1
            return self._total


def add_through(rref: Any, seconds: float) -> int:
    """Add on behalf of another worker, which has passed its reference."""
    return rref.rpc_sync(timeout=seconds).add()


@dataclass
class _Held:
    rref: Any
    total: int = 0
    doubtful: int = 0  # additions that may have happened, or may still


class Actors(Calls):
    """Each worker has actors on others."""

    def __init__(self, setting: Setting, rank: int) -> None:
        super().__init__(setting, rank)
        self._held: list[_Held] = []

    def step(self) -> None:
        other = f"worker{self.dice.randrange(self.setting.size)}"
        action = self.dice.random()
        if not self._held or (action < 0.15 and len(self._held) < 20):
            made = self.operations.run("actor", self.seconds(), lambda left: rpc.remote(other, Tally, timeout=left()))
            if made.right:
                self._held.append(_Held(made.value))
        elif action < 0.25:
            del self._held[self.dice.randrange(len(self._held))]
        elif action < 0.4:
            x = integers(self.dice, _rows(self.dice), _WIDTH)
            self.operations.run(
                "echo",
                self.seconds(),
                lambda left: rpc.rpc_async(other, same, args=(x,), timeout=left()).wait(),
                lambda value: torch.equal(value, x),
            )
        else:
            self._add(self.dice.choice(self._held), None if action < 0.8 else other)
        if action > 0.9:
            self.operations.run("references", self.seconds(), lambda left: rpc.live_references(), _have_ages)

    def _add(self, held: _Held, through: str | None) -> None:
        def add(left: Left) -> int:
            if through is None:
                return held.rref.rpc_sync(timeout=left()).add()
            return rpc.rpc_sync(through, add_through, args=(held.rref, left()), timeout=left())

        added = self.operations.run(
            "add" if through is None else "add through another",
            self.seconds(),
            add,
            lambda total: 0 < total - held.total <= held.doubtful + 1,
        )
        if added.right:
            held.doubtful -= added.value - held.total - 1
            held.total = added.value
        elif self.operations.done[-1].error == "ReferenceLostError":
            self._held.remove(held)
        elif added.may_have_run:
            held.doubtful += 1

    def end(self) -> None:
        self._held.clear()
        super().end()


def _have_ages(references: list[rpc.LiveReference]) -> bool:
    return all(0 <= reference.seconds < _OLDEST for reference in references)


# Data-parallel training


class Ddp(Job):
    """Ranks of a process group that train one module. After an error they leave the group."""

    def join(self, attempt: int) -> bool:
        return self._join(f"group{attempt}", self.rank, self.setting.size)

    def leave_early(self) -> None:
        self._leave()

    def _join(self, name: str, rank: int, size: int) -> bool:
        return self.operations.run(
            "join",
            _START_SECONDS,
            lambda left: dist.init_process_group(
                "farprop",
                init_method=f"file://{self.setting.directory}/{name}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=2 * _SECONDS),  # also that of its collectives
            ),
        ).right

    def run(self, until: float) -> None:
        made = self.operations.run("module", 2 * _SECONDS, lambda left: DistributedDataParallel(_module()))
        number = 0
        while made.right and self._train(made.value, number, self.setting.size).right:
            # All ranks have to stop at the same step.
            late = torch.tensor([float(now() >= until)])
            agreed = self.operations.run("all_reduce", 2 * _SECONDS, lambda left, late=late: dist.all_reduce(late))
            if not agreed.right or late.item():
                break
            number += 1
        self._leave()

    def _train(self, module: nn.Module, number: int, size: int) -> Any:
        def train(left: Left) -> list[torch.Tensor]:
            module.zero_grad()
            # Times the size: thirds would not be exact.
            (size * module(_batch(self.setting.seed, number, dist.get_rank())).sum()).backward()
            return [parameter.grad for parameter in module.parameters()]

        return self.operations.run("step", 2 * _SECONDS, train, lambda found: self._is_averaged(found, number, size))

    def _is_averaged(self, found: list[torch.Tensor], number: int, size: int) -> bool:
        module = _module()
        for rank in range(size):
            module(_batch(self.setting.seed, number, rank)).sum().backward()
        return all(torch.equal(own, right.grad) for own, right in zip(found, module.parameters(), strict=True))

    def finish(self, survivors: Sequence[int]) -> None:
        place, size = list(survivors).index(self.rank), len(survivors)
        if self._join("another-group", place, size):
            made = self.operations.run("go on", 2 * _SECONDS, lambda left: DistributedDataParallel(_module()))
            if made.right:
                self._train(made.value, 0, size)
            self._leave()

    def _leave(self) -> None:
        left = self.operations.run("leave", _END_SECONDS, lambda left: dist.destroy_process_group())
        if not left.right and dist.is_initialized():  # it was interrupted
            self.operations.run("leave again", _END_SECONDS, lambda left: dist.destroy_process_group())

    def end(self) -> None:
        if dist.is_initialized():
            self._leave()


def _module() -> nn.Module:
    module = nn.Sequential(nn.Linear(_WIDTH, 512), nn.ReLU(), nn.Linear(512, 4)).double()
    dice = random.Random(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(integers(dice, *parameter.shape))
    return module


def _batch(seed: int, number: int, rank: int) -> torch.Tensor:
    return integers(random.Random(f"{seed}/{number}/{rank}"), 4, _WIDTH)


# Each job, and the number of its workers.
JOBS: dict[str, tuple[type[Job], int]] = {
    "server": (Server, 3),
    "pipeline": (Pipeline, 3),
    "actors": (Actors, 4),
    "ddp": (Ddp, 4),
}


# What the driver calls

_job: Job | None = None


def is_ready() -> bool:
    """This process has imported everything: on a loaded machine that takes longer than joining may."""
    return True


def begin(setting: Setting, rank: int) -> bool:
    """Become a worker of the job; returns whether that worked."""
    global _job
    if setting.fault in ("interrupt", "mixed"):
        _let_finalisers_be_interrupted()
    _job = JOBS[setting.job][0](setting, rank)
    _job.operations.catch_interrupts()
    return _job.begin(0)


def leave_early() -> None:
    """Leave, because others could not join."""
    _current().leave_early()


def begin_again() -> bool:
    """Join again."""
    return _current().begin(1)


def meet() -> None:
    """Wait for the others, in a group without a size."""
    _current().meet()


def _let_finalisers_be_interrupted() -> None:
    """Python swallows an interrupt at the first line of a finaliser, and tells this hook: no violation."""
    tell = sys.unraisablehook

    def tell_others(args: sys.UnraisableHookArgs) -> None:
        if args.exc_type is not KeyboardInterrupt:
            tell(args)

    sys.unraisablehook = tell_others


def run(until: float) -> None:
    """Train until this time."""
    _current().run(until)


def begin_and_run(setting: Setting, rank: int, until: float) -> None:
    """Take the place of a worker that was killed."""
    begin(setting, rank)
    meet()
    run(until)


def finish(survivors: Sequence[int]) -> None:
    """Go on with the survivors, without an error."""
    job = _current()
    job.operations.expected = ()
    job.finish(survivors)


def end() -> Findings:
    """Leave the job, and tell all about it."""
    job = _current()
    # A group with a size can't shut down gracefully without one of its workers, and says so.
    job.operations.expected = (ConnectionLostError,) if job.setting.has_victim else ()
    job.end()
    return job.findings()


def _current() -> Job:
    assert _job is not None
    return _job
