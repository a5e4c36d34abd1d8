"""Which program of the job failed first, as far as this process was told: no sockets, no clock."""

from __future__ import annotations

from farprop.errors import CollectiveError, ConnectionLostError, FarpropError
from farprop.protocol.foreign_text import one_line

MAX_TEXT = 600  # characters
_FORGET_SECONDS = 60.0  # a loss that comes later has another reason
_MOST_CAUSES = 32


class FirstFailure:
    """What this process was told. The first who says something is right; the others may be its victims."""

    def __init__(self) -> None:
        self._text = ""
        self._told = 0.0

    def told(self, text: str, now: float) -> None:
        """A program says who failed first: itself or, if it failed because of another one, that one."""
        if text and not self.known(now):
            self._text, self._told = text, now

    def known(self, now: float) -> str:
        """Who failed first, and with what; empty if nobody has said so, or long ago."""
        return self._text if now - self._told < _FORGET_SECONDS else ""


def cause_of(error: BaseException) -> BaseException | None:
    """The exception that a program failed with; None if it did not fail.

    ``sys.exit`` in an ``except`` clause hides what was raised before it.
    """
    if isinstance(error, SystemExit):
        if error.__context__ is not None:
            return cause_of(error.__context__)
        return None if error.code in (None, 0) else error
    return error


def blamed(error: BaseException) -> str | None:
    """Whom an exception of farprop's, or one that came of it, blames.

    Returns:
        The text about who failed first; "" if it is an echo of a failure that nobody has told of; None if the
        exception is no echo.
    """
    found: str | None = None
    at: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if at is None:
            break
        if isinstance(at, FarpropError) and at.first_failure:
            return at.first_failure
        if isinstance(at, ConnectionLostError | CollectiveError):
            found = ""
        at = at.__cause__ or at.__context__
    return found


def failed_first(who: str, what: str) -> str:
    """The text that travels, and that errors show."""
    return cleaned(f"{who} failed first: {what}")


def cleaned(text: str) -> str:
    """A text of another process, on one line and of limited length: it goes to terminals and logs."""
    return one_line(text, MAX_TEXT)
