"""What runs on a worker that owns parameters: an optimiser of its own for them, and its schedulers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import farprop.autograd as dist_autograd
from farprop._torch import tree_map
from farprop.rpc import RRef, expose
from farprop.runtime.loop import loop_of_this_thread

# One for all optimisers of this worker: several trainers may each have one over the same parameters, and a step needs
# the parameters' ``.grad`` for itself.
_lock = threading.Lock()


@contextmanager
def _alone() -> Iterator[None]:
    """No other step, and no look at the state, goes on meanwhile."""
    if not _lock.acquire(blocking=False):
        # Those who wait don't take up threads of the pool: an optimiser may make calls that need one.
        loop = loop_of_this_thread()
        with nullcontext() if loop is None else loop.blocked():
            _lock.acquire()
    try:
        yield
    finally:
        _lock.release()


class _LocalOptimizer:
    """The optimiser of one worker.

    Args:
        optim_cls: what makes the optimiser, when it is called with a list of parameters.
        local_params_rref: references to the parameters, which are on this worker.
        args: further arguments for ``optim_cls``.
        kwargs: its named arguments.
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
        # A list of its own: an optimiser may change the one it gets.
        self.optim = optim_cls(list(self._local_params), *args, **kwargs)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optim

    @expose
    def step(self, autograd_ctx_id: int) -> None:
        """Step with the gradients of the context. Parameters that it has none for are left as they are."""
        gradients = dist_autograd.get_gradients(autograd_ctx_id)
        with _alone(), _as_grad(self._local_params, gradients):
            self.optim.step()

    @expose
    def make_scheduler(
        self, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RRef[LocalScheduler]:
        """A scheduler that sets the learning rates of this optimiser."""
        with _alone():
            return RRef(LocalScheduler(make(self.optim, *args, **kwargs)))

    @expose
    def state_dict(self) -> dict[str, Any]:
        """A copy of the optimiser's."""
        with _alone():
            return _copied(self.optim.state_dict())

    @expose
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the optimiser go on from a state, which stays the caller's."""
        with _alone():
            self.optim.load_state_dict(_copied(state))


class LocalScheduler:
    """The scheduler of one worker's optimiser."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @expose
    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with _alone():
            self._scheduler.step(*args, **kwargs)

    @expose
    def get_last_lr(self) -> list[Any]:
        with _alone():
            return list(self._scheduler.get_last_lr())

    @expose
    def state_dict(self) -> dict[str, Any]:
        with _alone():
            return _copied(self._scheduler.state_dict())

    @expose
    def load_state_dict(self, state: dict[str, Any]) -> None:
        with _alone():
            self._scheduler.load_state_dict(_copied(state))


def _new_local_optimizer(
    optim_cls: Callable[..., torch.optim.Optimizer],
    local_params_rref: Iterable[RRef[torch.Tensor]],
    *args: Any,
    **kwargs: Any,
) -> RRef[_LocalOptimizer]:
    """Make an optimiser for parameters of this worker."""
    return RRef(_LocalOptimizer(optim_cls, local_params_rref, *args, **kwargs))


def _local_optimizer_step(local_optim_rref: RRef[_LocalOptimizer], autograd_ctx_id: int) -> None:
    """Step an optimiser of this worker."""
    local_optim_rref.local_value().step(autograd_ctx_id)


@contextmanager
def _as_grad(parameters: Sequence[torch.Tensor], gradients: dict[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """Optimisers read ``.grad``; what the program has there is put back."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = gradients.get(parameter)
        yield
    finally:
        for parameter, grad in before:
            parameter.grad = grad


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """A copy on the CPU. The state itself changes with the next step, which need not wait until it has been sent."""
    copied: dict[str, Any] = tree_map(_copied_leaf, state)
    return copied


def _copied_leaf(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
