"""Modules on other workers: ``RemoteModule``, a drop-in for the one of ``torch.distributed.nn``, and ``Pipeline``."""

from farprop.nn.pipeline import Pipeline
from farprop.nn.remote_module import RemoteModule

__all__ = ["Pipeline", "RemoteModule"]


def __dir__() -> list[str]:
    return __all__
