"""The state machine of references behind its lock, and the queue of its instructions.

Rules that hold here:

- ``GuardedMachine.locked`` is the only place that takes the lock.
- No code of a user runs under the lock. The garbage collector may still start there, and run a finaliser that makes
  a call: that call raises, where it would wait for its own thread for ever.
- Instructions are carried out outside of the lock, in order, by whichever thread gets to them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from farprop.errors import UsageError
from farprop.locks import make_owned_lock
from farprop.protocol.references.records import Instruction, InstructionKind
from farprop.protocol.references.state_machine import RRefStateMachine

_R = TypeVar("_R")
_RETRY_SECONDS = 0.005


def _nothing() -> None:
    """A step that changes nothing: ``GuardedMachine.run`` carries out what others have left."""


class GuardedMachine:
    """One entry for all threads, and a queue of what the machine wants done.

    Args:
        machine: Touched by nobody else, except to look at a single item of its tables.
        call_at_lockfree: Has the event loop call something at a time; takes no lock.
    """

    def __init__(
        self, machine: RRefStateMachine, call_at_lockfree: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self.machine = machine
        self.handlers: dict[InstructionKind, Callable[[Any], None]] = {}
        """Who carries out which instructions. Kinds without a handler are ignored."""
        self._call_at_lockfree = call_at_lockfree
        self._lock = make_owned_lock("references")
        self._is_inside = self._lock._is_owned
        self._instructions: deque[Instruction] = deque()

    def locked(self, action: Callable[..., _R], *args: Any) -> _R:
        """Call something under the lock.

        Raises:
            UsageError: This thread is under the lock already, so a finaliser is making a call.
        """
        if self._is_inside():
            raise UsageError(
                "A finaliser made a call while its thread was inside farprop. Don't make calls in __del__: note "
                "what is to be done, and do it elsewhere."
            )
        with self._lock:
            result = action(*args)
            instructions = self.machine.instructions
            if instructions:
                self._instructions.extend(instructions)
                instructions.clear()
        return result

    def run(self, action: Callable[..., _R], *args: Any) -> _R:
        """Do one step of the machine under the lock, then carry out its instructions. If that is interrupted, a timer
        carries out the rest.
        """
        try:
            result = self.locked(action, *args)
            if self._instructions:
                self.carry_out()
        except Exception:
            raise
        except BaseException:
            self.run_later(_nothing)
            raise
        return result

    def run_later(self, action: Callable[..., Any], *args: Any) -> None:
        """Do one step in the event loop, where no interrupt comes. Takes no lock."""
        self._call_at_lockfree(time.monotonic(), partial(self.run, action, *args))

    def carry_out(self) -> None:
        """Carry out the instructions of all threads. One that fails stays queued, and is tried again."""
        while self._instructions:
            try:
                instruction = self._instructions[0]
                del self._instructions[0]  # not by a call: neither an interrupt nor another thread comes between
            except IndexError:
                return  # another thread was faster
            try:
                handler = self.handlers.get(instruction.kind)
                if handler is not None:
                    handler(instruction.subject)
            except BaseException as error:
                self._instructions.appendleft(instruction)
                if isinstance(error, Exception):
                    self._call_at_lockfree(time.monotonic() + _RETRY_SECONDS, self.carry_out)
                raise

    @property
    def idle(self) -> bool:
        """No instruction is left to carry out."""
        return not self._instructions
