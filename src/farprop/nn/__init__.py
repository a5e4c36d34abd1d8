"""Modules on other workers: ``RemoteModule``, a drop-in for the one of ``torch.distributed.nn``."""

from farprop.nn.remote_module import RemoteModule

__all__ = ["RemoteModule"]


def __dir__() -> list[str]:
    return __all__
