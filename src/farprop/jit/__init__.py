"""Calls, references and gradients in compiled code.

After ``import farprop.jit``, functions and modules that ``torch.jit.script`` compiles can make calls, take references
and run backward passes. ``operator`` makes a call that stays inside a graph of ``torch.compile``.

If this torch's TorchScript lacks a name that farprop needs, a ``TorchVersionWarning`` says so. Everything else works.
"""

from __future__ import annotations

import sys
import warnings

import torch

from farprop._torch import has_torchscript
from farprop.errors import TorchVersionWarning
from farprop.jit.operators import operator

__all__ = ["operator"]


def _install() -> bool:
    """Install the hooks in TorchScript. Returns whether this call installed them."""
    if not has_torchscript:  # farprop._torch has warned about it
        return False
    try:
        from farprop.jit import hooks

        return hooks.install()
    except Exception as error:
        # TorchScript is deprecated. The rest of farprop must not depend on it.
        warnings.warn(
            f"farprop can't install its hooks in TorchScript of torch {torch.__version__}: {error!r}. Functions that "
            "torch.jit.script compiles can't make calls. Everything else works.",
            TorchVersionWarning,
            stacklevel=3,
        )
        return False


def _uninstall() -> None:
    """Remove the hooks."""
    hooks = sys.modules.get("farprop.jit.hooks")
    if hooks is not None:
        hooks.uninstall()


_install()


def __dir__() -> list[str]:
    return __all__
