"""``python -m tests.autograd.oracle``: random programs on workers, compared with one process."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time

from tests.autograd.oracle.driver import WORLD, Report, check_program, run_seeds, wait_until_all_empty
from tests.autograd.oracle.generator import generate
from tests.autograd.oracle.program import text
from tests.autograd.oracle.shrink import shrunk
from tests.support.workers import Cluster, cluster

_SHOWN = 10


def main() -> int:
    # Workers check that they left no files behind, so other jobs on the machine must use another directory.
    private = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="oracle-")
    os.environ.pop("XDG_RUNTIME_DIR", None)
    try:
        return _main(_options())
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _main(options: argparse.Namespace) -> int:
    transports = ("auto", "tcp") if options.transport == "both" else (options.transport,)
    total = Report()
    started = time.monotonic()
    for number, transport in enumerate(transports):
        calls = {"rpc_timeout": options.timeout}
        with cluster(WORLD, {"FARPROP_TRANSPORT": transport}, calls, timeout=120) as job:
            if options.seed is not None:
                return _replay(job, options.seed, options.shrink)
            seeds = range(options.start + number, options.start + options.programs, len(transports))
            for report in run_seeds(job, seeds, options.at_once, options.seconds / len(transports)):
                for seed, failure in report.failures.items():
                    if len(total.failures) < _SHOWN:
                        print(f"{failure}\nreplay: {replay_line(seed, transport)}", flush=True)
                total.add(report)
            wait_until_all_empty(job)
    _print(total, time.monotonic() - started, options.coverage)
    return 1 if total.failures else 0


def replay_line(seed: int, transport: str) -> str:
    return f"python -m tests.autograd.oracle --seed {seed} --transport {transport} --shrink"


def _replay(job: Cluster, seed: int, shrink: bool) -> int:
    program, _ = generate(seed)
    problems = job.run(0, check_program, program)
    print(f"{text(program)}\n{problems or 'all is well'}")
    if problems and shrink:
        program = shrunk(program, lambda trial: bool(job.run(0, check_program, trial)))
        print(f"\nCut down:\n{text(program)}\n{job.run(0, check_program, program)}")
    return 1 if problems else 0


def _print(total: Report, seconds: float, coverage: bool) -> None:
    if coverage:
        print("\n".join(f"{count:7} {kind}" for kind, count in total.kinds.most_common()))
    rate = total.programs / seconds
    print(
        f"{total.programs} programs with {total.steps} steps, {total.gradients} gradients, {total.hook_calls} calls of "
        f"hooks: {len(total.failures)} differ ({seconds:.1f} s, {rate:.0f} a second)"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.autograd.oracle",
        description="Random distributed programs against the same programs in one process.",
    )
    parser.add_argument("--seed", type=int, help="run this one, and print it")
    parser.add_argument("--shrink", action="store_true", help="cut down the program of --seed if it fails")
    parser.add_argument("--programs", type=int, default=2000, help="how many to run (%(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--transport", choices=("auto", "tcp", "both"), default="both", help="(%(default)s)")
    parser.add_argument("--at-once", type=int, default=WORLD, choices=range(1, WORLD + 1), help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=0, help="stop after this time")
    parser.add_argument("--timeout", type=float, default=20, help="of calls and passes (%(default)s s)")
    parser.add_argument("--coverage", action="store_true", help="print how often each kind of step was there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
