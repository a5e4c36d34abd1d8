"""What runs on a worker that has stages of a pipeline: it follows its plan, and sends results to the next stage.

A ``StageRunner`` belongs to one pipeline and one worker. The pipeline has a reference to it, and no runner refers to
another one: they find each other by the pipeline's id. So when the pipeline is dropped, or its process dies, the
runners are freed with everything that they keep.

Rules that hold here:

- No function waits: inputs are stored (``_deliver``), and actions are run by a call to this worker itself (``_act``),
  which goes on while the next input is there. So an action counts as a request, runs in the autograd context of the
  step, and the answer to a delivery says only that it has arrived.
- One action at a time, also if that of an aborted step still runs. The next step begins when it has ended.
- What arrives for a step that this runner does not run is dropped.
- Nothing is called while the lock is held.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import farprop.rpc as rpc
from farprop._torch import tree_map_only
from farprop.errors import FarpropError, UsageError
from farprop.locks import make_lock
from farprop.protocol import events
from farprop.protocol.pipeline_schedule import FORWARD, Action, PlanExecution, make_plans, successor
from farprop.rpc import RRef
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.autograd.contexts import Context, current_context
from farprop.runtime.futures import Future
from farprop.runtime.recorder import recorder

Tensors = tuple[torch.Tensor, ...]
LossFunction = Callable[[Any, Any], torch.Tensor]


class Activations(NamedTuple):
    """The output of a forward on its way to the next stage, outside of any graph."""

    tensors: Tensors
    require_grad: tuple[bool, ...]


class StepOrder(NamedTuple):
    """What a worker has to know of a step before anything of it arrives."""

    number: int
    schedule: str
    weights: tuple[float, ...]
    """By micro-batch, its part of the loss."""
    trains: bool
    loss_fn: LossFunction | None
    targets: tuple[Any, ...]
    """By micro-batch, for the worker of the last stage."""
    timeout: float | None
    """Of backward passes that a stage needs other workers for."""


class Report(NamedTuple):
    """What a worker tells of a step that has failed."""

    received: list[Action]
    running: Action | None
    failed: Action | None
    """The action that raised, or whose result could not be sent."""


@dataclass(eq=False)
class _Step:
    """A step on this worker. Once it is not the runner's any more, nobody uses it but a thread that runs its action."""

    order: StepOrder
    execution: PlanExecution
    context: Context | None
    before: dict[torch.Tensor, torch.Tensor] | None  # what the context had here at its beginning; None if it has again
    finished: Future[Any] = field(default_factory=Future)
    inputs: dict[Action, Any] = field(default_factory=dict)
    graphs: dict[tuple[int, int], tuple[Tensors, Tensors]] = field(default_factory=dict)  # leaves and outputs
    results: list[Any] = field(default_factory=list)  # of the last stage, by micro-batch


class _Stage(NamedTuple):
    module: nn.Module
    device: torch.device


_runners: weakref.WeakValueDictionary[str, StageRunner] = weakref.WeakValueDictionary()


