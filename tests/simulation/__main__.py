"""``python -m tests.simulation``: whole jobs, and single protocols, on virtual time."""

import os
import sys

if __name__ == "__main__" and os.environ.get("PYTHONHASHSEED") != "0":
    # The order of a set of names must follow from the seed, too. Before the other imports, which take seconds.
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])

import argparse
import time

from tests.simulation.harness import MUTANTS, mutated
from tests.simulation.job.killers import KILLERS
from tests.simulation.job.mutants import SHARED
from tests.simulation.runner import KINDS, Report, kills, kind_of, mutants_of, replay, run_all

_SHOWN = 10


def main() -> int:
    options = _options()
    if options.mutants:
        return _run_mutants(options)
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


def _run_mutants(options: argparse.Namespace) -> int:
    """The table of mutants, and the number of seeds that each took."""
    kind = options.kind or "job"
    names = [*mutants_of(kind), *(SHARED if kind == "job" else ())]
    alive = 0
    for name, seeds, failure in kills(names, options.seeds, options.jobs, kind, KILLERS if options.likely else {}):
        alive += failure is None
        print(f"| `{name}` | {seeds if failure is not None else 'lives'} | {(failure or '')[:100]} |", flush=True)
    print(f"{len(names)} mutants, of which {alive} live")
    return 1 if alive else 0


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
        description="Whole jobs, and the protocols of references, passes, groups and parcels alone, on virtual time.",
        epilog="mutants: " + ", ".join(MUTANTS),
    )
    parser.add_argument("--kind", choices=KINDS, help="only these; with one seed, references is what is meant")
    parser.add_argument("--seed", type=int, help="run this one and print everything that happens")
    parser.add_argument("--seeds", type=int, default=20_000, help="how many to run of each kind (%(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first of them (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    parser.add_argument("--mutants", action="store_true", help="run all mutants, each for as many seeds at most")
    parser.add_argument(
        "--likely", action="store_true", help="try the seeds first that have killed these mutants before"
    )
    parser.add_argument("--mutant", choices=MUTANTS, metavar="NAME", help="put this mutant in first")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
