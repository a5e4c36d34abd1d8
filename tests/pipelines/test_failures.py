"""Stages that raise, workers that die, steps that are interrupted: everybody is released, and the next step works."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import farprop
import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, PipelineError, RpcTimeoutError, UsageError
from farprop.nn.stage_runner import _runners
from tests.pipelines.models import alone, batch, gradients, layers
from tests.references.looking import wait_until
from tests.support.workers import Cluster, cluster


class Bad(nn.Module):
    """A layer that does something else when its worker is told to: the n-th time from then on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if "backward" in _faults and y.requires_grad:
            y.register_hook(lambda gradient: _meet("backward"))
        _meet("forward")
        return y


_faults: dict[str, tuple[int, Any]] = {}  # by kind, how many times are left, and what happens then
_begun: list[str] = []


def _meet(kind: str) -> None:
    left, what = _faults.get(kind, (0, None))
    if what is None:
        return
    if left:
        _faults[kind] = left - 1, what
    else:
        _begun.append(kind)
        what()


def plant(kind: str, after: int, what: Any) -> None:
    _begun.clear()
    _faults[kind] = after, what


def heal() -> None:
    _faults.clear()


@pytest.fixture(autouse=True)
def _all_are_healed(workers: Cluster) -> Iterator[None]:
    yield
    for rank in range(4):
        workers.run(rank, heal)
        workers.run(rank, let_go)
        workers.run(rank, close)


def raise_it() -> None:
    raise ValueError("a bad batch")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    raise SystemExit(3)


_open = threading.Event()


def hang() -> None:
    _open.wait(100)


def let_go() -> None:
    _open.set()


def close() -> None:
    _open.clear()


def wait_for_fault(kind: str) -> None:
    wait_until(lambda: kind in _begun, f"the {kind} that fails")


def tensors_alive() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def kept() -> int:
    return sum(runner.count() for runner in list(_runners.values()))


NAMES = ["worker1", "worker2", "worker3"]


class Trainer:
    """A pipeline on worker0, and what it gives if nothing goes wrong."""

    def __init__(self, schedule: str = "1f1b", names: list[str] = NAMES) -> None:
        self.names = names
        modules = [Bad(layer) for layer in layers(len(names))]
        self.pipe = farprop.pipeline(list(zip(names, modules, strict=True)), micro_batches=6, schedule=schedule)
        self.x, self.y = batch(12)
        self.right = alone(modules, self.x, self.y, mse_loss)
        self.gradients = [p.grad for module in modules for p in module.parameters()]

    def step(self, **options: Any) -> torch.Tensor:
        return self.pipe.step(self.x, self.y, loss_fn=mse_loss, **options)

    def check(self) -> None:
        """A step works, and nothing is left of it."""
        with dist_autograd.context() as context_id:
            torch.testing.assert_close(self.step(), self.right, rtol=0, atol=1e-9)
            found = gradients(context_id, self.pipe.parameters())
        torch.testing.assert_close(found, self.gradients, rtol=0, atol=1e-9)
        for worker in self.pipe.workers:
            assert rpc.rpc_sync(worker, kept) == 0


def fails(schedule: str, kind: str, worker: str, after: int) -> None:
    trainer = Trainer(schedule)
    trainer.check()
    before = {name: rpc.rpc_sync(name, tensors_alive) for name in NAMES}
    for _ in range(3):
        rpc.rpc_sync(worker, plant, (kind, after, raise_it))
        with dist_autograd.context() as context_id:
            with pytest.raises(
                PipelineError, match=f"Stage . on {worker} failed in the {kind} of.*a bad batch"
            ) as caught:
                trainer.step()
            error = caught.value
            assert (error.worker, error.stage, error.micro_batch) == (worker, NAMES.index(worker), after)
            assert isinstance(error.__cause__, ValueError)
            # Nothing of the step is left, in the context neither: a retry in it gives the right gradients.
            assert gradients(context_id, trainer.pipe.parameters()) == [None] * len(trainer.gradients)
            rpc.rpc_sync(worker, heal)
            torch.testing.assert_close(trainer.step(), trainer.right, rtol=0, atol=1e-9)
            found = gradients(context_id, trainer.pipe.parameters())
            torch.testing.assert_close(found, trainer.gradients, rtol=0, atol=1e-9)
            del caught, error, found
    trainer.check()
    for name in NAMES:
        rpc.rpc_sync(name, wait_for_tensors, (before[name],))


