"""Clocks: workers whose wall clocks a test can set, and workers whose monotonic clocks began at another time.

Nobody's clock is touched. The fork server has a library preloaded (``clocks.c``) that adds a number to the wall clock,
for C and Python code alike. The monotonic clock of a worker is that of a time namespace, as on another host.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

WALL = "TESTS_WALL_CLOCK"  # the file with the nanoseconds that a worker's wall clock is ahead
MONOTONIC = "TESTS_MONOTONIC_AHEAD"  # the seconds that its monotonic clock is ahead
_CLONE_NEWTIME = 0x00000080
_NUMBER = struct.Struct("=q")
_SOURCE = Path(__file__).with_suffix(".c")


class NotAllowedError(Exception):
    """This machine lacks something. The text says what."""


def build(directory: str) -> str:
    """Compile the library that has to be preloaded; returns its path."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NotAllowedError("there is no C compiler here (Debian: gcc)")
    path = os.path.join(directory, "clocks.so")
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", path, str(_SOURCE), "-ldl", "-pthread"]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        raise NotAllowedError(f"{_SOURCE.name} can't be compiled here: {built.stderr.strip()}")
    return path


class WallClock:
    """The wall clock of a worker, as its driver sets it. The driver makes it before the worker starts."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.set(0.0)

    @property
    def environment(self) -> dict[str, str]:
        return {WALL: self.path}

    def set(self, seconds: float) -> None:
        """Let it be ahead of the real one, or behind."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, _NUMBER.pack(int(seconds * 1e9)), 0)
        finally:
            os.close(descriptor)


def use_wall_clock(path: str) -> None:
    """Have the wall clock that a driver sets."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "tests_use_clock") or library.tests_use_clock(os.fsencode(path)) != 0:
        raise RuntimeError("the fork server was started without the library of clocks")


def enter_time_namespace(seconds: int) -> None:
    """Let the monotonic clock of this process, which must have one thread, be ahead."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWTIME) != 0:
        raise OSError(ctypes.get_errno(), "can't make a time namespace")
    with open("/proc/self/timens_offsets", "w") as offsets:
        offsets.write(f"monotonic {seconds} 0\nboottime {seconds} 0\n")
    with open("/proc/self/ns/time_for_children") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWTIME) != 0:
            raise OSError(ctypes.get_errno(), "can't enter the time namespace")


def now() -> float:
    """The monotonic clock of the driver, also in a worker whose own is ahead."""
    return time.monotonic() - int(os.environ.get(MONOTONIC, "0"))
