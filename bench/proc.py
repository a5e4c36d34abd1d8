"""What Linux says about a process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    """What a leak would make grow."""

    rss_kib: int
    fds: int
    memfd_maps: int


@dataclass(frozen=True)
class Activity:
    """What an idle process should not add to."""

    cpu_seconds: float
    wakeups: int


def usage(pid: int) -> Usage:
    proc = Path(f"/proc/{pid}")
    return Usage(
        rss_kib=_status(proc, "VmRSS"),
        fds=len(os.listdir(proc / "fd")),
        memfd_maps=sum("/memfd:" in line for line in (proc / "maps").read_text().splitlines()),
    )


def activity(pid: int) -> Activity:
    proc = Path(f"/proc/{pid}")
    # fields 14 and 15 (utime, stime), counted after the name, which may hold spaces
    fields = (proc / "stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    wakeups = sum(_status(task, "voluntary_ctxt_switches") for task in (proc / "task").iterdir())
    return Activity(ticks / os.sysconf("SC_CLK_TCK"), wakeups)


def _status(proc: Path, key: str) -> int:
    for line in (proc / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0])
    raise KeyError(key)
