"""Farprop: autograd that reaches across machines, on PyTorch.

Start with :mod:`farprop.rpc`, a drop-in for ``torch.distributed.rpc``, or in a script or a notebook with ``workers``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farprop.launch.local import workers as workers
    from farprop.profiler.profile import profile as profile

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "profile":
        from farprop.profiler import profile

        return profile
    if name == "workers":
        from farprop.launch.local import workers

        return workers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
