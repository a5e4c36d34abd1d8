"""Clips the gradients of a context by their norm over all workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import UsageError
from farprop.optim.gradients import norms_here, scale_here
from farprop.optim.shards import StartCall, indices_by_worker, run_on_all
from farprop.rpc import RRef
from farprop.runtime.autograd.contexts import Context, current_context

_EPSILON = 1e-6  # torch's


def clip_grad_norm_(
    context_id: int | Sequence[int],
    params_rref: RRef[torch.Tensor] | Iterable[RRef[torch.Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the gradients of parameters on any workers by the norm of all of them together.

    It is ``torch.nn.utils.clip_grad_norm_`` for gradients that are in a context. Workers are asked for their norms in
    one round trip. If gradients are too large, their workers are told the factor, and this function does not wait for
    that: what this worker does next with the context does.

    Args:
        context_id: The id of the context, or a list of ids: the gradients are then summed over these contexts, as
            ``DistributedOptimizer.step`` sums them.
        params_rref: References to the parameters.
        max_norm: The largest norm that the gradients may have together.
        norm_type: The order of the norm; ``float("inf")`` for the largest element.
        error_if_nonfinite: Whether a norm that is infinite or NaN is an error. Otherwise it makes gradients zero or
            NaN, as in torch.

    Returns:
        The norm before clipping.

    Raises:
        UsageError: There is no such context, ``max_norm`` is negative, or the norm is not finite and
            ``error_if_nonfinite`` is set.
        TypeError: An element of ``params_rref`` is not an ``RRef``.

    Example:
        ``clip_grad_norm_(context_id, model.remote_parameters(), 1.0)``, between ``backward`` and ``step``
    """
    if max_norm < 0:  # workers would refuse the factor, and this one would hear of it later
        raise UsageError(f"max_norm is a norm, which is 0 or more, and not {float(max_norm)}.")
    ids = [context_id] if isinstance(context_id, int) else list(context_id)
    contexts = [dist_autograd._retrieve_context(each) for each in ids]
    parameters = [params_rref] if isinstance(params_rref, RRef) else list(params_rref)
    by_worker = {
        worker: [parameters[index] for index in indices] for worker, indices in indices_by_worker(parameters).items()
    }
    settle(contexts)
    norms = _norms(ids, by_worker, float(norm_type))
    total = torch.linalg.vector_norm(torch.stack(norms), float(norm_type)) if norms else torch.tensor(0.0)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise UsageError(
            f"The total norm of order {float(norm_type)} for gradients is non-finite, so it cannot be clipped. Look "
            "for the cause with detect_anomaly(), or pass error_if_nonfinite=False."
        )
    factor = float(max_norm) / (float(total) + _EPSILON)
    if not factor >= 1.0:  # also if it is NaN
        _scale(ids, contexts, by_worker, factor)
    return total


def settle(contexts: Iterable[Context]) -> None:
    """Wait until the gradients of these contexts are clipped on all workers."""
    for context in contexts:
        if context.settling:
            context.settle()


def _norms(ids: Sequence[int], by_worker: dict[str, list[RRef[torch.Tensor]]], norm_type: float) -> list[torch.Tensor]:
    """The norms of all gradients."""
    own = rpc.get_worker_info().name
    calls: list[tuple[str, StartCall]] = [
        (worker, partial(rpc.rpc_async, worker, norms_here, (ids, own_parameters, norm_type)))
        for worker, own_parameters in by_worker.items()
        if worker != own
    ]
    here: list[torch.Tensor | None] = []
    meanwhile = (own, lambda: here.extend(norms_here(ids, by_worker[own], norm_type))) if own in by_worker else None
    outer = current_context.set(None)  # the workers that have gradients know the context
    try:
        answers = run_on_all(calls, meanwhile)
    finally:
        current_context.reset(outer)
    return [norm for norms in (here, *answers) for norm in norms if norm is not None]


def _scale(
    ids: Sequence[int], contexts: Sequence[Context], by_worker: dict[str, list[RRef[torch.Tensor]]], factor: float
) -> None:
    own = rpc.get_worker_info().name
    outer = current_context.set(None)
    try:
        for worker, parameters in by_worker.items():
            if worker != own:
                clipped = rpc.rpc_async(worker, scale_here, (ids, parameters, factor))
                for context in contexts:
                    context.settling[clipped] = None
        if own in by_worker:
            scale_here(ids, by_worker[own], factor)
    finally:
        current_context.reset(outer)
