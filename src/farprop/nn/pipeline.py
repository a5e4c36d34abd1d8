"""``farprop.pipeline``: a model in stages on several workers, which work on micro-batches at the same time."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, Self

import torch
from torch import nn

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, PipelineError, RpcTimeoutError, UsageError
from farprop.locks import make_lock
from farprop.nn.remote_module import RemoteModule, _RemoteModule
from farprop.nn.stage_runner import (
    Activations,
    LossFunction,
    Report,
    StageRunner,
    StepOrder,
    Tensors,
    _abort,
    _begin,
    _deliver,
    _finished,
    _idle,
)
from farprop.protocol.pipeline_schedule import FORWARD, ONE_F_ONE_B, SCHEDULES, Action, make_plans, reached
from farprop.rpc import RRef
from farprop.rpc.options import checked_timeout
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.autograd.contexts import current_context
from farprop.runtime.futures import Future, wait_until
from farprop.runtime.recorder import recorder
from farprop.runtime.sync import awaited_by
from farprop.runtime.thread_pool import check_may_block, pool_of_this_thread

__all__ = ["Pipeline", "pipeline"]

Stage = tuple[str, Callable[[], nn.Module] | nn.Module] | RemoteModule[Any] | RRef[Any]
AnyFuture = torch.futures.Future[Any]

_A_STEP = "wait for a step of a pipeline"
_ABORT_SECONDS = 5.0  # that a worker may take to say what it had come to
_IDLE_SECONDS = 1.0  # that the caller waits for actions that run while a step is aborted
_LOOK_SECONDS = 0.5  # how often a thread that waits looks by itself


class Pipeline:
    """A model in stages. :func:`farprop.pipeline` makes it.

    A step divides its batch into micro-batches. Each goes through all stages and back; a stage works on one while the
    next stage works on the one before. Activations and gradients go directly from the worker of one stage to that of
    the next.

    Args:
        stages: As for :func:`farprop.pipeline`.
        micro_batches: As for :func:`farprop.pipeline`.
        schedule: As for :func:`farprop.pipeline`.
    """

    def __init__(self, stages: Iterable[Stage], micro_batches: int, schedule: str) -> None:
        if schedule not in SCHEDULES:
            raise UsageError(
                f"There is no schedule {schedule!r} of pipelines. Use {' or '.join(map(repr, SCHEDULES))}."
            )
        if type(micro_batches) is not int or micro_batches < 1:
            raise UsageError(f"micro_batches has to be a whole number from 1 on, and not {micro_batches!r}.")
        self._id = uuid.uuid4().hex
        self._micro_batches = micro_batches
        self._schedule = schedule
        self._numbers = itertools.count(1)
        self._lock = make_lock("pipeline")
        self._is_running = False
        outer = current_context.set(None)  # the parameters of modules are not part of a graph
        try:
            modules = [_module_of(place, stage) for place, stage in enumerate(stages)]
            if not modules:
                raise UsageError("A pipeline needs at least one stage: farprop.pipeline([('worker1', make_stage)]).")
            self._workers = tuple(module.owner_name() for module, _ in modules)
            self._runners = self._make_runners(modules)
        finally:
            current_context.reset(outer)

    def _make_runners(self, modules: Sequence[tuple[RRef[nn.Module], str]]) -> dict[str, RRef[StageRunner]]:
        runners: dict[str, RRef[StageRunner]] = {}
        for worker in dict.fromkeys(self._workers):
            own = {stage: modules[stage] for stage, name in enumerate(self._workers) if name == worker}
            runners[worker] = rpc.remote(worker, StageRunner, (self._id, own, self._workers))
        for worker, runner in runners.items():
            try:
                runner.rpc_sync().count()  # raises if a stage could not be made
            except Exception as error:
                error.add_note(f"{worker} could not make its part of the pipeline: {self._stages_of(worker)}.")
                raise
        return runners

    @property
    def schedule(self) -> str:
        """The name of its schedule."""
        return self._schedule

    @property
    def workers(self) -> tuple[str, ...]:
        """For each stage, the name of its worker."""
        return self._workers

    def parameters(self) -> list[RRef[nn.Parameter]]:
        """Get references to the parameters of all stages, for a ``DistributedOptimizer``.

        Returns:
            A reference for each parameter. Those of one worker are together.
        """
        found: list[RRef[nn.Parameter]] = []
        for runner in self._runners.values():
            found.extend(runner.rpc_sync().parameters())
        return found

    def train(self, mode: bool = True) -> Self:
        """Set all stages to training or evaluation mode.

        Args:
            mode: Whether to set training mode.

        Returns:
            This pipeline.
        """
        for runner in self._runners.values():
            runner.rpc_sync().train(mode)
        return self

    def eval(self) -> Self:
        """Set all stages to evaluation mode.

        Returns:
            This pipeline.
        """
        return self.train(False)

    def step(
        self,
        inputs: torch.Tensor | Sequence[torch.Tensor],
        targets: torch.Tensor | Sequence[torch.Tensor],
        *,
        loss_fn: LossFunction,
        reduction: str = "mean",
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Run a batch forward and backward through all stages.

        The gradients of the parameters are accumulated in the current autograd context, where
        ``DistributedOptimizer.step``, ``clip_grad_norm_`` and ``get_gradients`` find them. After an error they are
        those from before the step.

        Args:
            inputs: The arguments of the first stage: a tensor or several, whose first dimension is the batch.
            targets: What ``loss_fn`` gets beside the output of the last stage, divided in the same way.
            loss_fn: Called with the output of the last stage and the targets of a micro-batch, on the worker of the
                last stage; returns a tensor with one element.
            reduction: What ``loss_fn`` computes over its samples, ``"mean"`` or ``"sum"``, and so what the step
                computes over the batch. Of means, a micro-batch counts by its number of samples.
            timeout: The seconds that the step may take; 0 disables the timeout. By default the timeout of calls.

        Returns:
            The loss of the batch, without a graph.

        Raises:
            PipelineError: A stage, ``loss_fn`` or a worker failed. ``__cause__`` says how.
            RpcTimeoutError: The step took longer than its timeout. The text says what each worker had come to.
            UsageError: There is no autograd context, another step of this pipeline is running, the batch is empty or
                its tensors have different numbers of samples, or an input requires grad.
            TypeError: An input or a target is not a tensor, or ``loss_fn`` can't be called.

        Example:
            ``with dist_autograd.context() as context_id:``, then ``loss = pipe.step(x, y, loss_fn=F.mse_loss)`` and
            ``optimizer.step(context_id)``
        """
        if current_context.get() is None:
            raise UsageError(
                "pipe.step() needs an autograd context, in which it leaves the gradients: "
                "'with farprop.autograd.context() as context_id:'. For a forward pass alone call pipe(inputs)."
            )
        if not callable(loss_fn):
            raise TypeError(f"loss_fn has to be a function of an output and targets, and not {loss_fn!r}.")
        if reduction not in ("mean", "sum"):
            raise UsageError(f"There is no reduction {reduction!r} of losses. Use 'mean' or 'sum'.")
        split = self._split(_tensors(inputs, "inputs"))
        samples = [len(part[0]) for part in split]
        wanted = _tensors(targets, "targets")
        if {len(target) for target in wanted} != {sum(samples)}:
            raise UsageError(
                f"The inputs have {sum(samples)} samples and the targets {sorted({len(t) for t in wanted})}. Both are "
                "divided into micro-batches along their first dimension."
            )
        parts = zip(*(target.split(samples) for target in wanted), strict=True)
        divided = tuple(part[0] if isinstance(targets, torch.Tensor) else part for part in parts)
        weights = tuple(count / sum(samples) if reduction == "mean" else 1.0 for count in samples)
        loss: torch.Tensor = self._run(split, weights, True, loss_fn, divided, timeout)
        return loss

    def __call__(self, inputs: torch.Tensor | Sequence[torch.Tensor], *, timeout: float | None = None) -> Any:
        """Run a batch forward through all stages, in micro-batches, without gradients.

        Args:
            inputs: As for :meth:`step`.
            timeout: As for :meth:`step`.

        Returns:
            The output of the last stage for the whole batch: a tensor, or a tuple of tensors.

        Raises:
            PipelineError: A stage or a worker failed. ``__cause__`` says how.
            RpcTimeoutError: It took longer than its timeout.
            UsageError: As for :meth:`step`.
            TypeError: An input is not a tensor.
        """
        split = self._split(_tensors(inputs, "inputs"))
        return self._run(split, (1.0,) * len(split), False, None, (), timeout)

    def __repr__(self) -> str:
        return f"Pipeline(workers={list(self._workers)}, schedule={self._schedule!r})"

    def _split(self, inputs: Tensors) -> list[Tensors]:
        """The micro-batches: as many as there are to be, or as there are samples."""
        counts = {len(tensor) for tensor in inputs}
        if len(counts) != 1:
            raise UsageError(f"The inputs have different numbers of samples: {sorted(counts)}.")
        (samples,) = counts
        if samples == 0:
            raise UsageError("The batch is empty: a step needs at least one sample.")
        if any(tensor.requires_grad and torch.is_grad_enabled() for tensor in inputs):
            raise UsageError(
                "An input of the pipeline requires grad, and no gradient comes back from the first stage. Make what "
                "computes it a stage, which may be on this worker, or pass inputs.detach()."
            )
        number = min(self._micro_batches, samples)
        divided = [tensor.detach().tensor_split(number) for tensor in inputs]
        return list(zip(*divided, strict=True))

    # A step

    def _run(
        self,
        split: Sequence[Tensors],
        weights: tuple[float, ...],
        trains: bool,
        loss_fn: LossFunction | None,
        targets: tuple[Any, ...],
        timeout: float | None,
    ) -> Any:
        check_may_block("A step of a pipeline")
        seconds = current_agent().rpc_timeout if timeout is None else checked_timeout(timeout)
        outer = current_context.get()
        is_ours = False
        try:
            with self._lock:
                if self._is_running:
                    raise UsageError("Another step of this pipeline is running. Make a pipeline for each thread.")
                self._is_running = is_ours = True
            run = _Run(self, next(self._numbers), len(split), trains, seconds)
            order = StepOrder(run.number, self._schedule, weights, trains, loss_fn, (), seconds)
            try:
                run.begin(order, targets)
                current_context.set(None)
                return run.finish(split)
            except BaseException as error:
                current_context.set(None)
                run.abort(error)
                raise
        finally:
            current_context.set(outer)
            if is_ours:
                self._is_running = False

    def _stages_of(self, worker: str) -> str:
        own = [str(stage) for stage, name in enumerate(self._workers) if name == worker]
        return f"stage{'s' if len(own) > 1 else ''} {' and '.join(own)}"


