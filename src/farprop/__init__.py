"""Farprop: autograd that reaches across machines, on PyTorch.

Start with :mod:`farprop.rpc`, a drop-in for ``torch.distributed.rpc``, or in a script or a notebook with ``workers``.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farprop.launch.local import workers as workers
    from farprop.nn.pipeline import pipeline as pipeline
    from farprop.profiler.profile import profile as profile

__version__ = "0.2.0"


def __dir__() -> list[str]:
    modules = [name for name, value in globals().items() if isinstance(value, ModuleType)]
    return ["__version__", "pipeline", "profile", "workers", *modules]  # three of them are looked up on first use


def __getattr__(name: str) -> Any:
    if name == "pipeline":
        from farprop.nn.pipeline import pipeline

        return pipeline
    if name == "profile":
        from farprop.profiler import profile

        return profile
    if name == "workers":
        from farprop.launch.local import workers

        return workers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
