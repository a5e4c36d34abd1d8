"""Data-parallel training on any process group: a drop-in for ``torch.nn.parallel.DistributedDataParallel``.

::

    from farprop.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(model)
"""

from farprop.nn.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]


def __dir__() -> list[str]:
    return __all__
