"""A flood, as the driver sees it: what it does to the memory of both ends, and to others who call the same worker."""

from __future__ import annotations

import bisect
import re
from collections.abc import Container, Sequence
from pathlib import Path

from tests.chaos import jobs
from tests.chaos.faults import Event
from tests.chaos.jobs import Findings
from tests.chaos.site import IN_FLIGHT
from tests.support.workers import Cluster

_KIB = 1 << 10
_MIB = 1 << 20
# What a call costs its caller beside the request: a future, and what belongs to it.
_PER_CALL = 16 * _KIB
_OTHER = 64 * _MIB
# Calls of the flood that may run between the start of another worker's call and its turn. It waits for two turns of
# the flood's, once it is read; how many run before that, the scheduler decides.
_MOST_TURNS = 2000


class Flood:
    """A flood that has begun."""

    def __init__(self, job: Cluster, event: Event) -> None:
        self._job = job
        self._event = event
        self._before = {rank: _forget_peak(job.pid(rank)) for rank in (event.rank, event.target)}
        target = f"worker{event.target}"
        self._flood = job.start(event.rank, jobs.flood, event.rank, target, event.calls, event.size)
        self._witness = job.start(event.witness, jobs.witness, event.witness, target)

    def results(self, dead: Container[int], is_alone: bool) -> tuple[list[Findings], list[str]]:
        """Wait for its end; returns what the workers have done, and what is wrong.

        Args:
            dead: The workers that were killed.
            is_alone: Whether nothing else can hold up the call of another worker, such as a cut cable.
        """
        event = self._event
        found: list[Findings] = []
        problems: list[str] = []
        if event.rank not in dead:
            found.append(Findings(self._flood.result()))
        times: list[tuple[float, float]] = []
        if event.witness not in dead:
            operations, times = self._witness.result()
            found.append(Findings(operations))
        if is_alone and event.target not in dead:
            problems += check_turns(times, self._job.run(event.target, jobs.flood_times))
        most = 4 * IN_FLIGHT + 4 * event.size + event.calls * _PER_CALL + _OTHER
        for rank, before in self._before.items():
            if rank not in dead:
                problems += check_memory(rank, _peak(self._job.pid(rank)) - before, most)
        return found, problems


def check_turns(times: Sequence[tuple[float, float]], flood: Sequence[float]) -> list[str]:
    """Callers take turns: no call waits for many of another caller's."""
    flood = sorted(flood)
    turns = max((bisect.bisect(flood, ran) - bisect.bisect(flood, sent) for sent, ran in times), default=0)
    return [f"a call waited for {turns} calls of a flood"] if turns > _MOST_TURNS else []


def check_memory(rank: int, growth: int, most: int) -> list[str]:
    """The memory of both ends of a flood is bounded."""
    if growth <= most:
        return []
    return [f"rank {rank} needed {growth >> 20} MiB more during a flood; {most >> 20} MiB are right"]


def _forget_peak(pid: int) -> int:
    """Let the kernel measure the peak of a process's memory anew; returns its memory now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _memory(pid, "VmRSS")


def _peak(pid: int) -> int:
    return _memory(pid, "VmHWM")


def _memory(pid: int, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * _KIB