def wait_for_tensors(count: int) -> None:
    """Contexts end a moment after their block."""
    wait_until(lambda: tensors_alive() <= count, f"at most {count} tensors")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize(("worker", "after"), [("worker1", 0), ("worker2", 3), ("worker3", 5)])
def test_a_stage_that_raises(workers: Cluster, schedule: str, kind: str, worker: str, after: int) -> None:
    workers.run(0, fails, schedule, kind, worker, after)


def a_stage_exits() -> None:
    trainer = Trainer()
    rpc.rpc_sync("worker2", plant, ("forward", 1, leave))
    with dist_autograd.context(), pytest.raises(PipelineError, match="Stage 1 on worker2 .* SystemExit"):
        trainer.step()
    rpc.rpc_sync("worker2", heal)
    trainer.check()


def test_a_stage_that_exits_does_not_end_its_worker(workers: Cluster) -> None:
    workers.run(0, a_stage_exits)


def fails_forward_only() -> None:
    trainer = Trainer()
    rpc.rpc_sync("worker2", plant, ("forward", 2, raise_it))
    with pytest.raises(PipelineError, match="Stage 1 on worker2 failed in the forward of micro-batch 2"):
        trainer.pipe(trainer.x)
    rpc.rpc_sync("worker2", heal)
    assert trainer.pipe(trainer.x).shape == trainer.x.shape
    trainer.check()


def test_a_forward_pass_that_fails(workers: Cluster) -> None:
    workers.run(0, fails_forward_only)


def bad_loss() -> None:
    trainer = Trainer()
    for loss_fn, text in [
        (lambda output, target: output, r"loss_fn has to return a tensor with one element.*shape \(2, 5\)"),
        (lambda output, target: 1.0, "loss_fn has to return a tensor with one element, and not one of float"),
        (lambda output, target: output.detach().sum(), "The loss does not require grad"),
        (lambda output, target: raise_it(), "ValueError: a bad batch"),
    ]:
        with dist_autograd.context(), pytest.raises(PipelineError, match=f"Stage 2 on worker3 .*{text}"):
            trainer.pipe.step(trainer.x, trainer.y, loss_fn=loss_fn)
    lock = threading.Lock()
    with dist_autograd.context(), pytest.raises(TypeError, match="lock"):
        trainer.pipe.step(trainer.x, trainer.y, loss_fn=lambda output, target: lock)
    trainer.check()


def test_losses_that_are_none(workers: Cluster) -> None:
    workers.run(0, bad_loss)


def times_out() -> None:
    """A stage that hangs: the step ends at its timeout, and the next one begins when the stage has ended."""
    trainer = Trainer()
    rpc.rpc_sync("worker2", plant, ("forward", 1, hang))
    with dist_autograd.context() as context_id:
        with pytest.raises(RpcTimeoutError, match="did not end within 2.0 s") as caught:
            trainer.step(timeout=2.0)
        assert "worker2 runs the forward of micro-batch 1 through stage 1." in caught.value.__notes__
        with pytest.raises(RpcTimeoutError, match="did not end within 0.2 s"):
            trainer.step(timeout=0.2)
        assert gradients(context_id, trainer.pipe.parameters()) == [None] * len(trainer.gradients)
    rpc.rpc_sync("worker2", heal)
    rpc.rpc_sync("worker2", let_go)
    assert rpc.rpc_sync("worker2", steps_begun) == 0  # the second one had been aborted
    trainer.check()


@rpc.functions.async_execution
def steps_begun() -> Any:
    runners = list(_runners.values())
    are_idle = torch.futures.collect_all([runner.idle() for runner in runners])
    return are_idle.then(lambda _: sum(runner._step is not None for runner in runners))