class _Run:
    """One step, or one forward pass, from its beginning to its end."""

    def __init__(self, pipe: Pipeline, number: int, micro_batches: int, trains: bool, seconds: float | None) -> None:
        self.number = number
        self._pipe = pipe
        self._id = pipe._id
        self._workers = tuple(pipe._runners)
        self._seconds = seconds
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._plans = make_plans(pipe._schedule, pipe._workers, micro_batches, trains)
        self._failed_on: str | None = None

    def begin(self, order: StepOrder, targets: tuple[Any, ...]) -> None:
        """Tell all workers of the step, in its autograd context; returns when they know."""
        last = self._pipe._workers[-1]
        calls = {
            worker: rpc.rpc_async(
                worker, _begin, (self._id, order._replace(targets=targets) if worker == last else order), timeout=0
            )
            for worker in self._workers
        }
        self._wait(calls)

    def finish(self, split: Sequence[Tensors]) -> Any:
        """Send the inputs, and wait until all workers are done; returns what the last stage made."""
        calls = {
            worker: rpc.rpc_async(worker, _finished, (self._id, self.number), timeout=0) for worker in self._workers
        }
        first = self._pipe._workers[0]
        inputs: list[AnyFuture] = []
        for micro_batch, tensors in enumerate(split):
            action = (FORWARD, 0, micro_batch)
            value = Activations(tensors, (False,) * len(tensors))
            inputs.append(rpc.rpc_async(first, _deliver, (self._id, self.number, action, value), timeout=0))
        self._wait(calls, first, inputs)
        return calls[self._pipe._workers[-1]].wait()

    def _wait(self, calls: dict[str, Any], first: str = "", inputs: Sequence[AnyFuture] = ()) -> None:
        """Wait until all calls have ended, or one has failed, which is raised."""
        waited = [*((first, call) for call in inputs), *calls.items()]
        ended: SimpleQueue[AnyFuture] = SimpleQueue()
        for _, call in waited:
            call.add_done_callback(ended.put)  # C code: torch swallows interrupts in a callback
        while waited:
            left = _LOOK_SECONDS if self._deadline is None else min(_LOOK_SECONDS, self._deadline - time.monotonic())
            if left <= 0:
                raise RpcTimeoutError(f"A step of the pipeline did not end within {self._seconds:.1f} s.")
            with _waiting(waited[0][1]), contextlib.suppress(Empty):
                ended.get(timeout=left)
            for worker, call in waited:
                if call.done():
                    self._failed_on = worker
                    call.wait()
                    self._failed_on = None
            waited = [(worker, call) for worker, call in waited if not call.done()]

    # The end of one that failed

    def abort(self, error: BaseException) -> None:
        """Have all workers let go of the step, and raise what went wrong where; returns if that was an interrupt."""
        reports, silent = self._ask_all()
        lost = [worker for worker, why in silent.items() if isinstance(why, ConnectionLostError)]
        if not isinstance(error, Exception):
            return
        if isinstance(error, RpcTimeoutError) and self._failed_on is None:
            for worker, report in reports.items():
                if report.running is not None:
                    error.add_note(f"{worker} runs {report.running} through stage {report.running.stage}.")
            for worker, why in silent.items():
                error.add_note(f"{worker} did not say what it does: {why}")
            return
        if lost:
            self._raise_lost(lost[0], reports, error)
        failed = reports[self._failed_on].failed if self._failed_on in reports else None
        if failed is None:
            return  # no stage was at fault: an argument can't be sent, for example, and the error says so
        text = f"Stage {failed.stage} on {self._failed_on} failed in {failed}: {type(error).__name__}: {error}"
        raise _located(PipelineError(text), self._failed_on, failed.stage, failed.micro_batch) from error

    def _ask_all(self) -> tuple[dict[str, Report], dict[str, Exception]]:
        """Have all workers abort; returns their reports, and why the others gave none."""
        reports: dict[str, Report] = {}
        silent: dict[str, Exception] = {}
        calls: dict[str, Future[Report]] = {}
        for worker in self._workers:
            try:
                # Without a deadline of its own: a worker whose only thread runs a stage gets to it later.
                calls[worker] = rpc.rpc_async(worker, _abort, (self._id, self.number), timeout=0)
            except Exception as error:
                silent[worker] = error
        until = time.monotonic() + _ABORT_SECONDS
        for worker, call in calls.items():
            try:
                if not wait_until(call, until):
                    raise RpcTimeoutError(f"There was no answer within {_ABORT_SECONDS:.0f} s.")
                reports[worker] = call.wait()
            except Exception as error:
                silent[worker] = error
        for idle in [rpc.rpc_async(worker, _idle, (self._id,), timeout=_IDLE_SECONDS) for worker in reports]:
            try:
                idle.wait()
            except Exception:
                pass  # its stage runs on; the next step waits for it
        return reports, silent

    def _raise_lost(self, worker: str, reports: dict[str, Report], error: Exception) -> NoReturn:
        """A worker is gone: say what it had come to, as far as the others know."""
        received = {Action(*action) for report in reports.values() for action in report.received}
        at = reached(self._plans[worker], received, len(self._pipe._workers)) if received else None
        where = self._pipe._stages_of(worker) if at is None else f"stage {at.stage}"
        when = "" if at is None else f". By what has arrived elsewhere, it had come to {at}"
        made = PipelineError(f"{worker}, which has {where}, was lost{when}: {type(error).__name__}: {error}")
        stage = self._pipe._workers.index(worker) if at is None else at.stage
        raise _located(made, worker, stage, None if at is None else at.micro_batch) from error


