"""The progress bar of ``WorkerPool.map``: tqdm's, if it is installed."""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from farprop.errors import UsageError


class _NoBar:
    def update(self) -> None:
        """Show nothing."""


def progress_bar(wanted: bool | None, total: int | None) -> AbstractContextManager[Any]:
    """Make a progress bar.

    Args:
        wanted: Whether there is one; None if there is one where somebody sees it.
        total: The number of steps, if it is known.

    Returns:
        A context manager of an object with ``update()``, which is called after each step.

    Raises:
        UsageError: It is wanted, and tqdm is not installed.
    """
    if wanted is False or (wanted is None and not _is_seen()):
        return nullcontext(_NoBar())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without ipywidgets the bar of a notebook is of text
            from tqdm.auto import tqdm
    except ImportError:
        if wanted is None:
            return nullcontext(_NoBar())
        raise UsageError("A progress bar needs tqdm: pip install tqdm") from None
    bar: AbstractContextManager[Any] = tqdm(total=total)
    return bar


def _is_seen() -> bool:
    """Whether the program runs in a terminal or in a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return sys.stderr.isatty() or hasattr(shell, "kernel")
