"""`python -m bench.lost_ranks`: how long it takes until all other ranks know that one is gone.

Ranks run collectives of all kinds. At a random moment one is killed, or its host is cut off; each of the others notes
when it gets its error. It uses the tests' workers and hosts, and has to be allowed to make network namespaces.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from statistics import median

from bench import machine
from tests.groups.native import endless
from tests.support.hosts import Hosts
from tests.support.workers import processes

_SIZE = 4
_MOST_COLLECTIVES = 60
WAYS = {
    "killed, one host": ([0] * _SIZE, False),
    "killed, two hosts": ([0, 0, 1, 1], False),
    "killed, four hosts": ([0, 1, 2, 3], False),
    "host cut off, two hosts": ([0, 0, 1, 1], True),
    "host cut off, four hosts": ([0, 1, 2, 3], True),
}


def trial(hosts: Hosts, places: list[int], is_cut: bool, seed: int) -> list[float]:
    """The seconds until each rank knew."""
    dice = random.Random(seed)
    victim = dice.randrange(_SIZE)
    with processes(_SIZE, hosts.environments(places), check=False) as job:
        for start in [job.start(rank, endless.join, rank, _SIZE) for rank in range(_SIZE)]:
            start.result()
        runs = [job.start(rank, endless.run, list(endless.KINDS), seed) for rank in range(_SIZE)]
        job.run(victim, endless.await_collectives, dice.randrange(1, _MOST_COLLECTIVES))
        began = time.monotonic()
        if is_cut:
            hosts.cut(places[victim])
        else:
            job.kill(victim)
        knowing = [run for rank, run in enumerate(runs) if is_cut or rank != victim]
        endings = [run.result() for run in knowing]
        if is_cut:
            hosts.mend(places[victim])
        return [ending.when - began for ending in endings]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lost_ranks")
    parser.add_argument("--trials", type=int, default=50, help="of each way (%(default)s)")
    parser.add_argument("--only", choices=WAYS, help="one way")
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d warns of addresses that have no name
    print(machine.describe(machine.facts()))
    with Hosts(_SIZE) as hosts:
        for way in [options.only] if options.only else WAYS:
            seconds = [time_ for seed in range(options.trials) for time_ in trial(hosts, *WAYS[way], seed)]
            print(
                f"{way}: median {median(seconds):.3f} s, longest {max(seconds):.3f} s, {len(seconds)} ranks", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
