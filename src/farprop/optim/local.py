"""What runs on a worker that owns parameters: its local optimizer, and the schedulers of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

import farprop.autograd as dist_autograd
from farprop._torch import tree_map
from farprop.locks import make_lock
from farprop.rpc import RRef, expose
from farprop.runtime.thread_pool import ThreadPool, pool_of_this_thread

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
        # A copy of the list, because an optimizer may change the one it gets.
        self.optim = optim_cls(list(self._local_params), *args, **kwargs)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optim

    @expose
    def step(self, autograd_ctx_id: int) -> None:
        """Step with the gradients of a context. Parameters without one are left alone."""
        gradients = dist_autograd.get_gradients(autograd_ctx_id)
        with _exclusive():
            before = [(parameter, parameter.grad) for parameter in self._local_params]
            try:
                # Optimizers read gradients in ``.grad``. The program's own are put back afterwards.
                _set_grads((parameter, gradients.get(parameter)) for parameter in self._local_params)
                self.optim.step()
                _set_grads(before)
            except BaseException:
                _set_grads(before)  # also if putting them back was interrupted
                raise

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


def _local_optimizer_step(local_optim_rref: RRef[_LocalOptimizer], autograd_ctx_id: int) -> None:
    """Step an optimizer of this worker."""
    local_optim_rref.local_value().step(autograd_ctx_id)


def _set_grads(grads: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    for parameter, grad in grads:
        parameter.grad = grad


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """A copy on the CPU. The next step changes the state itself, perhaps before it is sent."""
    copied: dict[str, Any] = tree_map(_copied_leaf, state)
    return copied


def _copied_leaf(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
