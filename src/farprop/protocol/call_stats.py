"""Sums of calls, by the worker at the other end and by function: how many, how long, how many bytes.

Times are kept in a histogram whose buckets grow by a quarter, so a quantile is right to about 12 percent, and the sums
of several workers, or the difference of two moments, are sums and differences of counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from farprop.protocol.events import OK, ClientCall, Event, ServedCall

CLIENT, SERVER = "client", "server"
OTHER = "other"

_SMALLEST = 1e-6
_GROWTH = 1.25
_MOST_ROWS = 1000


def bucket_of(seconds: float) -> int:
    """The histogram's bucket for a time. Bucket 0 ends at a microsecond."""
    return bisect_left(_BOUNDS, seconds)


def upper_bound(bucket: int) -> float:
    """The longest time, in seconds, that is counted in this bucket."""
    return _SMALLEST * _GROWTH**bucket


_BOUNDS = [upper_bound(bucket) for bucket in range(150)]  # the last is years


def quantile(buckets: Mapping[int, int], share: float) -> float | None:
    """The time that this share of the calls did not exceed; None if there were none.

    Args:
        buckets: how many calls there were, by bucket.
        share: between 0 and 1: 0.5 for the median.

    Returns:
        The middle of the bucket in which it falls, in seconds.
    """
    left = share * sum(buckets.values())
    for bucket, count in sorted(buckets.items()):
        left -= count
        if count and left <= 0:
            return upper_bound(bucket) / math.sqrt(_GROWTH)
    return None


@dataclass
class CallStat:
    """The calls of one function with one worker.

    ``seconds`` and ``buckets`` are of the whole call at a caller, and from its arrival to its answer at a callee.
    """

    side: str
    """``client``: this worker made the calls. ``server``: it served them."""
    peer: str
    function: str
    calls: int = 0
    errors: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    buckets: dict[int, int] = field(default_factory=dict)

    def copy(self) -> CallStat:
        """Copy the numbers.

        Returns:
            Another object with the same numbers.
        """
        return replace(self, buckets=dict(self.buckets))

    def since(self, before: CallStat | None) -> CallStat:
        """What has been added since an earlier moment.

        Args:
            before: the numbers at that moment; None for the beginning.

        Returns:
            The difference.
        """
        if before is None or before.calls > self.calls:  # the worker has begun anew
            return self
        earlier = before.buckets
        grown = {bucket: count - earlier.get(bucket, 0) for bucket, count in self.buckets.items()}
        return CallStat(
            self.side,
            self.peer,
            self.function,
            self.calls - before.calls,
            self.errors - before.errors,
            self.sent_bytes - before.sent_bytes,
            self.received_bytes - before.received_bytes,
            self.seconds - before.seconds,
            {bucket: count for bucket, count in grown.items() if count},
        )


class CallStats:
    """Sums up the calls of a worker. Farprop's own calls don't count.

    There is a row for each side, peer and function, up to a limit: a program may call very many functions. Calls of
    further functions are summed up as those of ``other``.
    """

    def __init__(self, most_rows: int = _MOST_ROWS) -> None:
        self._rows: dict[tuple[str, str, str], CallStat] = {}
        self._most_rows = most_rows

    def add(self, event: Event) -> None:
        if isinstance(event, ClientCall):
            side, peer, seconds = CLIENT, event.callee, event.ended - event.began
        elif isinstance(event, ServedCall):
            side, peer, seconds = SERVER, event.caller, event.ended - event.arrived
        else:
            return
        if event.system:
            return
        row = self._rows.get((side, peer, event.function)) or self._new_row(side, peer, event.function)
        row.calls += 1
        row.errors += event.outcome != OK
        row.sent_bytes += event.sent_bytes
        row.received_bytes += event.received_bytes
        row.seconds += seconds
        bucket = bucket_of(seconds)
        row.buckets[bucket] = row.buckets.get(bucket, 0) + 1

    def _new_row(self, side: str, peer: str, function: str) -> CallStat:
        if len(self._rows) >= self._most_rows:
            function = OTHER
        return self._rows.setdefault((side, peer, function), CallStat(side, peer, function))

    def rows(self) -> list[CallStat]:
        return list(self._rows.values())


def total(rows: Iterable[CallStat], side: str, peer: str = "", function: str = "") -> CallStat:
    """The sum of the rows of one side; ``peer`` and ``function`` are the names of the sum."""
    found = CallStat(side, peer, function)
    for row in rows:
        if row.side == side:
            found.calls += row.calls
            found.errors += row.errors
            found.sent_bytes += row.sent_bytes
            found.received_bytes += row.received_bytes
            found.seconds += row.seconds
            for bucket, count in row.buckets.items():
                found.buckets[bucket] = found.buckets.get(bucket, 0) + count
    return found
