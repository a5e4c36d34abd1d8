"""``GradScaler`` for distributed optimizers: all workers step, or none."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

import farprop.autograd as dist_autograd
from farprop._torch import check_scaler, scale_of, scaler_state
from farprop.errors import UsageError
from farprop.optim.clipping import settle
from farprop.optim.optimizer import DistributedOptimizer
from farprop.optim.shards import call_all


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, which also takes a ``DistributedOptimizer``.

    The gradients of such an optimizer are in contexts, so :meth:`unscale_` and :meth:`step` take their ids. If a
    gradient on any worker is infinite or NaN, no worker steps, and :meth:`update` lowers the scale. Other optimizers
    are treated as torch does.

    Args:
        device: The device of the scale: that of the loss.
        *args: Further arguments of ``torch.amp.GradScaler``: ``init_scale`` and so on.
        **kwargs: Its keyword arguments.

    Example:
        ``dist_autograd.backward(context_id, [scaler.scale(loss)])``, then ``scaler.step(optimizer, context_id)`` and
        ``scaler.update()``
    """

    def __init__(self, device: str = "cpu", *args: Any, **kwargs: Any) -> None:
        super().__init__(device, *args, **kwargs)

    def unscale_(self, optimizer: Any, *context_ids: int) -> None:
        """Divide the gradients of an optimizer by the scale, on all workers: before they are clipped, for example.

        Args:
            optimizer: The optimizer.
            *context_ids: The contexts that have its gradients.

        Raises:
            UsageError: No context is given, one does not exist, or gradients are unscaled already.
        """
        if not self.is_enabled() or not isinstance(optimizer, DistributedOptimizer):
            super().unscale_(optimizer)
            return
        state = self._ready(optimizer, context_ids, "unscale_")
        if state["stage"] is OptState.UNSCALED:
            raise UsageError("unscale_() has already been called on this optimizer since the last update().")
        # Asked first, so that an error of one worker does not leave gradients of the others divided.
        answers = call_all(optimizer._shards, "are_finite", list(context_ids))
        call_all(optimizer._shards, "unscale", list(context_ids), self._inverse())
        state["stage"] = OptState.UNSCALED
        self._note(state, all(answers))

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer with gradients divided by the scale, on all workers or, if one is not finite, on none.

        Args:
            optimizer: The optimizer.
            *args: For a distributed one, the ids of the contexts that have its gradients, as for its ``step``.
            **kwargs: For others, what their ``step`` takes.

        Returns:
            What the optimizer's ``step`` returned, or None.

        Raises:
            UsageError: No context is given, one does not exist, or ``step`` was called since the last :meth:`update`.
        """
        if not isinstance(optimizer, DistributedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if not self.is_enabled():
            return optimizer.step(*args, **kwargs)
        state = self._ready(optimizer, args, "step")
        unscale = 1.0
        if state["stage"] is OptState.READY:
            # The contexts keep their gradients as they are: a step that fails half-way can be tried again.
            unscale = self._inverse()
            self._note(state, all(call_all(optimizer._shards, "are_finite", list(args))))
        if not any(found.item() for found in state["found_inf_per_device"].values()):
            optimizer._step(args, unscale)
        state["stage"] = OptState.STEPPED
        return None

    def _ready(self, optimizer: DistributedOptimizer, context_ids: tuple[int, ...], method: str) -> dict[str, Any]:
        """The state of an optimizer that was not stepped since the last update."""
        if not context_ids:
            raise UsageError(
                f"{method}() of a distributed optimizer takes the ids of the contexts that have its gradients: "
                f"scaler.{method}(optimizer, context_id)."
            )
        settle([dist_autograd._retrieve_context(context_id) for context_id in context_ids])
        check_scaler(self, method)
        state = scaler_state(self, optimizer)
        if state["stage"] is OptState.STEPPED:
            raise UsageError(f"{method}() is called after step(). Call update() at the end of each step.")
        return state

    def _inverse(self) -> float:
        inverse: float = scale_of(self).double().reciprocal().float().item()
        return inverse

    def _note(self, state: dict[str, Any], are_finite: bool) -> None:
        """Note what ``update`` reads: whether a gradient on any worker was not finite."""
        found = torch.full((), float(not are_finite), device=scale_of(self).device)
        state["found_inf_per_device"] = defaultdict(dict, {found.device: found})
