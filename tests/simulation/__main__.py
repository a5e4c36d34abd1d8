"""``python -m tests.simulation``: the protocol of remote references in simulated jobs."""

import argparse
import os
import sys
import time

from tests.simulation.flaws import FLAWS, planted
from tests.simulation.report import Report, replay, run_all
from tests.simulation.world import run

_SHOWN = 10


def main() -> int:
    options = _options()
    if options.seed is not None:
        with planted(options.flaw):
            outcome = run(options.seed, tracing=True)
        print(outcome.failure or "all is well")
        return 1 if outcome.failure else 0
    started = time.monotonic()
    report = Report()
    for outcome in run_all(range(options.start, options.start + options.seeds), options.jobs, options.flaw):
        report.add(outcome)
        if outcome.failure is not None and report.failed <= _SHOWN:
            print(replay(outcome, options.flaw), flush=True)
    print(report.text(time.monotonic() - started))
    return 1 if report.failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description="The protocol of remote references in simulated jobs.",
        epilog="flaws: " + ", ".join(FLAWS),
    )
    parser.add_argument("--seed", type=int, help="run this one and print everything that happens")
    parser.add_argument("--seeds", type=int, default=20_000, help="how many to run (%(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first of them (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    parser.add_argument("--flaw", choices=FLAWS, metavar="NAME", help="break the machine in this way first")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
