"""The Python threads of this process as they are at one moment: what each runs, and what it waits for.

Stacks are those that Python's fault handler writes, in one call that no other thread can interrupt. To read the frame
objects of other threads (``sys._current_frames``) crashes CPython 3.11 now and then, if a thread goes on meanwhile.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import threading
from dataclasses import replace

import torch

from farprop.protocol.inspection import CallId, Frame, Thread
from farprop.runtime.process_state import is_computing
from farprop.runtime.sync import awaited_by

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Python's own library is no code of the program's. What is installed inside of its directory is.
_NOT_PROGRAM = (_OURS, _TORCH, "<")
_STANDARD = os.path.dirname(os.__file__) + os.sep
_TORCH_FUTURES = os.path.join(_TORCH, "futures", "__init__.py")

# What the fault handler writes. It leaves out threads after the newest 100, and frames after the innermost 100.
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) ")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


def is_programs(file: str) -> bool:
    """Whether a file is the program's own code, and not farprop's, torch's or Python's."""
    if file.startswith(_NOT_PROGRAM):
        return False
    return not file.startswith(_STANDARD) or "/site-packages/" in file or "/dist-packages/" in file


def native_id_of(thread: threading.Thread) -> int:
    """The system's id of a thread."""
    if thread is threading.main_thread():
        return os.getpid()  # Python keeps that of the parent after a fork
    return thread.native_id or 0


class PythonThreads:
    """The threads of this process, as they are now. ``shows``: whether places in the program may be told."""

    def __init__(self, shows: bool) -> None:
        self._stacks = stacks()
        self._known = {thread.ident: thread for thread in threading.enumerate()}
        self._shows = shows

    def idents(self) -> list[int]:
        return [ident for ident in self._stacks if ident in self._known]

    def name_of(self, ident: int) -> str:
        thread = self._known.get(ident)
        return "" if thread is None else thread.name

    def native_id(self, ident: int) -> int:
        thread = self._known.get(ident)
        return 0 if thread is None else native_id_of(thread)

    def computes(self, ident: int) -> bool | None:
        if ident == threading.get_ident():
            return None  # it makes this snapshot
        return is_computing(self.native_id(ident))

    def place_of(self, ident: int) -> Frame | None:
        """The innermost line of the program's own code."""
        if not self._shows:
            return None
        return next((frame for frame in self._stacks.get(ident, ()) if is_programs(frame.file)), None)

    def waits_for_futures(self, ident: int) -> bool:
        """Whether a thread waits for a future that is none of a call: one of ``then`` or ``collect_all``, say."""
        return isinstance(awaited_by.get(ident), torch.futures.Future) or any(
            frame.file == _TORCH_FUTURES for frame in self._stacks.get(ident, [])[:6]
        )

    def describe(self, ident: int, serves: CallId | None, waits_for: CallId | None, with_frames: bool) -> Thread:
        frames = [_with_code(frame) for frame in self._stacks.get(ident, ())] if with_frames else []
        return Thread(
            self.name_of(ident),
            self.native_id(ident),
            self.computes(ident),
            serves,
            waits_for,
            self.place_of(ident),
            frames,
        )


def stacks() -> dict[int, list[Frame]]:
    """The stacks of the Python threads, innermost frames first; of the newest 100 threads if there are more."""
    file = os.memfd_create("farprop-stacks")
    try:
        faulthandler.dump_traceback(file)
        text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
    finally:
        os.close(file)
    found: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            frames = found[int(thread[1], 16)] = []
        elif (frame := _FRAME.fullmatch(line)) is not None:
            frames.append(Frame(_unescaped(frame[1]), int(frame[2]), _unescaped(frame[3])))
    return found


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text)


def _with_code(frame: Frame) -> Frame:
    return replace(frame, code=linecache.getline(frame.file, frame.line).strip())
