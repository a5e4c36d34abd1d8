"""Every place where CPython can raise ``KeyboardInterrupt`` in farprop's code, and an interrupt at any one of them.

A signal that arrives while an opcode runs is handled at the next opcode that looks for signals: the start of a
function, a jump backwards, and the end of a call. So an interrupt at every opcode is an interrupt at each of these.
``Interrupts`` follows the opcodes of a run with ``sys.settrace``, and makes a signal pending just before one of them.
The interpreter itself then delivers it, exactly where it would deliver a real one. To raise from the trace function
would also try places that no interrupt can reach, such as between the end of a ``with`` block and its lock's release.

System calls and waits for locks are interrupted from inside, before they have done anything. There the trace function
does raise, in place of the call.
"""

from __future__ import annotations

import _thread
import ast
import asyncio
import dis
import functools
import linecache
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import farprop

_SOURCE = str(Path(farprop.__file__).parent)
# An exception in the middle of asyncio's own code may lose the wake-up of a task. The handler that asyncio.run installs
# raises none, and no program can do better.
_ASYNCIO = str(Path(asyncio.__file__).parent)
_CHECKING = frozenset(
    code
    for code, name in enumerate(dis.opname)
    if name.startswith(("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")) and not name.endswith("NO_INTERRUPT")
)
_CALLS = frozenset(code for code, name in enumerate(dis.opname) if name.startswith("CALL"))
_WITH = frozenset(code for code, name in enumerate(dis.opname) if name in ("BEFORE_WITH", "LOAD_SPECIAL"))
# Calls that a signal ends early.
_INTERRUPTIBLE = frozenset(
    {"acquire", "wait", "poll", "recv_into", "send", "sendmsg", "recvmsg", "sleep", "join", "connect"}
)
_TURNS = 3  # of a loop, or calls of one function, that are told apart


class Point(NamedTuple):
    """A place in the code, and the how manyth time that the run gets there."""

    file: str
    function: str
    offset: int  # of the opcode
    kind: str  # "start" of a function, "after" an opcode, "instead" of a call
    turn: int

    def __str__(self) -> str:
        return f"{self.kind} {self.function}+{self.offset} in {self.file} (turn {self.turn})"


class _Charge:
    """When it is collected, a signal is pending."""


class _Fuse(weakref.ref[_Charge]):
    """C code all the way: Python code would get the signal itself."""

    burn = staticmethod(functools.partial(_thread.interrupt_main, signal.SIGINT))


_fuses: list[_Fuse] = []


@functools.cache
def _interruptible_calls(code: CodeType) -> frozenset[int]:
    """The offsets of calls that a signal ends early, and of locks that are waited for."""
    found = set()
    for instruction in dis.get_instructions(code):
        if instruction.opcode in _WITH or (
            instruction.opcode in _CALLS and _called_name(code, instruction) in _INTERRUPTIBLE
        ):
            found.add(instruction.offset)
    return frozenset(found)


def _called_name(code: CodeType, instruction: dis.Instruction) -> str | None:
    at = instruction.positions
    if at is None or at.lineno is None or at.end_lineno is None:
        return None
    lines = [linecache.getline(code.co_filename, number) for number in range(at.lineno, at.end_lineno + 1)]
    lines[-1] = lines[-1].encode()[: at.end_col_offset].decode()
    lines[0] = lines[0].encode()[at.col_offset :].decode()
    try:
        call = ast.parse("".join(lines), mode="eval").body
    except SyntaxError:
        return None
    function = call.func if isinstance(call, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


class Interrupts:
    """Follows one run in the main thread; interrupts it at ``target``, if there is one.

    It interrupts code in files whose names start with one of ``sources``.
    """

    sources: tuple[str, ...] = (_SOURCE,)

    def __init__(self, target: Point | None = None) -> None:
        self.target = target
        self.points: dict[Point, None] = {}
        self.opcodes = 0
        self.fired = False
        self.delivered = ""  # where the program was when the interrupt was raised
        self._turns: dict[tuple[CodeType, int, str], int] = {}
        self._calling = False

    @contextmanager
    def __call__(self) -> Iterator[Interrupts]:
        before = signal.signal(signal.SIGINT, self._on_signal)
        try:
            sys.settrace(self._on_call)
            try:
                yield self
            finally:
                sys.settrace(None)
        finally:
            # A signal that is still pending is delivered here, at the latest.
            try:
                signal.signal(signal.SIGINT, before)
            finally:
                signal.signal(signal.SIGINT, before)
                _fuses.clear()

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        self.delivered = _where(frame)
        if frame is not None and frame.f_code.co_filename.startswith(_ASYNCIO):
            return
        raise KeyboardInterrupt(self.delivered)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(self.sources):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if not self._calling and self._is_target(frame, "start"):  # otherwise the point of the call is this one
            charge = _Charge()
            _fuses.append(_Fuse(charge, methodcaller("burn")))
            sys.settrace(None)
            return None  # here the charge is collected
        self._calling = False
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if event != "opcode":
            return self._on_event
        self.opcodes += 1
        self._calling = False
        offset = frame.f_lasti
        if offset in _interruptible_calls(frame.f_code) and self._is_target(frame, "instead"):
            sys.settrace(None)
            self.delivered = _where(frame)
            raise KeyboardInterrupt(self.delivered)
        code = frame.f_code.co_code[offset]
        if code in _CHECKING:
            self._calling = code in _CALLS
            if self._is_target(frame, "after"):
                charge = _Charge()
                _fuses.append(_Fuse(charge, methodcaller("burn")))
                sys.settrace(None)
                return None  # here the charge is collected
        return self._on_event

    def _is_target(self, frame: FrameType, kind: str) -> bool:
        code = frame.f_code
        key = code, frame.f_lasti, kind
        turn = self._turns[key] = self._turns.get(key, 0) + 1
        if turn > _TURNS:
            return False
        file = code.co_filename.removeprefix(_SOURCE + "/")
        point = Point(file, code.co_qualname, frame.f_lasti, kind, turn)
        if point != self.target:
            self.points[point] = None
            return False
        self.fired = True
        return True


def _where(frame: FrameType | None) -> str:
    places = []
    while frame is not None and len(places) < 6:
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(places)
