"""Termination detection for graceful shutdown: when is all work of a job done?

In each round every worker reports how many requests it has ever sent, and whether it is idle: none of its own requests
is unanswered, and it runs none of other workers. The work is done when two consecutive rounds show every worker idle,
and no worker has sent a request between its two reports.

One round is not enough: a worker that has not reported yet can send a request to one that has. Two rounds are: some
worker sent any request that runs between the rounds. If it sent the request before its first report, it was not idle
then; if after, its count has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from farprop.errors import ProtocolError


class Report(NamedTuple):
    """One worker's report in one round."""

    sent: int
    idle: bool

    @classmethod
    def of(cls, word: Any) -> Report:
        """Check a report from a message."""
        match word:
            case (int() as sent, bool() as idle):
                return cls(sent, idle)
        raise ProtocolError("a worker's report at shutdown is malformed")


class Quiescence:
    """Compares the reports of consecutive rounds."""

    def __init__(self) -> None:
        self._last: dict[str, int] | None = None

    def round(self, reports: Mapping[str, Report]) -> bool:
        """Add the reports of a round, by worker; returns True when the work is done."""
        if not all(report.idle for report in reports.values()):
            self._last = None
            return False
        sent = {name: report.sent for name, report in reports.items()}
        done, self._last = sent == self._last, sent
        return done
