"""The processes of a test's ranks: forked, where PyTorch spawns them."""

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any

import torch.multiprocessing


def die_with_parent() -> None:
    """Called first in each process, so that no tests are left behind even if the runner gets SIGKILL."""
    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    # The parent may have died before the prctl call.
    parent = torch.multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def fork_ranks(self: Any) -> None:
    """Replaces ``MultiProcessTestCase._spawn_processes``."""
    self._start_processes(_rank_process)


def _rank_process(target: Callable[..., None], **options: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> None:
        die_with_parent()
        target(*args, **kwargs)

    return torch.multiprocessing.get_context("fork").Process(target=run, **options)
