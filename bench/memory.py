"""`python -m bench.memory`: memory stays flat over many calls, and idle workers use no CPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median

from bench import machine
from bench.driver import Pair, start, stop
from bench.machine import Usage, activity, usage
from bench.report import render

PACKAGES = {"farprop": "farprop", "torch": "torch.distributed"}
TRIALS = {"empty": 200_000, "echo-1mb": 2_000, "remote": 100_000}
LOOKS = 20
# Caches and pools fill first; a leak grows after that, too.
SETTLED = LOOKS // 4
# 2 MiB over 150,000 calls is 14 bytes a call, less than any Python object.
MOST_RSS_KIB = 2048
MOST_HANDLES = 2
SETTLE_SECONDS = 2
IDLE_SECONDS = 3


def is_flat(looks: Sequence[Usage]) -> bool:
    """Whether memory did not grow after settling. It compares medians of a few samples, because RSS fluctuates."""
    after, last = looks[SETTLED : 2 * SETTLED], looks[-SETTLED:]
    rss = median(look.rss_kib for look in last) - median(look.rss_kib for look in after)
    fds = median(look.fds for look in last) - median(look.fds for look in after)
    maps = median(look.memfd_maps for look in last) - median(look.memfd_maps for look in after)
    return rss <= MOST_RSS_KIB and fds <= MOST_HANDLES and maps <= MOST_HANDLES


def watch(pair: Pair, case: str, count: int) -> list[list[Usage]]:
    """Make the calls; return for each worker a sample at the start and one after each part of the calls."""
    looks: list[list[Usage]] = [[usage(child.pid)] for child in pair.children]
    for _ in range(LOOKS):
        pair.repeat(case, count // LOOKS)
        for child, seen in zip(pair.children, looks, strict=True):
            seen.append(usage(child.pid))
    return looks


def idle(pair: Pair) -> list[str]:
    time.sleep(SETTLE_SECONDS)
    before = [activity(child.pid) for child in pair.children]
    time.sleep(IDLE_SECONDS)
    after = [activity(child.pid) for child in pair.children]
    return [
        f"idle for {IDLE_SECONDS} s: w{rank} used {(b.cpu_seconds - a.cpu_seconds) * 1e3:.0f} ms of CPU "
        f"and woke {b.wakeups - a.wakeups} times"
        for rank, (a, b) in enumerate(zip(before, after, strict=True))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--side", default="farprop", choices=list(PACKAGES))
    options = parser.parse_args()
    print(machine.describe(machine.facts()))
    pair = Pair(PACKAGES[options.side], {})
    rows = []
    all_flat = True
    try:
        start([pair.children])
        for case, count in TRIALS.items():
            for rank, looks in enumerate(watch(pair, case, count)):
                flat = is_flat(looks)
                all_flat = all_flat and flat
                title = f"{count:,} x {case}, w{rank}"
                rows.append([title, *_cells(looks), "flat" if flat else "NOT FLAT"])
        print(f"\n{options.side}: at the start, once settled, at the end")
        print(render(["", "RSS MiB", "fds", "memfd maps", ""], rows))
        print("\n".join(idle(pair)))
    finally:
        stop([pair.children])
    return 0 if all_flat else 1


def _cells(looks: Sequence[Usage]) -> list[str]:
    moments = [looks[0], looks[SETTLED], looks[-1]]
    return [
        ", ".join(f"{look.rss_kib / 1024:.1f}" for look in moments),
        ", ".join(str(look.fds) for look in moments),
        ", ".join(str(look.memfd_maps) for look in moments),
    ]


if __name__ == "__main__":
    sys.exit(main())
