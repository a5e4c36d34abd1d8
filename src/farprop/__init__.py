"""Farprop: autograd that reaches across machines, on PyTorch.

Start with :mod:`farprop.rpc`, a drop-in for ``torch.distributed.rpc``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farprop.profiler import profile as profile

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "profile":
        from farprop.profiler import profile

        return profile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
