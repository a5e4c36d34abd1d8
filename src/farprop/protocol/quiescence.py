"""When is all work of a job done? Asked by graceful shutdown.

Each round every worker reports how many requests it has ever sent, and whether it is idle: no request of its own
unanswered, none of others running. Work is done when two rounds in a row show every worker idle and nobody has sent
anything in between. One round is not enough: a request can slip from a worker that has not reported yet to one that
has.

Why two are: whatever runs between the rounds was sent by someone. If they sent it before their first report they were
not idle then; if after, their count has moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from farprop.errors import ProtocolError


class Report(NamedTuple):
    """One worker's word in one round."""

    sent: int
    idle: bool

    @classmethod
    def of(cls, word: Any) -> Report:
        """What came in a message."""
        match word:
            case (int() as sent, bool() as idle):
                return cls(sent, idle)
        raise ProtocolError("a worker's report at shutdown makes no sense")


class Quiescence:
    """Feed it rounds; it says when to stop."""

    def __init__(self) -> None:
        self._last: dict[str, int] | None = None

    def round(self, reports: Mapping[str, Report]) -> bool:
        """True when this round and the one before agree that nothing is left."""
        if not all(report.idle for report in reports.values()):
            self._last = None
            return False
        sent = {name: report.sent for name, report in reports.items()}
        done, self._last = sent == self._last, sent
        return done
