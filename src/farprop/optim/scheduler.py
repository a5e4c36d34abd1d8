"""``DistributedLRScheduler``: one learning-rate scheduler next to each of the optimisers of a DistributedOptimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farprop.errors import UsageError
from farprop.optim.shares import Share, call_all, gathered, load

__all__ = ["DistributedLRScheduler"]


class DistributedLRScheduler:
    """Sets the learning rates of a ``DistributedOptimizer``, whose ``lr_scheduler`` method makes it."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self._shares = tuple(shares)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler on every worker. Arguments are given to each, such as a metric for ``ReduceLROnPlateau``.

        Call it after the ``step`` of the optimiser, from one place: each call counts.
        """
        call_all(self._shares, "step", args, kwargs)

    def get_last_lr(self) -> list[Any]:
        """The learning rate of each parameter group.

        It is asked of the worker that has the first parameter. On the others it is the same, unless your optimiser
        class makes parameter groups that depend on the parameters.
        """
        if not self._shares:
            raise UsageError("The optimizer of this scheduler has no parameters, so there is no learning rate.")
        rates: list[Any] = self._shares[0].rref.rpc_sync().get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedulers of all workers, for ``load_state_dict``."""
        return gathered(self._shares, "scheduler")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where another scheduler was. Load the state of the optimiser after that of its schedulers."""
        load(self._shares, "scheduler", state_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(workers={[share.worker for share in self._shares]})"