def test_a_stage_that_hangs(workers: Cluster) -> None:
    workers.run(0, times_out)


def dies(kind: str, after: int) -> tuple[str | None, int | None, int | None, str]:
    trainer = Trainer()
    trainer.check()
    rpc.rpc_sync("worker2", plant, (kind, after, die))
    with dist_autograd.context(), pytest.raises(PipelineError) as caught:
        trainer.step()
    error = caught.value
    first = error.worker, error.stage, error.micro_batch, str(error)
    assert isinstance(error.__cause__, ConnectionLostError)
    for worker in ("worker1", "worker3"):
        assert rpc.rpc_sync(worker, kept) == 0
    with dist_autograd.context(), pytest.raises(PipelineError, match="worker2, which has stage 1, was lost"):
        trainer.step()
    # Those who are left go on with another one.
    Trainer(names=["worker1", "worker0", "worker3"]).check()
    return first


@pytest.mark.parametrize(("kind", "after"), [("forward", 3), ("backward", 2)])
def test_a_worker_that_dies(kind: str, after: int) -> None:
    with cluster(4) as job:
        driver = job.start(0, dies, kind, after)
        job.wait(2)
        worker, stage, micro_batch, text = driver.result()
        assert (worker, stage) == ("worker2", 1)
        # What it had sent just before may not have arrived; the actions before this one are of the next micro-batches.
        assert micro_batch is not None, text
        assert abs(micro_batch - after) <= 1
        assert "worker2, which has stage 1, was lost. By what has arrived elsewhere, it had come to the" in text


def hold_a_step() -> None:
    trainer = Trainer()
    rpc.rpc_sync("worker2", plant, ("forward", 2, hang))
    with dist_autograd.context():
        trainer.step()


def check_empty() -> None:
    wait_until(lambda: not len(_runners), "no stages left")
    wait_until(lambda: rpc.rpc_sync(rpc.get_worker_info().name, torch.add, (torch.ones(1), 1)) == 2, "an answer")
    from farprop.runtime.agent_registry import current_agent

    wait_until(lambda: current_agent()._server.active == 0, "no request left")


def test_a_caller_that_dies_leaves_nothing_behind() -> None:
    with cluster(4) as job:
        job.start(0, hold_a_step)
        job.run(2, wait_for_fault, "forward")
        job.kill(0)
        job.run(2, let_go)
        for rank in (1, 2, 3):
            job.run(rank, check_empty)


def _interrupt_after(fault: Any) -> None:
    fault.wait()
    os.kill(os.getpid(), signal.SIGINT)


def interrupted() -> None:
    trainer = Trainer()
    for after in (0, 2, 5):
        rpc.rpc_sync("worker2", plant, ("forward", after, hang))
        fault = rpc.rpc_async("worker2", wait_for_fault, ("forward",))
        interrupt = threading.Thread(target=_interrupt_after, args=(fault,))
        interrupt.start()
        with dist_autograd.context(), pytest.raises(KeyboardInterrupt):
            trainer.step()
        interrupt.join()
        rpc.rpc_sync("worker2", heal)
        rpc.rpc_sync("worker2", let_go)
        trainer.check()
        rpc.rpc_sync("worker2", close)


def test_ctrl_c(workers: Cluster) -> None:
    workers.run(0, interrupted)


