"""The operations of a job, noted by the job itself: how long each took, and how it ended."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tests.support.clocks import now


class Outcome(Enum):
    """How an operation ended."""

    VALUE = "value"
    ERROR = "error"  # one that the fault explains
    INTERRUPTED = "interrupted"
    WRONG = "wrong value"
    UNEXPECTED = "unexpected error"


@dataclass(frozen=True)
class Operation:
    """An operation that has ended. Times are of the driver's monotonic clock."""

    rank: int
    kind: str
    began: float
    ended: float
    deadline: float  # seconds that it had
    outcome: Outcome
    error: str = ""  # the name of the error's type
    detail: str = ""


@dataclass
class Result:
    """What the job gets back."""

    right: bool
    value: Any = None
    may_have_run: bool = True  # if it is not right


class Operations:
    """Runs the operations of one thread.

    Args:
        rank: The rank of the worker.
        expected: The errors that the fault explains. They change when it is over.
    """

    def __init__(self, rank: int, expected: tuple[type[BaseException], ...]) -> None:
        self.done: list[Operation] = []
        self._rank = rank
        self.expected = expected
        self._interruptible = False

    def catch_interrupts(self) -> None:
        """Let SIGINT raise in operations, as Ctrl-C does in a program, and nowhere else in the harness."""

        def interrupt(*_: object) -> None:
            if self._interruptible:
                self._interruptible = False
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)

    def run(
        self,
        kind: str,
        seconds: float,
        operation: Callable[[Callable[[], float]], Any],
        is_right: Callable[[Any], bool] = lambda value: True,
    ) -> Result:
        """Run and note one operation.

        Args:
            kind: What it is called in the table.
            seconds: Its deadline.
            operation: Is called with a function that says how many seconds are left, for the timeouts of its calls.
            is_right: Whether the value is the right one.
        """
        began = now()
        value = failure = None
        outcome = Outcome.VALUE
        try:
            self._interruptible = True
            value = operation(lambda: max(0.001, began + seconds - now()))
            self._interruptible = False
        except KeyboardInterrupt as error:
            failure, outcome = error, Outcome.INTERRUPTED
        except BaseException as error:
            self._interruptible = False  # no call before it, so no interrupt comes here
            failure = error
            outcome = Outcome.ERROR if isinstance(error, self.expected) else Outcome.UNEXPECTED
        ended = now()
        detail = ""
        if outcome is Outcome.VALUE and not is_right(value):
            outcome, detail = Outcome.WRONG, repr(value)[:300]
        elif failure is not None and (outcome is Outcome.UNEXPECTED or ended - began > seconds):
            detail = "".join(traceback.format_exception(failure))
        name = type(failure).__name__ if failure is not None else ""
        self.done.append(Operation(self._rank, kind, began, ended, seconds, outcome, name, detail))
        return Result(outcome is Outcome.VALUE, value, getattr(failure, "may_have_run", True))
