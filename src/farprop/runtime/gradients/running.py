"""Which pass runs in this thread: hooks of leaves are not told."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farprop.runtime.gradients.local import LocalPass

running_pass: ContextVar[LocalPass | None] = ContextVar("farprop_running_pass", default=None)
