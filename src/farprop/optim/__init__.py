"""Optimizers for parameters on other workers: a drop-in for ``torch.distributed.optim.DistributedOptimizer``.

::

    from farprop.optim import DistributedOptimizer
    optimizer = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.1)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [model(x).sum()])
        optimizer.step(context_id)
"""

from farprop.optim.clipping import clip_grad_norm_
from farprop.optim.grad_scaler import GradScaler
from farprop.optim.optimizer import DistributedLRScheduler, DistributedOptimizer

__all__ = ["DistributedLRScheduler", "DistributedOptimizer", "GradScaler", "clip_grad_norm_"]


def __dir__() -> list[str]:
    return __all__
