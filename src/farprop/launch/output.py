"""The output of workers, line by line in the output of the driver, behind the worker's name."""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

_TAIL_LINES = 20
_CHUNK = 1 << 16  # as much as a pipe holds
_LONGEST_LINE = 1 << 16
_SETTLE_SECONDS = 1.0
_PAUSE = 0.001


class _Stream:
    """One output stream of a worker. ``target`` is the name of the driver's stream in ``sys``."""

    def __init__(self, worker: str, target: str, pipe: IO[bytes]) -> None:
        self.worker = worker
        self.target = target
        self.pipe = pipe
        self._rest = b""

    def read(self) -> tuple[list[str], bool]:
        """Read what is there; returns the complete lines, and whether this is the end."""
        data = os.read(self.pipe.fileno(), _CHUNK)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines.append(self._rest)
            self._rest = b""
        return [_as_seen(line) for line in lines], not data


class OutputRelay:
    """Reads the output of workers on a thread, until its end, and writes it to ``sys.stdout`` and ``sys.stderr``.

    Args:
        on_end: called with the name of a worker whose output has ended, on the thread.
    """

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
        self._selector = selectors.DefaultSelector()
        self._open: dict[str, int] = {}  # how many streams of each worker have not ended
        self._tails: dict[str, list[str]] = {}
        self._is_busy = False
        self._passes = 0
        self._wake = -1
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="farprop-output", daemon=True)

    def add(self, worker: str, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Relay the output of a worker. Call it before ``start``."""
        self._tails[worker] = []
        self._open[worker] = 2
        for target, pipe in (("stdout", stdout), ("stderr", stderr)):
            self._selector.register(pipe, selectors.EVENT_READ, _Stream(worker, target, pipe))

    def start(self) -> None:
        self._wake = os.eventfd(0)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()

    def tail(self, worker: str) -> list[str]:
        """The last lines of a worker's output."""
        return self._tails.get(worker, [])

    def wait_for_end(self, worker: str, seconds: float) -> None:
        """Wait until a worker that has ended has no output left."""
        end = time.monotonic() + seconds
        while self._open.get(worker) and time.monotonic() < end:
            time.sleep(_PAUSE)

    def settle(self) -> None:
        """Wait until what the workers have written so far is written here."""
        if not self._is_unsettled():
            return
        end = time.monotonic() + _SETTLE_SECONDS
        passes = self._passes + 2  # the one that is under way, and a whole one after it
        while self._passes < passes and self._is_unsettled() and time.monotonic() < end:
            time.sleep(_PAUSE)

    def close(self, seconds: float) -> None:
        """Stop reading: at the end of all output, or after this time, if children of the workers have the pipes."""
        if self._wake < 0:
            self._selector.close()
            return
        self._thread.join(seconds)
        self._stops = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._selector.close()
        os.close(self._wake)

    def _is_unsettled(self) -> bool:
        # In this order: whoever reads is busy before it reads.
        return bool(self._open and self._looks_readable()) or self._is_busy

    def _looks_readable(self) -> bool:
        try:
            return bool(self._selector.select(0))
        except (OSError, ValueError, RuntimeError):
            return False  # the thread has just closed it

    def _run(self) -> None:
        while self._open and not self._stops:
            ready = self._selector.select()
            self._is_busy = True
            ended = [stream for key, _ in ready if (stream := key.data) is not None and self._relay(stream)]
            self._is_busy = False
            self._passes += 1
            for stream in ended:
                self._forget(stream)

    def _relay(self, stream: _Stream) -> bool:
        """Write what a stream has; returns whether it has ended."""
        lines, is_end = stream.read()
        if lines:
            worker = stream.worker
            self._tails[worker] = [*self._tails[worker], *lines][-_TAIL_LINES:]
            _write(stream.target, "".join(f"[{worker}] {line}\n" for line in lines))
        return is_end

    def _forget(self, stream: _Stream) -> None:
        self._selector.unregister(stream.pipe)
        left = self._open[stream.worker] - 1
        if left:
            self._open[stream.worker] = left
        else:
            del self._open[stream.worker]
            self._on_end(stream.worker)


def _write(target: str, text: str) -> None:
    """Write to the stream that the program has now. A notebook shows what threads write in the cell that runs."""
    stream: Any = getattr(sys, target)
    with suppress(Exception):  # it may be closed or None: the workers must not stand still because of that
        stream.write(text)
        stream.flush()


def _as_seen(line: bytes) -> str:
    """A line as a terminal shows it: what a carriage return has overwritten is gone."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