class StageRunner:
    """The stages that this worker has in one pipeline. Methods may be called from any thread.

    Args:
        pipeline: The id of the pipeline.
        modules: By stage, a reference to its module, which is here, and its device.
        workers: By stage, its worker, for all stages of the pipeline.
    """

    def __init__(
        self, pipeline: str, modules: dict[int, tuple[RRef[nn.Module], str]], workers: tuple[str, ...]
    ) -> None:
        self._pipeline = pipeline
        self._stages = {
            stage: _Stage(module.local_value(), torch.device(device)) for stage, (module, device) in modules.items()
        }
        self._workers = workers
        self._own = rpc.get_worker_info().name
        self._lock = make_lock("stage_runner")
        self._step: _Step | None = None
        self._acting: tuple[_Step, Action] | None = None  # what runs; not always of the current step
        self._over = 0  # the steps up to this number were aborted, or followed by another one
        self._failed: tuple[int, Report] | None = None  # the last step that failed here
        self._outcome: tuple[int, Future[Any]] | None = None  # of the last step, until somebody asks for it
        # The last step that has ended here, and may fail elsewhere: by its context, its number and what to put back.
        self._ended: weakref.WeakKeyDictionary[Context, tuple[int, dict[torch.Tensor, torch.Tensor]]]
        self._ended = weakref.WeakKeyDictionary()
        self._when_idle: list[Callable[[], None]] = []
        self._unanswered: dict[Future[Any], None] = {}
        weakref.finalize(self, _fail_all, current_agent().services, self._unanswered).atexit = False
        _runners[pipeline] = self

    # The modules

    def parameters(self) -> list[RRef[nn.Parameter]]:
        """References to the parameters, in the order of the stages; one that stages share is there once."""
        found = dict.fromkeys(p for stage in self._stages.values() for p in stage.module.parameters())
        return [RRef(parameter) for parameter in found]

    def train(self, mode: bool) -> None:
        for stage in self._stages.values():
            stage.module.train(mode)

    def count(self) -> int:
        """How many tensors this runner keeps for steps; for tests."""
        with self._lock:
            step = self._step
            return 0 if step is None else len(step.inputs) + len(step.graphs) + len(step.results)

    # Steps

    def idle(self) -> Future[None]:
        """A future that is done when no action runs."""
        done: Future[None] = Future()
        self._unanswered[done] = None
        self._run_when_idle(partial(self._complete, done, None))
        return done

    def _run_when_idle(self, function: Callable[[], None]) -> None:
        with self._lock:
            is_idle = self._acting is None
            if not is_idle:
                self._when_idle.append(function)
        if is_idle:
            function()

    def begin(self, order: StepOrder) -> Future[None]:
        """A step begins; returns a future that is done when it has. What is left of an earlier one is dropped."""
        began: Future[None] = Future()
        self._unanswered[began] = None
        self._drop(None)
        with self._lock:
            self._over = max(self._over, order.number - 1)
        self._run_when_idle(partial(self._begin_idle, order, current_context.get() if order.trains else None, began))
        return began

    def _begin_idle(self, order: StepOrder, context: Context | None, began: Future[None]) -> None:
        before = None
        if context is not None:
            with context.lock:
                before = dict(context.gradients)
        plans = make_plans(order.schedule, self._workers, len(order.weights), order.trains)
        step = _Step(order, PlanExecution(plans[self._own], len(self._workers)), context, before)
        with self._lock:
            is_over = order.number <= self._over  # meanwhile: it had to wait for an action
            if not is_over:
                self._failed = None
                self._ended.clear()
                self._step = step
                self._outcome = order.number, step.finished
        self._complete(began, FarpropError(f"Step {order.number} of the pipeline was aborted.") if is_over else None)

    def finished(self, number: int) -> Future[Any]:
        """A future of this worker's result of a step: what the last stage made, or None. It can be asked for once."""
        with self._lock:
            outcome = self._outcome
            if outcome is None or outcome[0] != number:
                raise FarpropError(f"Step {number} of the pipeline was aborted.")
            self._outcome = None
            if not outcome[1].done():
                self._unanswered[outcome[1]] = None
        return outcome[1]

    def on_input(self, number: int, action: Action, value: Any) -> None:
        """The input of an action has arrived."""
        step = self._store(number, action, value)
        if step is not None:
            self._go_on(step)

    def _store(self, number: int, action: Action, value: Any) -> _Step | None:
        """Keep the input of an action; returns its step, or None if that was aborted."""
        with self._lock:
            step = self._step
            if step is None or step.order.number != number:
                return None
            step.execution.on_input(action)
            step.inputs[action] = value
            return step

    def _go_on(self, step: _Step) -> None:
        """Begin the next action, if it can begin, with a call to this worker itself."""
        action = self._start(step)
        if action is None:
            return
        outer = current_context.set(step.context)
        try:
            call = rpc.rpc_async(self._own, _act, (self._pipeline, step.order.number), timeout=0)
        except Exception as error:
            self._on_not_run(step, action, error)
        else:
            call.add_done_callback(_on_error(self._on_not_run, step, action))
        finally:
            current_context.reset(outer)

    def _start(self, step: _Step) -> Action | None:
        with self._lock:
            action = step.execution.start() if step is self._step and self._acting is None else None
            if action is not None:
                self._acting = step, action
            return action

    def _on_not_run(self, step: _Step, action: Action, error: Exception) -> None:
        """The call to this worker itself failed: it was not run, or an action of it wanted to end the process."""
        with self._lock:
            acting = self._acting
        if acting is not None and acting[0] is step:
            action = acting[1]  # maybe not the one that the call began with
        self._end_action(step, action)
        self._fail(step, action, error)

    def act(self, number: int) -> None:
        """Run the action that has begun, and those after it whose inputs are there."""
        with self._lock:
            acting = self._acting
        if acting is None or acting[0].order.number != number:
            return
        step = acting[0]
        action: Action | None = acting[1]
        while action is not None:
            action = self._act_once(step, action)

    def _act_once(self, step: _Step, action: Action) -> Action | None:
        """Run an action; returns the next one, which has begun."""
        result = None
        with self._lock:
            is_current = step is self._step
        if is_current:
            try:
                result = self._run(step, action)
            except Exception as error:
                self._end_action(step, action)
                self._fail(step, action, error)
                return None
        with self._lock:
            step.execution.on_ended()
            is_done = step.execution.is_done
        self._end_action(step, action)
        following = successor(action, len(self._workers))
        if following is not None:
            self._send(step, action, following, result)
        if is_done:
            self._finish(step)
        return self._start(step)

    def _end_action(self, step: _Step, action: Action) -> None:
        """This action does not run any more. If its step was aborted meanwhile, its gradients are undone now."""
        with self._lock:
            if self._acting != (step, action):
                return
            self._acting = None
            is_current = step is self._step
            idle, self._when_idle = self._when_idle, []
        if not is_current:
            self._undo(step)
        for function in idle:
            function()

    def _send(self, step: _Step, action: Action, to: Action, value: Any) -> None:
        with self._lock:
            if step is not self._step:
                return
        worker = self._workers[to.stage]
        if worker == self._own:
            self._store(step.order.number, to, value)
            return
        outer = current_context.set(None)  # the receiver knows the context of the step
        try:
            call = rpc.rpc_async(worker, _deliver, (self._pipeline, step.order.number, tuple(to), value), timeout=0)
        except Exception as error:
            self._fail(step, action, error)
        else:
            call.add_done_callback(_on_error(self._fail, step, action))
        finally:
            current_context.reset(outer)

    def _finish(self, step: _Step) -> None:
        with self._lock:
            if self._step is not step:
                return
            self._step = None
            if step.context is not None and step.before is not None:
                self._ended[step.context] = step.order.number, step.before
        self._complete(step.finished, _result_of(step))

    def _fail(self, step: _Step, action: Action, error: Exception) -> None:
        """An action raised, or its result could not be sent. The pipeline is told, and aborts the step everywhere."""
        with self._lock:
            if self._step is not step:
                return
            self._step = None
            self._failed = step.order.number, Report(sorted(step.execution.received), None, action)
        self._let_go(step)
        self._complete(step.finished, error)

    def abort(self, number: int) -> Report:
        """A step has failed somewhere: let go of everything that is kept for it."""
        with self._lock:
            self._over = max(self._over, number)
        report = self._drop(number)
        if report is not None:
            return report
        with self._lock:
            failed = self._failed
            if self._outcome is not None and self._outcome[0] == number:
                self._outcome = None
            ended = [(context, before) for context, (other, before) in self._ended.items() if other == number]
            self._ended.clear()
        for context, before in ended:
            _put_back(context, before)
        return failed[1] if failed is not None and failed[0] == number else Report([], None, None)

    def _drop(self, number: int | None) -> Report | None:
        """Drop the current step, if it has this number."""
        with self._lock:
            step = self._step
            if step is None or number not in (None, step.order.number):
                return None
            self._step = self._outcome = None
            report = Report(sorted(step.execution.received), step.execution.running, None)
        self._let_go(step)
        self._complete(step.finished, FarpropError("The step of the pipeline was aborted."))
        return report

    def _let_go(self, step: _Step) -> None:
        with self._lock:
            is_acting = self._acting is not None and self._acting[0] is step
            for table in (step.inputs, step.graphs, step.results):
                table.clear()
        if not is_acting:
            self._undo(step)

    def _undo(self, step: _Step) -> None:
        if step.context is not None and step.before is not None:
            _put_back(step.context, step.before)
            step.before = None

    def _complete(self, future: Future[Any], outcome: Any) -> None:
        self._unanswered.pop(future, None)
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    # Actions

    def _run(self, step: _Step, action: Action) -> Any:
        began = time.monotonic() if recorder.is_on else 0.0
        with self._lock:
            value = step.inputs.pop(action, None)
        stage = self._stages[action.stage]
        if action.kind == FORWARD:
            result: Any = self._forward(step, action, stage, value)
        else:
            result = self._backward(step, action, stage, value)
        if began:
            name = f"{action.kind} {action.micro_batch} of stage {action.stage}"
            recorder.span(events.STAGE, name, began, stage=action.stage, micro_batch=action.micro_batch)
        return result

    def _forward(self, step: _Step, action: Action, stage: _Stage, value: Activations) -> Activations | None:
        """Run the module; what leaves the stage is outside of its graph."""
        _, number, micro_batch = action
        trains = step.order.trains
        # A new tensor for each: a stage on the same worker has this one in its own graph.
        leaves = tuple(
            tensor.detach().requires_grad_(trains and requires)
            for tensor, requires in zip(value.tensors, value.require_grad, strict=True)
        )
        moved = leaves if stage.device.type == "cpu" else tuple(leaf.to(stage.device) for leaf in leaves)
        with torch.set_grad_enabled(trains):
            output = stage.module(*moved)
            checked = _tensors_of(output, f"Stage {number}, a {type(stage.module).__name__},")
            if number < len(self._workers) - 1:
                outputs = _distinct(tensor.cpu() for tensor in checked)
                activations = Activations(
                    tuple(tensor.detach() for tensor in outputs), tuple(tensor.requires_grad for tensor in outputs)
                )
            else:
                outputs = self._results(step, micro_batch, output)
                activations = None
        if trains:
            with self._lock:
                if step is self._step:
                    step.graphs[number, micro_batch] = leaves, outputs
        return activations

    def _results(self, step: _Step, micro_batch: int, output: Any) -> Tensors:
        """What the last stage makes of its output: the loss, or what ``pipe(inputs)`` returns."""
        order = step.order
        if order.loss_fn is None:
            with self._lock:
                step.results.append(tree_map_only(torch.Tensor, torch.Tensor.cpu, output))
            return ()
        loss = order.loss_fn(tree_map_only(torch.Tensor, torch.Tensor.cpu, output), order.targets[micro_batch])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            kind = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"loss_fn has to return a tensor with one element, and not one of {kind}. Take its mean.")
        if not loss.requires_grad:
            raise UsageError(
                "The loss does not require grad, so there is nothing to train: no parameter of a stage requires grad, "
                "or loss_fn has detached its argument. For a forward pass alone call the pipeline: pipe(inputs)."
            )
        with self._lock:
            step.results.append(loss.detach() * order.weights[micro_batch])
        return (loss,)

    def _backward(self, step: _Step, action: Action, stage: _Stage, value: Any) -> tuple[torch.Tensor | None, ...]:
        """Run the backward pass of a micro-batch in the context of the step; returns the gradients of its inputs."""
        _, number, micro_batch = action
        with self._lock:
            leaves, outputs = step.graphs.pop((number, micro_batch))
        if number == len(self._workers) - 1:
            value = (torch.full_like(outputs[0], step.order.weights[micro_batch], requires_grad=False),)
        pairs = [
            ((output.grad_fn, output.output_nr), gradient)
            for output, gradient in zip(outputs, value, strict=True)
            if gradient is not None and output.grad_fn is not None
        ]
        context = step.context
        assert context is not None
        if pairs:
            # As torch asks for it: backward passes are not run under autocast.
            is_cast = torch.amp.is_autocast_available(stage.device.type)
            with torch.autocast(stage.device.type, enabled=False) if is_cast else nullcontext():
                edges, gradients = zip(*pairs, strict=True)
                driver = current_agent().gradients
                driver.backward_from_edges(context, edges, list(gradients), False, False, step.order.timeout)
        with context.lock:
            return tuple(context.gradients.pop(leaf, None) if leaf.requires_grad else None for leaf in leaves)


