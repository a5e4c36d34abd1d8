"""``DistributedOptimizer``: an optimiser on each of the workers that own the parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.optim.local import _local_optimizer_step as _local_optimizer_step
from farprop.optim.local import _LocalOptimizer as _LocalOptimizer
from farprop.optim.local import _new_local_optimizer
from farprop.optim.scheduler import DistributedLRScheduler
from farprop.optim.shares import Share, Start, call_all, gathered, load, on_all
from farprop.rpc import RRef
from farprop.runtime.gradients.contexts import current_context

__all__ = ["DistributedOptimizer"]

logger = logging.getLogger("farprop.optim")


def _wait_for_all(rpc_futs: Iterable[torch.futures.Future[Any]]) -> list[Any]:
    """The values of all futures, when all are done; raises the error of the last that failed."""
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
        failed = None  # it keeps this frame, and must not be kept by it


class DistributedOptimizer:
    """Optimises parameters where they are.

    Each worker that owns some of the parameters makes an optimiser for those. Steps on one worker, of any of its
    optimisers, are taken one after the other; between workers there is no order.

    Args:
        optimizer_class: a class of ``torch.optim`` or your own, or a function, that makes an optimiser when it is
            called with a list of parameters.
        params_rref: references to the parameters, on any workers.
        args: further arguments for ``optimizer_class``.
        kwargs: its named arguments.

    If something raises on a worker, that is raised here when all workers are done. The others have then done what
    they were asked for.
    """

    is_functional_optim = False  # torch compiles some optimisers; here all are run as they are

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[RRef[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        parameters = list(params_rref)
        places: dict[str, list[int]] = {}
        for place, parameter in enumerate(parameters):
            if not isinstance(parameter, RRef):
                raise TypeError(
                    f"params_rref[{place}] should be an RRef to a parameter, but is a {type(parameter).__name__}. "
                    "A parameter of this worker can be given as RRef(parameter)."
                )
            places.setdefault(parameter.owner_name(), []).append(place)

        def start(worker: str) -> Start:
            arguments = (optimizer_class, [parameters[place] for place in places[worker]], *args)
            return lambda: rpc.rpc_async(worker, _new_local_optimizer, arguments, kwargs)

        made = on_all((worker, start(worker)) for worker in places)
        self._shares = tuple(
            Share(worker, tuple(own), rref) for (worker, own), rref in zip(places.items(), made, strict=True)
        )

    @property
    def remote_optimizers(self) -> list[RRef[Any]]:
        """References to what each worker keeps: an object with ``step(context_id)``, and its ``optimizer``."""
        return [share.rref for share in self._shares]

    def step(self, context_id: int) -> None:
        """Step the optimiser of every worker, with the gradients of the context; returns when all have.

        Gradients stay in the context, and ``.grad`` is as before. Parameters without a gradient in the context are
        treated as ``torch.optim`` treats those whose ``.grad`` is None.

        Args:
            context_id: what ``farprop.autograd.context()`` gave.
        """
        # A worker that the passes did not touch learns of the context from the call, and has no gradients for it.
        outer = current_context.set(dist_autograd._retrieve_context(context_id))
        try:
            call_all(self._shares, "step", context_id)
        finally:
            current_context.reset(outer)

    def lr_scheduler(self, scheduler_class: Callable[..., Any], *args: Any, **kwargs: Any) -> DistributedLRScheduler:
        """Make a learning-rate scheduler for the optimiser of every worker.

        Args:
            scheduler_class: a class of ``torch.optim.lr_scheduler`` or your own, or a function, that makes a scheduler
                when it is called with an optimiser.
            args: further arguments for it.
            kwargs: its named arguments.
        """
        made = call_all(self._shares, "make_scheduler", scheduler_class, args, kwargs)
        return DistributedLRScheduler(
            [share._replace(rref=rref) for share, rref in zip(self._shares, made, strict=True)]
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimisers of all workers, copied to the CPU of this one.

        It can be loaded by an optimiser over the same parameters in the same order, also in another job, whose workers
        may have other names. Parameters that are on one worker now have to be on one worker then.
        """
        return gathered(self._shares, "optimizer")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where another optimiser was.

        Args:
            state_dict: what ``state_dict`` of that one returned. It is copied.
        """
        load(self._shares, "optimizer", state_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(workers={[share.worker for share in self._shares]})"
