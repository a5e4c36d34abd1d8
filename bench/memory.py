"""`python -m bench.memory`: memory stays flat over many calls, and idle workers use no CPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median

from bench import machine
from bench.driver import Workers, start, stop
from bench.machine import Usage, activity, usage
from bench.report import render

PACKAGES = {"farprop": "farprop", "torch": "torch.distributed"}
TRIALS = {"empty": 200_000, "echo-1mb": 2_000, "remote": 100_000}
SAMPLES = 20
# Caches and pools fill first; a leak still grows after that.
SETTLED = SAMPLES // 4
# 2 MiB over 150,000 calls is 14 bytes a call, less than any Python object.
MOST_RSS_KIB = 2048
MOST_HANDLES = 2
SETTLE_SECONDS = 2
IDLE_SECONDS = 3


def is_flat(samples: Sequence[Usage]) -> bool:
    """Whether memory did not grow after settling. It compares medians of a few samples, because RSS fluctuates."""
    after, last = samples[SETTLED : 2 * SETTLED], samples[-SETTLED:]
    rss = median(sample.rss_kib for sample in last) - median(sample.rss_kib for sample in after)
    fds = median(sample.fds for sample in last) - median(sample.fds for sample in after)
    maps = median(sample.memfd_maps for sample in last) - median(sample.memfd_maps for sample in after)
    return rss <= MOST_RSS_KIB and fds <= MOST_HANDLES and maps <= MOST_HANDLES


def watch(pair: Workers, case: str, count: int) -> list[list[Usage]]:
    """Make the calls; return for each worker a sample at the start and one after each part of the calls."""
    samples: list[list[Usage]] = [[usage(child.pid)] for child in pair.children]
    for _ in range(SAMPLES):
        pair.repeat(case, count // SAMPLES)
        for child, seen in zip(pair.children, samples, strict=True):
            seen.append(usage(child.pid))
    return samples


def idle(pair: Workers) -> list[str]:
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
    pair = Workers(PACKAGES[options.side], {})
    rows = []
    all_flat = True
    try:
        start([pair.children])
        for case, count in TRIALS.items():
            for rank, samples in enumerate(watch(pair, case, count)):
                flat = is_flat(samples)
                all_flat = all_flat and flat
                title = f"{count:,} x {case}, w{rank}"
                rows.append([title, *_cells(samples), "flat" if flat else "NOT FLAT"])
        print(f"\n{options.side}: at the start, once settled, at the end")
        print(render(["", "RSS MiB", "fds", "memfd maps", ""], rows))
        print("\n".join(idle(pair)))
    finally:
        stop([pair.children])
    return 0 if all_flat else 1


def _cells(samples: Sequence[Usage]) -> list[str]:
    moments = [samples[0], samples[SETTLED], samples[-1]]
    return [
        ", ".join(f"{sample.rss_kib / 1024:.1f}" for sample in moments),
        ", ".join(str(sample.fds) for sample in moments),
        ", ".join(str(sample.memfd_maps) for sample in moments),
    ]


if __name__ == "__main__":
    sys.exit(main())
