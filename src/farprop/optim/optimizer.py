"""``DistributedOptimizer`` and ``DistributedLRScheduler``: a local one on each worker that owns parameters.

Each local one is a *shard*, which ``local.py`` has. This file calls the shards, with the functions of ``shards.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop._torch import set_grad_enabled
from farprop.errors import UsageError
from farprop.optim.clipping import settle
from farprop.optim.local import NONE, _new_shard, check_consistency
from farprop.optim.local import _local_optimizer_step as _local_optimizer_step
from farprop.optim.local import _LocalOptimizer as _LocalOptimizer
from farprop.optim.local import _new_local_optimizer as _new_local_optimizer
from farprop.optim.shards import (
    StartCall,
    WorkerShard,
    call_all,
    call_each,
    indices_by_worker,
    run_on_all,
    start_method,
)
from farprop.rpc import RRef
from farprop.runtime.autograd.contexts import current_context

__all__ = ["DistributedLRScheduler", "DistributedOptimizer"]

logger = logging.getLogger(__name__)  # torch's module has this name


def _wait_for_all(rpc_futs: Iterable[torch.futures.Future[Any]]) -> list[Any]:
    """Wait for all futures and return their values; raises the error of the last one that failed."""
    results, failed = [], None
    for future in rpc_futs:
        try:
            results.append(future.wait())
        except Exception as error:
            failed = error
    if failed is None:
        return results
    try:
        raise failed
    finally:
        failed = None  # breaks the cycle error -> traceback -> frame -> error


class DistributedOptimizer:
    """Steps parameters on the workers that own them.

    Each worker that owns some of the parameters has a local optimizer for them. Steps on one worker run one after the
    other, whichever optimizer they belong to. Between workers there is no order.

    An error on a worker is raised by the caller after all workers are done. The other workers have completed the
    operation then.

    Args:
        optimizer_class: A class of ``torch.optim``, your own class, or a function. It is called with a list of
            parameters and returns an optimizer.
        params_rref: References to the parameters, on any workers.
        *args: Further positional arguments of ``optimizer_class``.
        consistency: What becomes of a backward pass of another trainer that needs a parameter which a step changes.
            With ``"none"``, as in torch, the pass fails. With ``"versioned"`` it gets the values that it has used. With
            ``"locked"`` the step waits until the other contexts that use the worker have stepped or ended.
        **kwargs: Its keyword arguments.

    Raises:
        TypeError: An element of ``params_rref`` is not an ``RRef``.
        ValueError: A parameter is no leaf. The text says which one, on which worker.
        UsageError: There is no such consistency.
    """

    is_functional_optim = False  # torch compiles some optimizers; farprop runs all of them as they are

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[RRef[torch.Tensor]],
        *args: Any,
        consistency: str = NONE,
        **kwargs: Any,
    ) -> None:
        check_consistency(consistency)
        parameters = list(params_rref)
        indices = indices_by_worker(parameters)

        def start(worker: str) -> StartCall:
            own = indices[worker]
            arguments = (consistency, optimizer_class, [parameters[index] for index in own], own, args, kwargs)
            return lambda: rpc.rpc_async(worker, _new_shard, arguments)

        rrefs = run_on_all((worker, start(worker)) for worker in indices)
        self._shards = tuple(
            WorkerShard(worker, tuple(own), rref) for (worker, own), rref in zip(indices.items(), rrefs, strict=True)
        )

    @property
    def remote_optimizers(self) -> list[RRef[_LocalOptimizer]]:
        """References to the local optimizers. Each has ``step(context_id)`` and the attribute ``optimizer``."""
        return [shard.rref for shard in self._shards]

    def step(self, context_id: int, *more: int) -> None:
        """Step the local optimizer of every worker with the gradients of a context, and wait for all of them.

        The gradients stay in the context, and ``.grad`` does not change. Parameters without a gradient in the context
        are treated as ``torch.optim`` treats those whose ``.grad`` is None.

        Args:
            context_id: The id that ``farprop.autograd.context()`` returned.
            *more: Further contexts, whose gradients are added: a step for several small batches. They have to be there
                still; ``farprop.autograd.context`` ends its own at the end of its block.

        Raises:
            Exception: What a local optimizer raised, after all workers are done. Further errors are notes on it.
        """
        self._step((context_id, *more))

    def _step(self, context_ids: Sequence[int], unscale: float = 1.0) -> None:
        contexts = [dist_autograd._retrieve_context(context_id) for context_id in context_ids]
        settle(contexts)
        # Not in a context: a step with consistency="locked" would count as a use of the parameters.
        outer = current_context.set(None)
        try:
            _step_all(self._shards, context_ids, unscale)
        finally:
            current_context.reset(outer)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters are on other workers, so there are none here. Torch's own classes ask for them."""
        raise UsageError(
            "A DistributedOptimizer has no param_groups: its parameters are on other workers. Use "
            "farprop.optim.GradScaler in the place of torch's, and lr_scheduler() for learning rates."
        )

    def lr_scheduler(
        self, scheduler_class: Callable[..., LRScheduler], *args: Any, **kwargs: Any
    ) -> DistributedLRScheduler:
        """Make a learning-rate scheduler for the local optimizer of every worker.

        Args:
            scheduler_class: A class of ``torch.optim.lr_scheduler``, your own class, or a function. It is called with
                an optimizer and returns a scheduler.
            *args: Further positional arguments of ``scheduler_class``.
            **kwargs: Its keyword arguments.

        Returns:
            The distributed scheduler.
        """
        rrefs = call_all(self._shards, "make_scheduler", scheduler_class, args, kwargs)
        return DistributedLRScheduler(
            [shard._replace(rref=rref) for shard, rref in zip(self._shards, rrefs, strict=True)]
        )

    def state_dict(self) -> dict[str, Any]:
        """Copy the state of all local optimizers to the CPU of this worker.

        An optimizer for the same parameters in the same order can load it, also in another job, whose workers may have
        other names. Parameters that are on one worker now have to be on one worker then.

        Returns:
            The state, for :meth:`load_state_dict`.
        """
        return _gather_state(self._shards, "optimizer")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of another optimizer.

        Args:
            state_dict: What its :meth:`state_dict` returned. It is copied.

        Raises:
            UsageError: The state is for other parameters, or not one of a distributed optimizer.
        """
        _load_state(self._shards, "optimizer", state_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(workers={[shard.worker for shard in self._shards]})"


class DistributedLRScheduler:
    """Sets the learning rates of a ``DistributedOptimizer``. Its ``lr_scheduler`` method makes it.

    Args:
        shards: The schedulers of all workers.
    """

    def __init__(self, shards: Sequence[WorkerShard]) -> None:
        self._shards = tuple(shards)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler of every worker. Call it once per step or epoch, after the optimizer's ``step``.

        Args:
            *args: Passed to each scheduler's ``step``, for example a metric for ``ReduceLROnPlateau``.
            **kwargs: Passed to it, too.
        """
        call_all(self._shards, "step", args, kwargs)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Ask the worker of the first parameter for the last learning rates.

        The other workers have the same rates, unless your optimizer class makes different parameter groups there.

        Returns:
            The learning rate of each parameter group.

        Raises:
            UsageError: The optimizer has no parameters.
        """
        if not self._shards:
            raise UsageError("The optimizer of this scheduler has no parameters, so there is no learning rate.")
        rates: list[float | torch.Tensor] = self._shards[0].rref.rpc_sync().get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Copy the state of the schedulers of all workers.

        Returns:
            The state, for :meth:`load_state_dict`.
        """
        return _gather_state(self._shards, "scheduler")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of another scheduler. Load the state of the optimizer after those of its schedulers.

        Args:
            state_dict: What the other's :meth:`state_dict` returned.

        Raises:
            UsageError: The state is for other parameters, or not one of a distributed scheduler.
        """
        _load_state(self._shards, "scheduler", state_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(workers={[shard.worker for shard in self._shards]})"


# Stepping


def _step_all(shards: Iterable[WorkerShard], context_ids: Sequence[int], unscale: float) -> None:
    """Step each shard's optimizer. This worker's own runs on this thread, while the others are on their way."""
    calls: list[tuple[str, StartCall]] = []
    own: WorkerShard | None = None
    for shard in shards:
        if shard.rref.is_owner():
            own = shard
        else:
            kwargs = {} if unscale == 1.0 else {"unscale": unscale}
            calls.append((shard.worker, start_method(shard, "step", context_ids, kwargs)))
    run_on_all(calls, None if own is None else (own.worker, partial(_step_here, own.rref, context_ids, unscale)))


def _step_here(rref: RRef[_LocalOptimizer], context_ids: Sequence[int], unscale: float) -> None:
    before = torch.is_grad_enabled()
    try:
        set_grad_enabled(True)  # as in a called function
        rref.local_value().step(*context_ids, unscale=unscale)
    finally:
        set_grad_enabled(before)


# States. A worker is identified by the parameters that it has, because it may have another name in another job.


def _gather_state(shards: Sequence[WorkerShard], kind: str) -> dict[str, Any]:
    """The states of all shards. ``kind`` is ``"optimizer"`` or ``"scheduler"``."""
    states = call_all(shards, "state_dict")
    return {
        "workers": [
            {"name": shard.worker, "parameters": list(shard.indices), kind: state}
            for shard, state in zip(shards, states, strict=True)
        ]
    }


def _load_state(shards: Sequence[WorkerShard], kind: str, state: dict[str, Any]) -> None:
    """Load a state that ``_gather_state`` returned, each shard its own part."""
    try:
        parts = {tuple(part["parameters"]): part[kind] for part in state["workers"]}
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"This is not the state of a distributed {kind}. Give load_state_dict() what state_dict() of one returned."
        ) from error
    wanted = {shard.indices for shard in shards}
    if wanted != parts.keys():
        raise UsageError(
            f"The state does not fit the parameters of this {kind}. When it was saved, the workers had the parameters "
            f"{_listed(parts)}. Now they have {_listed(wanted)}. Give the parameters in the same order, and keep those "
            "that were on one worker on one worker."
        )
    call_each([(shard, (parts[shard.indices],)) for shard in shards], "load_state_dict")


def _listed(groups: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(str(list(indices)) for indices in sorted(groups))
