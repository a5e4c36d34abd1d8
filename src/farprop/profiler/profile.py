"""A recording of all workers of a job, and what can be read from it."""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from farprop import __version__
from farprop.errors import UsageError
from farprop.profiler import chrome
from farprop.profiler.askers import FromOutside, FromWorker
from farprop.profiler.session import Asker, Session
from farprop.profiler.summary import SlowestCalls, Summary, call_times, missing_parts, summarize
from farprop.profiler.timeline import Call, Worker, joined_calls
from farprop.protocol.recording import MAX_EVENTS

_log = logging.getLogger(__name__)


def profile(
    path: str | os.PathLike[str] | None = None, *, operators: bool = False, max_events: int = MAX_EVENTS
) -> Profile:
    """Record what all workers of the job do, while a ``with`` block runs on this one.

    At the end of the block the recordings of all workers are put on one clock and written as a Chrome trace, which
    https://ui.perfetto.dev opens. Workers that died meanwhile are missing, and named; the rest is there.

    Args:
        path: The file to write; None for none.
        operators: Whether torch's operators are recorded on each worker, too. That slows small operators down.
        max_events: How many events a worker keeps, and how many operators. The rest is counted.

    Returns:
        The profile, a context manager.

    Raises:
        UsageError: This process is not a worker, or somebody else records the job.
        OSError: The file can't be written there.

    Example:
        ``with farprop.profile("trace.json") as p: train()``, then ``print(p.summary())``
    """
    return Profile(path, operators, max_events)


def trace(
    job: str = "",
    path: str | os.PathLike[str] | None = None,
    seconds: float = 5.0,
    *,
    operators: bool = False,
    timeout: float = 1.0,
) -> Profile:
    """Record a job for a while, from a process outside of it, as ``farprop trace`` does. Ctrl-C ends it earlier.

    Args:
        job: The job's name, the beginning of its id, or the path of a worker's job file. Empty for the only job.
        path: The file to write; None for none.
        seconds: How long to record.
        operators: As for :func:`profile`.
        timeout: The seconds to wait for the answers of workers when the job is looked for.

    Returns:
        The profile.

    Raises:
        UsageError: There is no such job, there are several, or somebody else records it.
        OSError: The file can't be written there.

    Example:
        ``print(farprop.profiler.trace("train", "trace.json").summary())``
    """
    found = Profile(path, operators, MAX_EVENTS)
    found._begin(FromOutside(job, timeout), None)
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        pass
    found._end()
    return found


class Profile:
    """A recording of all workers of a job. :func:`profile` makes it; its results are there after the ``with`` block.

    Args:
        path: the file to write; None for none.
        operators: whether torch's operators are recorded, too.
        max_events: how many events a worker keeps at most.
    """

    def __init__(self, path: str | os.PathLike[str] | None, operators: bool, max_events: int) -> None:
        if max_events < 1:
            raise UsageError(f"max_events is {max_events}. A worker has to keep one event at least.")
        self._path = None if path is None else Path(path)
        self._operators = operators
        self._max_events = max_events
        self._session: Session | None = None
        self._own: tuple[str, int] | None = None
        self._began = 0.0
        self._seconds = 0.0
        self._workers: list[Worker] | None = None
        self._missing: dict[str, str] = {}
        self._calls: list[Call] = []

    def __enter__(self) -> Profile:
        from farprop.runtime.agent_registry import current_agent

        agent = current_agent()
        self._begin(FromWorker(agent), (agent.get_worker_info().name, threading.get_native_id()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._end()
        except Exception:
            if error is None:
                raise
            _log.exception("farprop could not write the profile of a block that failed")

    def _begin(self, asker: Asker, own: tuple[str, int] | None) -> None:
        if self._session is not None:
            raise UsageError("This profile has been used. Make another one with farprop.profile().")
        if self._path is not None:
            chrome.check_path(self._path)
        self._session = session = Session(asker, self._operators, self._max_events)
        self._own = own
        session.begin()
        self._began = time.monotonic()

    def _end(self) -> None:
        assert self._session is not None
        self._seconds = time.monotonic() - self._began
        traces = self._session.end()
        if not traces:
            reasons = "; ".join(f"{name} {reason}" for name, reason in self._session.missing.items())
            raise UsageError(f"No worker has recorded anything: {reasons}.")
        name, thread = self._own or ("", None)
        self._workers = [Worker(trace, thread if trace.member.name == name else None) for trace in traces]
        self._missing = missing_parts(self._workers, self._session.missing)
        self._calls = joined_calls(self._workers)
        if self._path is not None:
            self.save(self._path)

    def _recorded(self) -> list[Worker]:
        if self._workers is None:
            raise UsageError("The profile has no result yet: leave its with block first.")
        return self._workers

    @property
    def missing(self) -> dict[str, str]:
        """What is missing, by worker: those that died or did not answer, and those with too many events."""
        self._recorded()
        return dict(self._missing)

    @property
    def seconds(self) -> float:
        """How long the block took."""
        return self._seconds

    @property
    def clock_error(self) -> float:
        """How far apart two workers may see the same moment, in seconds: 0 if all are on one host."""
        return max(worker.clock_error for worker in self._recorded())

    def summary(self) -> Summary:
        """Say where the time of each worker went.

        Returns:
            Seconds by worker. ``print`` shows a table.

        Raises:
            UsageError: The block has not ended.
        """
        workers = self._recorded()
        return Summary([summarize(worker) for worker in workers], self._seconds, self.missing, self.clock_error)

    def slowest(self, n: int = 10) -> SlowestCalls:
        """Find the slowest calls, and where their time went.

        Args:
            n: How many.

        Returns:
            The slowest first. ``print`` shows a table.

        Raises:
            UsageError: The block has not ended.
        """
        self._recorded()
        times = call_times(self._calls, self._began)
        return SlowestCalls(heapq.nlargest(n, times, key=lambda found: found.seconds))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the Chrome trace.

        Args:
            path: The file.

        Raises:
            UsageError: The block has not ended.
            OSError: The file can't be written.
        """
        workers = self._recorded()
        began = min(worker.began for worker in workers)
        events = chrome.ChromeTrace(workers, self._calls, began).events()
        chrome.write(Path(path), events, self._facts(workers))

    def _facts(self, workers: list[Worker]) -> dict[str, Any]:
        return {
            "farprop": __version__,
            "workers": [worker.name for worker in workers],
            "missing": self._missing,
            "clock_error_us": {worker.name: round(worker.clock_error * 1e6, 3) for worker in workers},
        }
