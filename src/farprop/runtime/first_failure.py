"""The last words of a program that fails, and what others have said as theirs.

A process that ends with an exception tells its peers which one, on the connections that it has, before these close. So
whoever loses such a connection has read the reason before. Rules that hold here:

- Only a process that fails says anything, and it waits ``SECONDS`` at most.
- An exception that came of the loss of another worker is no first failure: the process repeats what it was told, or
  says nothing.
- Nobody waits to be told.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import TypeVar

from farprop.errors import FarpropError
from farprop.protocol import first_failure as protocol
from farprop.runtime.python_threads import is_programs

SECONDS = 0.2  # for a process that fails to tell all of its peers
_E = TypeVar("_E", bound=FarpropError)
Teller = Callable[[BaseException], None]

_first = protocol.FirstFailure()
_tellers: list[Teller] = []
_watched = 0  # the process whose end is watched


def told(text: str) -> None:
    """Another process says who failed first."""
    _first.told(protocol.cleaned(text), time.monotonic())


def known() -> str:
    """Who failed first, and with what; empty if nobody has said so."""
    return _first.known(time.monotonic())


def explained(error: _E) -> _E:
    """Say in an error who failed first, if that is known; returns the error."""
    text = known()
    if text and not error.first_failure:
        error.first_failure = text
        if text not in str(error):
            error.args = (f"{str(error).rstrip()} {text}.", *error.args[1:])
    return error


def last_words(error: BaseException, who: str, discreet: bool = False) -> str:
    """What a program that fails with this exception tells the others; empty if there is nothing to tell.

    Args:
        error: the exception.
        who: this worker, or this rank.
        discreet: whether to tell no more than the exception's type, in a restricted job.
    """
    cause = protocol.cause_of(error)
    if cause is None:
        return ""
    blamed = protocol.blamed(cause)
    if blamed is not None:
        return blamed
    name = type(cause).__qualname__
    if discreet:
        return protocol.failed_first(who, name)
    text = ""
    with suppress(Exception):  # ``__str__`` of an exception is the program's
        text = str(cause)
    place = _place_of(cause)
    # The place last: it must not be cut off with a long text.
    what = f"{name}: {text[: protocol.MAX_TEXT // 2]}" if text else name
    return protocol.failed_first(who, f"{what} ({place})" if place else what)


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_programs(frame.filename)] or frames
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else ""


# The end of this process


def at_failing_end(tell: Teller) -> Teller:
    """Call ``tell`` with the exception that ends this process, before its connections close; returns ``tell``."""
    _tellers.append(tell)
    return tell


def watch_end() -> None:
    """Have the tellers called in a child of ``multiprocessing``, too. It ends without the callbacks of ``atexit``."""
    global _watched
    if _watched != os.getpid() and multiprocessing.parent_process() is not None:
        _watched = os.getpid()
        Finalize(None, _on_child_end, exitpriority=100)


def _on_child_end() -> None:
    error = sys.exception()
    if error is not None:
        tell_all(error)


def tell_all(error: BaseException) -> None:
    """Tell everybody that this process ends with this exception."""
    for tell in _tellers:
        with suppress(Exception):
            tell(error)


def uncaught() -> BaseException | None:
    """In a callback of ``atexit``: the exception that ends this process, or None."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None  # each line of an interpreter may raise, and it goes on
    error = getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None