def mistakes() -> None:
    x, y = batch(4)
    stages = list(zip(["worker1", "worker2"], layers(2), strict=True))
    with pytest.raises(UsageError, match="There is no schedule '2f2b' of pipelines. Use '1f1b' or 'gpipe'."):
        farprop.pipeline(stages, micro_batches=2, schedule="2f2b")
    for number in (0, -1, 2.0, True):
        with pytest.raises(UsageError, match="micro_batches has to be a whole number from 1 on"):
            farprop.pipeline(stages, micro_batches=number)
    with pytest.raises(UsageError, match="at least one stage"):
        farprop.pipeline([], micro_batches=2)
    with pytest.raises(TypeError, match="Stage 1 of the pipeline is Linear.*A stage is"):
        farprop.pipeline([stages[0], nn.Linear(2, 2)], micro_batches=2)
    with pytest.raises(UsageError, match="nobody"):
        farprop.pipeline([("nobody", layers(1)[0])], micro_batches=2)
    with pytest.raises(ValueError, match="a bad batch") as caught:
        farprop.pipeline([stages[0], ("worker2", raise_it)], micro_batches=2)
    assert "worker2 could not make its part of the pipeline: stage 1." in caught.value.__notes__
    del caught

    pipe = farprop.pipeline(stages, micro_batches=2)
    assert repr(pipe) == "Pipeline(workers=['worker1', 'worker2'], schedule='1f1b')"
    with pytest.raises(UsageError, match="needs an autograd context"):
        pipe.step(x, y, loss_fn=mse_loss)
    with pytest.raises(TypeError, match="are a tensor or a tuple of tensors, and not dict"):
        pipe({"x": x})
    with pytest.raises(TypeError, match="number 1 is a int"):
        pipe((x, 3))
    with pytest.raises(UsageError, match="without dimensions"):
        pipe(torch.tensor(3.0))
    with dist_autograd.context():
        with pytest.raises(UsageError, match="The batch is empty"):
            pipe.step(x[:0], y[:0], loss_fn=mse_loss)
        with pytest.raises(UsageError, match=r"different numbers of samples: \[3, 4\]"):
            pipe.step((x, x[:3]), y, loss_fn=mse_loss)
        with pytest.raises(UsageError, match=r"The inputs have 4 samples and the targets \[3\]"):
            pipe.step(x, y[:3], loss_fn=mse_loss)
        with pytest.raises(UsageError, match="no gradient comes back from the first stage"):
            pipe.step(x.clone().requires_grad_(), y, loss_fn=mse_loss)
        with pytest.raises(UsageError, match="no reduction 'none'"):
            pipe.step(x, y, loss_fn=mse_loss, reduction="none")
        with pytest.raises(TypeError, match="loss_fn has to be a function"):
            pipe.step(x, y, loss_fn="mse")
        with pytest.raises(PipelineError, match="Stage 0 on worker1 failed in the forward of micro-batch 0.*shapes"):
            pipe.step(x[:, :2], y, loss_fn=mse_loss)
        pipe.step(x, y, loss_fn=mse_loss)


def test_mistakes(workers: Cluster) -> None:
    workers.run(0, mistakes)


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> Any:
        return self.value


def no_tensor() -> None:
    for value, text in [
        ({"x": 1}, "returned a dict"),
        (None, "returned None"),
        ((), "returned a tuple of nothing"),
        ((torch.ones(1), 2), "returned a tuple of Tensor, int"),
    ]:
        pipe = farprop.pipeline([("worker1", Returns(value)), ("worker2", nn.Identity())], micro_batches=2)
        with pytest.raises(PipelineError, match=f"Stage 0, a Returns, {text}. A stage has to return a tensor"):
            pipe(torch.ones(4))


def test_a_stage_that_returns_no_tensor(workers: Cluster) -> None:
    workers.run(0, no_tensor)


def at_the_same_time() -> None:
    trainer = Trainer()
    rpc.rpc_sync("worker1", plant, ("forward", 0, hang))
    with pytest.raises(UsageError, match="Another step of this pipeline is running"), _in_thread(trainer):
        rpc.rpc_sync("worker1", wait_for_fault, ("forward",))
        trainer.pipe(trainer.x)
    trainer.check()


@contextlib.contextmanager
def _in_thread(trainer: Trainer) -> Iterator[None]:
    def run() -> None:
        with dist_autograd.context():
            trainer.step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        rpc.rpc_sync("worker1", heal)
        rpc.rpc_sync("worker1", let_go)
        thread.join()


def test_one_step_at_a_time(workers: Cluster) -> None:
    workers.run(0, at_the_same_time)