@contextlib.contextmanager
def _waiting(call: AnyFuture) -> Iterator[None]:
    """This thread waits: one of the pool does not count as running meanwhile, and inspection and traces know of it."""
    me = threading.get_ident()
    pool = pool_of_this_thread()
    began = recorder.begin_wait(_A_STEP) if recorder.is_on else 0.0
    awaited_by[me] = call
    try:
        with contextlib.nullcontext() if pool is None else pool.blocked():
            yield
    finally:
        awaited_by.pop(me, None)
        if began:
            recorder.end_wait(_A_STEP, began)


def _located(error: PipelineError, worker: str | None, stage: int, micro_batch: int | None) -> PipelineError:
    error.worker, error.stage, error.micro_batch = worker, stage, micro_batch
    return error


def pipeline(stages: Iterable[Stage], *, micro_batches: int, schedule: str = ONE_F_ONE_B) -> Pipeline:
    """Make a pipeline of the stages of a model.

    Args:
        stages: The stages, in order. Each is a pair of a worker and what makes the stage there, a class or function
            without arguments, or a module, of which the worker gets a copy; or a ``RemoteModule``; or an ``RRef`` of a
            module. A worker may have several stages, and this worker may have some.
        micro_batches: Into how many parts a batch is divided. Their sizes differ by one sample at most; a batch of
            fewer samples has as many parts as samples.
        schedule: ``"1f1b"`` begins to send gradients back as soon as it can, so a stage keeps the activations of as
            many micro-batches as there are stages from it on. ``"gpipe"`` runs all forwards first, and keeps all.

    Returns:
        The pipeline.

    Raises:
        UsageError: There is no such schedule or worker, there are no stages, or ``micro_batches`` is not positive.
        TypeError: A stage is none of the above.
        Exception: What a function raised that makes a stage.

    Example:
        ``pipe = farprop.pipeline([("worker1", make_encoder), ("worker2", make_decoder)], micro_batches=8)``
    """
    return Pipeline(stages, micro_batches, schedule)


