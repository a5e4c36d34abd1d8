"""``python -m tests.simulation``: the protocols of remote references, backward passes and process groups in simulated
jobs.
"""

import argparse
import os
import sys
import time

from tests.simulation.harness import MUTANTS, mutated
from tests.simulation.runner import KINDS, Report, kind_of, replay, run_all

_SHOWN = 10


def main() -> int:
    options = _options()
    if options.seed is not None:
        with mutated(options.mutant):
            outcome = KINDS[kind_of(options.kind, options.mutant)].run(options.seed, tracing=True)
        print(outcome.failure or "all is well")
        return 1 if outcome.failure else 0
    if options.kind or options.mutant:
        return _run(kind_of(options.kind, options.mutant), options)
    failed = 0
    for name, kind in KINDS.items():
        print(f"{kind.title}:", flush=True)
        failed |= _run(name, options)
    return failed


def _run(kind: str, options: argparse.Namespace) -> int:
    started = time.monotonic()
    report = Report(kind)
    for outcome in run_all(range(options.start, options.start + options.seeds), options.jobs, options.mutant, kind):
        report.add(outcome)
        if outcome.failure is not None and report.failed <= _SHOWN:
            print(replay(outcome, options.mutant), flush=True)
    print(report.text(time.monotonic() - started), flush=True)
    return 1 if report.failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description="The protocols of remote references, backward passes and process groups in simulated jobs.",
        epilog="mutants: " + ", ".join(MUTANTS),
    )
    parser.add_argument("--kind", choices=KINDS, help="only these jobs; if it is one seed, references is what is meant")
    parser.add_argument("--seed", type=int, help="run this one and print everything that happens")
    parser.add_argument("--seeds", type=int, default=20_000, help="how many to run of each kind (%(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first of them (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    parser.add_argument("--mutant", choices=MUTANTS, metavar="NAME", help="put this mutant in first")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
