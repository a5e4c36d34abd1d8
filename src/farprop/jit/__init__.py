"""Calls, references and gradients from compiled code.

After ``import farprop.jit``, functions and modules that ``torch.jit.script`` compiles can make calls, take references
and run backward passes. ``operator`` makes a call that stays inside a graph of ``torch.compile``.

If TorchScript is not as farprop knows it, a ``TorchVersionWarning`` says so, and the rest works.
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
    """Put the hooks into TorchScript. Returns whether they were put in now."""
    if not has_torchscript:  # farprop._torch has said so
        return False
    try:
        from farprop.jit import hooks

        return hooks.install()
    except Exception as error:
        # Torch deprecates it, so it must not decide whether the rest can be used.
        warnings.warn(
            f"farprop can't teach TorchScript its calls, with torch {torch.__version__}: {error!r}. Functions that "
            "torch.jit.script compiles can't make calls; everything else works.",
            TorchVersionWarning,
            stacklevel=3,
        )
        return False


def _uninstall() -> None:
    """Take the hooks out again."""
    hooks = sys.modules.get("farprop.jit.hooks")
    if hooks is not None:
        hooks.uninstall()


_install()
