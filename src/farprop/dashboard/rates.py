"""How often, how long and how much: rates from sums of calls that were read at two moments."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from farprop.protocol.call_stats import CLIENT, SERVER, CallStat, quantile, total
from farprop.protocol.inspection import Recent

_K = TypeVar("_K", bound=Hashable)

WINDOW_SECONDS = 5.0
"""Rates and quantiles are of the last few seconds: of one second they would jump."""


@dataclass(frozen=True)
class Rate:
    """Calls, a second."""

    calls: float = 0.0
    errors: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    p50: float | None = None
    """The median of their times in seconds; None if there was no call."""
    p99: float | None = None
    total: int = 0
    """All calls since the worker began to listen."""


@dataclass(frozen=True)
class _Sample:
    when: float
    since: float
    stats: dict[tuple[str, str, str], CallStat]


@dataclass(frozen=True)
class _Growth:
    """What the calls of a worker have grown by in so many seconds."""

    seconds: float
    rows: list[CallStat]
    now: list[CallStat]


class Rates:
    """The sums that workers have told of late."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[_Sample]] = {}

    def add(self, recent: Recent) -> None:
        """A worker has told its sums."""
        stats = {(row.side, row.peer, row.function): row for row in recent.stats}
        sample = _Sample(recent.now, recent.since, stats)
        samples = self._samples.setdefault(recent.name, deque())
        if samples and samples[-1].since != sample.since:
            samples.clear()  # it has begun anew
        samples.append(sample)
        while len(samples) > 2 and sample.when - samples[1].when >= WINDOW_SECONDS:
            samples.popleft()

    def keep(self, workers: Iterable[str]) -> None:
        """Forget all but these."""
        kept = set(workers)
        self._samples = {name: samples for name, samples in self._samples.items() if name in kept}

    def _growth(self, worker: str, last_only: bool = False) -> _Growth | None:
        samples = self._samples.get(worker)
        if not samples:
            return None
        last = samples[-1]
        if len(samples) == 1:
            # Nothing earlier: all of it, since the worker began to listen.
            rows = list(last.stats.values())
            return _Growth(last.when - last.since, rows, rows)
        first = samples[-2] if last_only else samples[0]
        rows = [row.since(first.stats.get(key)) for key, row in last.stats.items()]
        return _Growth(last.when - first.when, rows, list(last.stats.values()))

    def of_worker(self, worker: str, side: str, last_only: bool = False) -> Rate | None:
        """The calls that a worker has made (``client``) or served (``server``); None if it has told nothing.

        ``last_only``: since the last time that it told, for a chart.
        """
        growth = self._growth(worker, last_only)
        if growth is None:
            return None
        return _rate(total(growth.rows, side), growth.seconds, total(growth.now, side).calls)

    def of_job(self, last_only: bool = False) -> Rate:
        """All calls that the workers have made."""
        return self._grouped(lambda _, row: "" if row.side == CLIENT else None, last_only).get("", Rate())

    def by_pair(self) -> dict[tuple[str, str], Rate]:
        """By caller and callee. The callee's word counts only if the caller has told nothing."""

        def pair_of(worker: str, row: CallStat) -> tuple[str, str] | None:
            if row.side == CLIENT:
                return worker, row.peer
            return None if row.peer in self._samples else (row.peer, worker)

        return self._grouped(pair_of)

    def by_function(self) -> dict[str, Rate]:
        """By function, as its callees tell of it."""
        return self._grouped(lambda _, row: row.function if row.side == SERVER else None)

    def _grouped(self, key_of: Callable[[str, CallStat], _K | None], last_only: bool = False) -> dict[_K, Rate]:
        """The sums of rows that have the same key. Rows of one key are of one side."""
        groups: dict[_K, list[tuple[CallStat, CallStat]]] = {}
        seconds = 0.0
        for worker in self._samples:
            growth = self._growth(worker, last_only)
            seconds = max(seconds, growth.seconds if growth else 0.0)
            for grown, now in zip(growth.rows, growth.now, strict=True) if growth else ():
                key = key_of(worker, now)
                if key is not None:
                    groups.setdefault(key, []).append((grown, now))
        return {
            key: _rate(total((grown for grown, _ in rows), rows[0][0].side), seconds, sum(now.calls for _, now in rows))
            for key, rows in groups.items()
        }


def _rate(row: CallStat, seconds: float, calls: int) -> Rate:
    if seconds <= 0:
        return Rate(total=calls)
    return Rate(
        row.calls / seconds,
        row.errors / seconds,
        row.sent_bytes / seconds,
        row.received_bytes / seconds,
        quantile(row.buckets, 0.5),
        quantile(row.buckets, 0.99),
        calls,
    )
