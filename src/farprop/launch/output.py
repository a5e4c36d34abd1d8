"""The output of workers that were started here: read as it comes, and shown line by line, with the worker's name."""

from __future__ import annotations

import codecs
import os
import selectors
import threading
import time
from contextlib import suppress
from typing import IO, TextIO

_CHUNK = 1 << 16
_MOST_CHUNKS_LEFT = 16  # as much as a pipe can hold: a process that outlives its worker may write for ever
_SETTLE_SECONDS = 1.0
_PAUSE = 0.001
_COLOURS = ("36", "33", "32", "35", "34", "31")


class Stream:
    """One pipe of a worker's."""

    def __init__(self, descriptor: int, prefix: str, shown_on: TextIO, log: IO[bytes] | None) -> None:
        self.descriptor = descriptor
        self._prefix = prefix
        self._shown_on = shown_on
        self._log = log
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""

    def read(self) -> bool | None:
        """Read some of what is there and show its whole lines; False at the end, None if there is nothing."""
        try:
            chunk = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return None
        if self._log is not None:
            with suppress(OSError):  # a full disk must not end the job
                self._log.write(chunk)
        *lines, self._line = (self._line + self._decoder.decode(chunk)).split("\n")
        self._show(lines)
        return bool(chunk)

    def close(self) -> None:
        """Show the rest, also without an end of line."""
        for _ in range(_MOST_CHUNKS_LEFT):
            if not self.read():
                break
        rest = self._line + self._decoder.decode(b"", final=True)
        if rest:
            self._show([rest])
        os.close(self.descriptor)
        if self._log is not None:
            with suppress(OSError):
                self._log.close()

    def _show(self, lines: list[str]) -> None:
        if not lines:
            return
        # Of a progress bar, which is drawn again and again on one line, only the last state.
        text = "".join(f"{self._prefix}{line.rstrip(chr(13)).rpartition(chr(13))[2]}\n" for line in lines)
        with suppress(OSError, ValueError):  # whoever read our output has gone: the job goes on
            self._shown_on.write(text)
            self._shown_on.flush()


class Output:
    """Shows what workers write. A thread of its own reads their pipes, so that no worker waits for the launcher."""

    def __init__(self, colours: bool) -> None:
        self._colours = colours
        self._is_reading = False
        self._rounds = 0
        self._selector = selectors.DefaultSelector()
        self._wake_up, self._woken = os.pipe()
        self._selector.register(self._wake_up, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._read, name="farprop-output", daemon=True)
        self._thread.start()

    def add(self, descriptor: int, rank: int, shown_on: TextIO, log: IO[bytes] | None = None) -> None:
        """Show what can be read from a descriptor, which must not block, as the output of a worker."""
        prefix = f"worker{rank} | "
        if self._colours:
            prefix = f"\033[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\033[0m"
        self._selector.register(descriptor, selectors.EVENT_READ, Stream(descriptor, prefix, shown_on, log))

    def settle(self) -> None:
        """Wait until what workers have written so far is shown, for a second at most."""
        end = time.monotonic() + _SETTLE_SECONDS
        rounds = self._rounds + 2  # the one that is under way, and a whole one after it
        # In this order: the thread says that it reads before it does.
        while self._selector.select(0) or self._is_reading:
            if self._rounds >= rounds or time.monotonic() > end:
                return
            time.sleep(_PAUSE)

    def finish(self) -> None:
        """Show what is left; all workers have ended."""
        os.close(self._woken)
        self._thread.join()

    def _read(self) -> None:
        is_open = True
        while is_open:
            ready = self._selector.select()
            self._is_reading = True
            for key, _ in ready:
                if key.data is None:
                    is_open = False
                elif key.data.read() is False:
                    self._selector.unregister(key.fd)
                    key.data.close()
            self._rounds += 1
            self._is_reading = False
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.close()
        self._selector.close()
        os.close(self._wake_up)
