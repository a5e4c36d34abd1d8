"""What a reader of the results must know about where they were measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any


def facts() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m", _module(), *sys.argv[1:]]),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def describe(facts: dict[str, Any]) -> str:
    return (
        f"{facts['date']}  {facts['cores']} cores ({facts['processor']}), Python {facts['python']}, "
        f"torch {facts['torch']}"
    )


def busy_cores(seconds: float = 0.2) -> float:
    """How many cores are at work just now: what others take, if our own processes are still."""
    busy, total = _jiffies()
    time.sleep(seconds)
    busy_later, total_later = _jiffies()
    cores = os.cpu_count() or 1
    return cores * (busy_later - busy) / max(1, total_later - total)


class Others:
    """What other work takes, looked at before each round, since it comes and goes."""

    def __init__(self, ours: float = 0.0) -> None:
        self.ours = ours
        self.looks: list[float] = []

    def look(self) -> None:
        self.looks.append(max(0.0, busy_cores() - self.ours))

    def __str__(self) -> str:
        return f"other work kept {median(self.looks):.1f} cores busy, at most {max(self.looks):.1f}"


def _jiffies() -> tuple[int, int]:
    """Busy and all, since boot; idle and waiting for a disk are fields 4 and 5 of the first line."""
    with open("/proc/stat") as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else "bench"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
