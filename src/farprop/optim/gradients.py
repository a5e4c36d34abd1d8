"""What runs on a worker that owns parameters: reading and changing their gradients in autograd contexts.

Other workers call ``norms_here`` and ``scale_here``. A context that this worker does not know has no gradients here:
whoever calls has checked that it exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from farprop.errors import UsageError
from farprop.rpc import RRef
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.autograd.accumulate import add
from farprop.runtime.autograd.contexts import Context

Gradients = dict[torch.Tensor, torch.Tensor]


def summed(context_ids: Iterable[int], parameters: Iterable[torch.Tensor]) -> Gradients:
    """The gradients of these parameters, summed over contexts. Those of one context are not copied."""
    parameters = list(parameters)
    total: Gradients = {}
    for context in _known(context_ids):
        with context.lock:
            found = {leaf: context.gradients[leaf] for leaf in parameters if leaf in context.gradients}
        for leaf, gradient in found.items():
            total[leaf] = add(total[leaf], gradient) if leaf in total else gradient
    return total


def scaled(gradients: Gradients, factor: float) -> Gradients:
    """Copies of gradients, multiplied."""
    with torch.no_grad():
        return {leaf: gradient * factor for leaf, gradient in gradients.items()}


def scale(context_ids: Iterable[int], parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply the gradients of these parameters in each context. Tensors that others may have stay as they are."""
    parameters = list(parameters)
    for context in _known(context_ids):
        with context.lock:
            found = {leaf: context.gradients[leaf] for leaf in parameters if leaf in context.gradients}
            context.gradients.update(scaled(found, factor))


def are_finite(gradients: Gradients) -> bool:
    """Whether no gradient has an infinity or NaN.

    Raises:
        UsageError: A gradient is a float16 tensor: it has lost what a scale is meant to keep.
    """
    for gradient in gradients.values():
        if gradient.dtype is torch.float16:
            raise UsageError(
                "A gradient is a float16 tensor, so its small values are lost, whatever the scale. Keep parameters in "
                "float32, and run the forward pass under torch.autocast."
            )
    return all(bool(torch.isfinite(_values(gradient)).all()) for gradient in gradients.values())


def norms_here(
    context_ids: Sequence[int], params_rref: Sequence[RRef[torch.Tensor]], norm_type: float
) -> list[torch.Tensor | None]:
    """The norm of the gradient of each parameter, summed over contexts; None for one without a gradient."""
    parameters = [parameter.local_value() for parameter in params_rref]
    gradients = summed(context_ids, parameters)
    with torch.no_grad():
        return [
            torch.linalg.vector_norm(_values(gradients[leaf]), norm_type).cpu() if leaf in gradients else None
            for leaf in parameters
        ]


def scale_here(context_ids: Sequence[int], params_rref: Sequence[RRef[torch.Tensor]], factor: float) -> None:
    """Multiply the gradients of these parameters in each context."""
    if not (math.isnan(factor) or 0 <= factor <= 1):
        raise UsageError(f"Gradients are clipped by a factor from 0 to 1, not {factor}.")
    scale(context_ids, [parameter.local_value() for parameter in params_rref], factor)


def _known(context_ids: Iterable[int]) -> list[Context]:
    get = current_agent().gradients.contexts.get
    found = [get(context_id) for context_id in context_ids]
    return [context for context in found if context is not None]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The elements of a gradient that may differ from zero."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
