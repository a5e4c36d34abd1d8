"""How busy this machine is."""

from __future__ import annotations

import os
import time


def busy_cores(seconds: float = 0.2) -> float:
    """How many cores are busy now, this process aside if it sleeps.

    Args:
        seconds: how long to look.

    Returns:
        A number of cores; 0 where the system does not say.
    """
    try:
        busy, total = _jiffies()
        time.sleep(seconds)
        busy_later, total_later = _jiffies()
    except OSError:
        return 0.0
    return (os.cpu_count() or 1) * (busy_later - busy) / max(1, total_later - total)


def _jiffies() -> tuple[int, int]:
    """Busy and total time since boot. Fields 4 and 5 of the first line are idle time and time that waits for a disk."""
    with open("/proc/stat") as stat:
        counts = [int(field) for field in stat.readline().split()[1:9]]
    return sum(counts) - counts[3] - counts[4], sum(counts)