def _module_of(place: int, stage: Any) -> tuple[RRef[nn.Module], str]:
    """A reference to the module of a stage, and its device."""
    if isinstance(stage, _RemoteModule):
        return stage.get_module_rref(), stage.device
    if isinstance(stage, RRef):
        return stage, "cpu"
    if isinstance(stage, tuple) and len(stage) == 2 and isinstance(stage[0], str) and callable(stage[1]):
        where, make = stage
        if isinstance(make, nn.Module):
            remote: RemoteModule[nn.Module] = RemoteModule(where, _same, (make,))
        else:
            remote = RemoteModule(where, make)
        return remote.get_module_rref(), remote.device
    raise TypeError(
        f"Stage {place} of the pipeline is {stage!r:.100}. A stage is ('worker1', make_module), ('worker1', module), a "
        "RemoteModule, or an RRef of a module."
    )


def _same(module: nn.Module) -> nn.Module:
    return module


def _tensors(value: Any, what: str) -> Tensors:
    tensors = (value,) if isinstance(value, torch.Tensor) else value
    if not isinstance(tensors, tuple | list) or not tensors:
        raise TypeError(f"The {what} of a pipeline are a tensor or a tuple of tensors, and not {type(value).__name__}.")
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"The {what} of a pipeline are tensors, but number {place} is a {type(tensor).__name__}.")
        if tensor.dim() == 0:
            raise UsageError(
                f"The {what} of a pipeline have samples, but number {place} is a tensor without dimensions."
            )
    return tuple(tensors)