def _put_back(context: Context, before: dict[torch.Tensor, torch.Tensor]) -> None:
    """Give a context the gradients that it had before a step. Passes add out of place, so they have not changed."""
    with context.lock:
        context.gradients.clear()
        context.gradients.update(before)


def _result_of(step: _Step) -> Any:
    """What the caller of the step gets from the worker of the last stage; None from the others."""
    if not step.results:
        return None
    if step.order.loss_fn is not None:
        return torch.stack(step.results).sum()
    first = step.results[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(step.results)
    return tuple(torch.cat(parts) for parts in zip(*step.results, strict=True))


def _tensors_of(output: Any, who: str) -> Tensors:
    tensors = (output,) if isinstance(output, torch.Tensor) else output
    if not isinstance(tensors, tuple | list) or not tensors or not all(isinstance(t, torch.Tensor) for t in tensors):
        raise UsageError(
            f"{who} returned {_described(output)}. A stage has to return a tensor or a tuple of tensors, which are the "
            "arguments of the next stage."
        )
    return tuple(tensors)


def _described(output: Any) -> str:
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of {', '.join(type(part).__name__ for part in output) or 'nothing'}"
    return "None" if output is None else f"a {type(output).__name__}"


def _distinct(outputs: Iterable[torch.Tensor]) -> Tensors:
    """The tensors, each with an edge of its own to start a pass from: not a leaf, and not one of them twice."""
    found: list[torch.Tensor] = []
    for tensor in outputs:
        is_taken = tensor.is_leaf or any(tensor is other for other in found)
        found.append(tensor.view_as(tensor) if tensor.requires_grad and is_taken else tensor)
    return tuple(found)


def _on_error(handle: Callable[..., None], *args: Any) -> Callable[[Any], None]:
    """A callback for the future of a call that calls ``handle`` if the call failed."""

    def done(future: torch.futures.Future[Any]) -> None:
        try:
            future.wait()
        except Exception as error:
            handle(*args, error)
            error.__traceback__ = None  # a cycle through its frames and the future, which the collector can't see

    return done


def _fail_all(services: Any, unanswered: dict[Future[Any], None]) -> None:
    """The runner is gone: nobody will answer these. A finaliser takes no locks, so another thread does it."""

    def fail() -> None:
        for future in list(unanswered):
            if not future.done():
                future.set_exception(FarpropError("The pipeline is gone."))

    if unanswered:
        services.call_at_lockfree(0.0, lambda: services.submit(fail))


# Called by the pipeline and by other runners


def _runner(pipeline: str) -> StageRunner:
    runner = _runners.get(pipeline)
    if runner is None:
        raise UsageError("This worker does not have the pipeline any more: it was dropped.")
    return runner


@rpc.functions.async_execution
def _idle(pipeline: str) -> Future[None]:
    return _runner(pipeline).idle()


@rpc.functions.async_execution
def _begin(pipeline: str, order: StepOrder) -> Future[None]:
    return _runner(pipeline).begin(order)


@rpc.functions.async_execution
def _finished(pipeline: str, number: int) -> Future[Any]:
    return _runner(pipeline).finished(number)


def _deliver(pipeline: str, number: int, action: Sequence[Any], value: Any) -> None:
    runner = _runners.get(pipeline)
    if runner is not None:
        runner.on_input(number, Action(*action), value)


def _act(pipeline: str, number: int) -> None:
    runner = _runners.get(pipeline)
    if runner is not None:
        runner.act(number)


def _abort(pipeline: str, number: int) -> Report:
    return _runner(pipeline).abort(number)
