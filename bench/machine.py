"""The machine: its description for the results, an artificial load, and what Linux reports about processes."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    """How many cores are busy now: with other work, because our own processes are frozen."""
    busy, total = _jiffies()
    time.sleep(seconds)
    busy_later, total_later = _jiffies()
    cores = os.cpu_count() or 1
    return cores * (busy_later - busy) / max(1, total_later - total)


class Others:
    """How many cores other work takes, measured before each round."""

    def __init__(self, ours: float = 0.0) -> None:
        self.ours = ours
        self.samples: list[float] = []

    def sample(self) -> None:
        self.samples.append(max(0.0, busy_cores() - self.ours))

    def __str__(self) -> str:
        return f"other work kept {median(self.samples):.1f} cores busy, at most {max(self.samples):.1f}"


def _jiffies() -> tuple[int, int]:
    """Busy and total time since boot. Fields 4 and 5 of the first line are idle time and time that waits for a disk."""
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


# It checks now and then whether its parent lives, so that it ends after a killed run.
_BURN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


_CLONE_NEWNET = 0x40000000


def leave_network() -> bool:
    """Move this process, which must have one thread, to a network of its own with nothing but loopback.

    Torch's TCPStore asks a name server about every client that connects. With many workers this takes seconds that have
    nothing to do with either side; without a network the question fails at once. Needs root's permissions and `ip`;
    returns whether it was done.
    """
    if shutil.which("ip") is None or ctypes.CDLL(None).unshare(_CLONE_NEWNET) != 0:
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


@contextlib.contextmanager
def one_busy_core() -> Iterator[None]:
    burner = subprocess.Popen([sys.executable, "-c", _BURN])
    time.sleep(0.3)  # its start-up is not part of the load
    try:
        yield
    finally:
        burner.kill()
        burner.wait()


@dataclass(frozen=True)
class Usage:
    """The resources of a process that a leak would make grow."""

    rss_kib: int
    fds: int
    memfd_maps: int


@dataclass(frozen=True)
class Activity:
    """The counters that an idle process should not increase."""

    cpu_seconds: float
    wakeups: int


def usage(pid: int) -> Usage:
    proc = Path(f"/proc/{pid}")
    return Usage(
        rss_kib=_status(proc, "VmRSS"),
        fds=len(os.listdir(proc / "fd")),
        memfd_maps=sum("/memfd:" in line for line in (proc / "maps").read_text().splitlines()),
    )


def own_kib(pid: int) -> int:
    """Memory of a process that is no file's. What it shares with others, also after a fork, is divided among them."""
    kib = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("Pss_Anon", "Pss_Shmem"):
            kib += int(value.split()[0])
    return kib


def together_kib(pids: Sequence[int]) -> int:
    """Memory of processes that is no file's, and all shared memory of the machine, also what nobody has mapped."""
    with open("/proc/meminfo") as lines:
        shared = next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))
    return shared + sum(_status(Path(f"/proc/{pid}"), "RssAnon") for pid in pids)


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_kib(pid: int) -> int:
    """The most memory that the process had since `reset_peak`."""
    return _status(Path(f"/proc/{pid}"), "VmHWM")


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


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
