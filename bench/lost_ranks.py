"""`python -m bench.lost_ranks`: how long it takes until all other ranks know that a rank is gone.

Ranks run collectives of all kinds, or wait in one for a rank that does not join. At a random moment one rank is killed,
or its host is cut off; each other rank records when it gets its error. The benchmark uses the tests' workers and hosts,
and needs the permission to make network namespaces.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from statistics import median
from typing import NamedTuple

from bench import machine
from tests.groups.native import endless
from tests.support.hosts import Hosts
from tests.support.workers import processes

_SIZE = 4
_MOST_COLLECTIVES = 60
_LONGEST_WAIT = 2.0


class Scenario(NamedTuple):
    places: list[int]
    is_cut: bool
    is_waiting: bool = False


SCENARIOS = {
    "killed, one host": Scenario([0, 0, 0, 0], is_cut=False),
    "killed, two hosts": Scenario([0, 0, 1, 1], is_cut=False),
    "killed, four hosts": Scenario([0, 1, 2, 3], is_cut=False),
    "cut off, two hosts": Scenario([0, 0, 1, 1], is_cut=True),
    "cut off, four hosts": Scenario([0, 1, 2, 3], is_cut=True),
    "cut off, two hosts that wait": Scenario([0, 0, 1, 1], is_cut=True, is_waiting=True),
}


def trial(hosts: Hosts, scenario: Scenario, seed: int) -> list[float]:
    """Run one trial; return the seconds after which each rank knew."""
    dice = random.Random(seed)
    victim = dice.randrange(_SIZE)
    with processes(_SIZE, hosts.environments(scenario.places), check=False) as job:
        for start in [job.start(rank, endless.join, rank, _SIZE) for rank in range(_SIZE)]:
            start.result()
        if scenario.is_waiting:
            runs = [job.start(rank, endless.once, "all_reduce") for rank in range(_SIZE) if rank != victim]
            time.sleep(dice.uniform(0, _LONGEST_WAIT))
        else:
            runs = [job.start(rank, endless.run, list(endless.KINDS), seed) for rank in range(_SIZE)]
            job.run(victim, endless.await_collectives, dice.randrange(1, _MOST_COLLECTIVES))
        began = time.monotonic()
        if scenario.is_cut:
            hosts.cut(scenario.places[victim])
        else:
            job.kill(victim)
            del runs[victim]
        endings = [run.result() for run in runs]
        if scenario.is_cut:
            hosts.mend(scenario.places[victim])
        return [ending.when - began for ending in endings]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lost_ranks")
    parser.add_argument("--trials", type=int, default=40, help="of each scenario (%(default)s)")
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d warns of addresses that have no name
    print(machine.describe(machine.facts()))
    with Hosts(_SIZE) as hosts:
        for name, scenario in SCENARIOS.items():
            seconds = [taken for seed in range(options.trials) for taken in trial(hosts, scenario, seed)]
            figures = f"median {median(seconds):.3f} s, longest {max(seconds):.3f} s"
            print(f"{name:30}{figures} ({len(seconds)} ranks in {options.trials} trials)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
