"""Ctrl-C at the right moment."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def make_fifo(directory: Path, name: str) -> str:
    """A pipe with a name: whoever opens one end waits for the other."""
    path = str(directory / name)
    os.mkfifo(path)
    return path


@contextmanager
def ctrl_c_when(fifo: str) -> Iterator[None]:
    """Ctrl-C, once somebody writes to a pipe; the block has to raise ``KeyboardInterrupt``."""

    def press() -> None:
        Path(fifo).read_text()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()
