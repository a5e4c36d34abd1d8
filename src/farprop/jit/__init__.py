"""Calls, references and gradients from compiled code.

After ``import farprop.jit``, functions and modules that ``torch.jit.script`` compiles can make calls, take references
and run backward passes. ``operator`` makes a call that stays inside a graph of ``torch.compile``.
"""

from __future__ import annotations

from farprop.jit.hooks import install
from farprop.jit.operators import operator

__all__ = ["operator"]

install()
