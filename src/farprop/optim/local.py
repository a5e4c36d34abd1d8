"""What runs on a worker that owns parameters: its local optimizer, and the schedulers of it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from farprop._torch import tree_map
from farprop.errors import UsageError
from farprop.locks import make_lock
from farprop.optim.changed_parameters import Step, StepHistory
from farprop.optim.gradients import are_finite, scale, scaled, summed
from farprop.rpc import RRef, expose
from farprop.runtime.agent import Agent
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.thread_pool import ThreadPool, pool_of_this_thread

NONE, VERSIONED, LOCKED = "none", "versioned", "locked"

# One lock for all local optimizers of this worker: several trainers may each have an optimizer for the same parameters,
# and a step replaces the parameters' ``.grad`` while it runs.
_lock = make_lock("optimizer_step")


def _exclusive() -> AbstractContextManager[object]:
    """Hold the lock: no other step runs and no state is read meanwhile. Outside of the pool it is the lock itself:
    an interrupt can't leave that held.
    """
    pool = pool_of_this_thread()
    return _lock if pool is None else _exclusive_in(pool)


@contextmanager
def _exclusive_in(pool: ThreadPool) -> Iterator[None]:
    if not _lock.acquire(blocking=False):
        # A thread that waits here does not count against the pool: an optimizer may make calls that need a thread.
        with pool.blocked():
            _lock.acquire()
    try:
        yield
    finally:
        _lock.release()


class _LocalOptimizer:
    """The optimizer of one worker.

    Args:
        optim_cls: Called with a list of parameters; returns an optimizer.
        local_params_rref: References to the parameters, which are on this worker.
        *args: Further positional arguments of ``optim_cls``.
        **kwargs: Its keyword arguments.
    """

    global_lock = _lock

    def __init__(
        self,
        optim_cls: Callable[..., torch.optim.Optimizer],
        local_params_rref: Iterable[RRef[torch.Tensor]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._local_params = [parameter.local_value() for parameter in local_params_rref]
        self._consistency = NONE
        # A copy of the list, because an optimizer may change the one it gets.
        self.optim = optim_cls(list(self._local_params), *args, **kwargs)
        self.history = StepHistory(self._local_params)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optim

    @expose
    def step(self, autograd_ctx_id: int, *more: int, unscale: float = 1.0) -> None:
        """Step with the gradients of a context, or with their sums over several. Parameters without one are left alone.

        Args:
            autograd_ctx_id: The context.
            *more: Further contexts.
            unscale: The gradients are multiplied by it; the contexts keep theirs.
        """
        contexts = current_agent().gradients.contexts
        for context_id in (autograd_ctx_id, *more):
            if contexts.has_ended(context_id):
                contexts.find(context_id)  # raises
        gradients = summed((autograd_ctx_id, *more), self._local_params)
        if unscale != 1.0:
            gradients = scaled(gradients, unscale)
        # In this order: a function that a step waits for may itself want the lock.
        with self._guarded((autograd_ctx_id, *more)), self._kept(gradients), _exclusive():
            versions = self.history.versions()
            before = [(parameter, parameter.grad) for parameter in self._local_params]
            try:
                # Optimizers read gradients in ``.grad``. The program's own are put back afterwards.
                _set_grads((parameter, gradients.get(parameter)) for parameter in self._local_params)
                self.optim.step()
                _set_grads(before)
            except BaseException:
                _set_grads(before)  # also if putting them back was interrupted
                raise
            finally:
                self.history.steps.append(Step(autograd_ctx_id, versions, self.history.versions()))

    def guard(self, consistency: str) -> None:
        """Choose what becomes of backward passes that need the parameters that a step changes."""
        self._consistency = consistency
        guard = current_agent().parameter_guard
        if consistency == LOCKED:
            guard.use_locks()
        else:
            weakref.finalize(self, guard.use_versions().watch(self._local_params))

    def _guarded(self, context_ids: Sequence[int]) -> AbstractContextManager[None]:
        """Wait until no pass needs the parameters."""
        agent = current_agent()
        if self._consistency != LOCKED:
            return nullcontext()
        return agent.parameter_guard.use_locks().step(context_ids, _patience(agent))

    def _kept(self, parameters: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """Keep what passes need of the parameters."""
        if self._consistency != VERSIONED:
            return nullcontext()
        agent = current_agent()
        return agent.parameter_guard.use_versions().step_of(parameters, _patience(agent))

    @expose
    def unscale(self, context_ids: list[int], by: float) -> None:
        """Multiply the gradients by ``by`` in each context."""
        scale(context_ids, self._local_params, by)

    @expose
    def are_finite(self, context_ids: list[int]) -> bool:
        """Whether no gradient, summed over contexts, has an infinity or NaN."""
        return are_finite(summed(context_ids, self._local_params))

    @expose
    def make_scheduler(
        self, make: Callable[..., LRScheduler], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RRef[LocalScheduler]:
        """Make a scheduler for this optimizer."""
        with _exclusive():
            return RRef(LocalScheduler(make(self.optim, *args, **kwargs)))

    @expose
    def state_dict(self) -> dict[str, Any]:
        """A copy of the optimizer's state."""
        with _exclusive():
            return _copied(self.optim.state_dict())

    @expose
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a copy of a state."""
        with _exclusive():
            self.optim.load_state_dict(_copied(state))


class LocalScheduler:
    """The scheduler of one worker's optimizer."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler

    @expose
    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with _exclusive():
            self._scheduler.step(*args, **kwargs)

    @expose
    def get_last_lr(self) -> list[float | torch.Tensor]:
        with _exclusive():
            return list(self._scheduler.get_last_lr())

    @expose
    def state_dict(self) -> dict[str, Any]:
        with _exclusive():
            return _copied(self._scheduler.state_dict())

    @expose
    def load_state_dict(self, state: dict[str, Any]) -> None:
        with _exclusive():
            self._scheduler.load_state_dict(_copied(state))


