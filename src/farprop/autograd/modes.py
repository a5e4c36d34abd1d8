"""How a pass waits: FAST for everything that was sent, SMART for what is used."""

from __future__ import annotations

from farprop.errors import UsageError
from farprop.runtime.current import current_agent

_MODES = ("smart", "fast")


def set_mode(mode: str) -> None:
    """The mode of passes of this worker that don't say theirs: ``"smart"`` or ``"fast"``.

    At the start it is what ``FARPROP_AUTOGRAD_MODE`` says, or SMART.
    """
    current_agent().autograd_mode = _checked(mode)


def get_mode() -> str:
    return current_agent().autograd_mode


def is_fast(mode: str | None) -> bool:
    return (get_mode() if mode is None else _checked(mode)) == "fast"


def _checked(mode: str) -> str:
    if mode not in _MODES:
        raise UsageError(f"There is no mode {mode!r} of backward passes: say 'smart' or 'fast'.")
    return mode