def _new_local_optimizer(
    optim_cls: Callable[..., torch.optim.Optimizer],
    local_params_rref: Iterable[RRef[torch.Tensor]],
    *args: Any,
    **kwargs: Any,
) -> RRef[_LocalOptimizer]:
    """Make an optimizer for parameters of this worker. Others call this."""
    return RRef(_LocalOptimizer(optim_cls, local_params_rref, *args, **kwargs))


def _new_shard(
    consistency: str,
    optim_cls: Callable[..., torch.optim.Optimizer],
    local_params_rref: Sequence[RRef[torch.Tensor]],
    indices: Sequence[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RRef[_LocalOptimizer]:
    """Make an optimizer for parameters of this worker, which have these indices in the list of all parameters."""
    check_consistency(consistency)
    try:
        made = _LocalOptimizer(optim_cls, local_params_rref, *args, **kwargs)
    except ValueError as error:
        if "non-leaf" in str(error):
            _name_non_leaf(error, local_params_rref, indices)
        raise
    made.history.indices = indices
    if consistency != NONE:
        made.guard(consistency)
    return RRef(made)


def _name_non_leaf(error: ValueError, rrefs: Iterable[RRef[torch.Tensor]], indices: Iterable[int]) -> None:
    """Say in torch's error which parameter is no leaf."""
    for index, rref in zip(indices, rrefs, strict=True):
        parameter = rref.local_value()
        if isinstance(parameter, torch.Tensor) and not parameter.is_leaf and not parameter.retains_grad:
            made_by = "" if parameter.grad_fn is None else f", the result of {parameter.grad_fn.name()}"
            error.args = (
                f"{error}: params_rref[{index}] on {rref.owner_name()}, of shape {tuple(parameter.shape)}, is no leaf"
                f"{made_by}. Give a reference to the parameter that it was computed from; or, to optimize this value "
                "itself, to tensor.detach().requires_grad_().",
            )
            return


def check_consistency(consistency: str) -> None:
    """Raise ``UsageError`` if there is no such kind."""
    if consistency not in (NONE, VERSIONED, LOCKED):
        raise UsageError(f"consistency={consistency!r} is not known: use 'none', 'versioned' or 'locked'.")


def _local_optimizer_step(local_optim_rref: RRef[_LocalOptimizer], autograd_ctx_id: int) -> None:
    """Step an optimizer of this worker."""
    local_optim_rref.local_value().step(autograd_ctx_id)


def _patience(agent: Agent) -> float | None:
    """How long a step waits: a little less than a call does, so that the caller gets the step's own error."""
    timeout = agent.services.rpc_timeout
    return None if timeout is None else timeout * 0.9


def _set_grads(grads: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    for parameter, grad in grads:
        parameter.grad = grad


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """A copy on the CPU. The next step changes the state itself, perhaps before it is sent."""
    copied: dict[str, Any] = tree_map(_copied_leaf, state)
    return copied


def _copied_leaf(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
