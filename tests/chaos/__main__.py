"""``python -m tests.chaos``: breaks training jobs for a while, and prints what happened; see ``--help``."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.report import as_json, table
from tests.chaos.scenario import PAIRS, Report, run_scenario
from tests.chaos.site import missing_faults
from tests.support import clocks, forkserver, leaks

_SHOWN = 10  # violations of one scenario: one mistake can make thousands


def main() -> int:
    parser = argparse.ArgumentParser(description="Training jobs that are broken while they run.")
    parser.add_argument("--minutes", type=float, default=10, help="how long (default: %(default)s)")
    parser.add_argument("--count", type=int, help="run this many scenarios, however long it takes")
    parser.add_argument("--seed", type=int, help="of the first scenario; the next ones count up (default: by chance)")
    parser.add_argument("--only", metavar="KIND", default="", help="a fault, a job, or both as FAULT/JOB")
    parser.add_argument("--grace", type=float, default=2, help="seconds for a loaded machine (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    arguments = parser.parse_args()
    wanted = set(filter(None, arguments.only.split("/")))
    chosen = [pair for pair in PAIRS if wanted <= set(pair)]
    if not chosen:
        parser.error(f"no scenario is {arguments.only!r}; there are {', '.join(map('/'.join, PAIRS))}")
    seed = random.SystemRandom().randrange(1_000_000) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    end = time.monotonic() + 60 * arguments.minutes
    reports: list[Report] = []
    # The files of farprop must be this run's own, or the check would find those of another job.
    private = tempfile.mkdtemp(prefix="chaos-")
    os.environ["TMPDIR"] = tempfile.tempdir = private
    os.environ.pop("XDG_RUNTIME_DIR", None)
    leaks.warm_up()
    try:
        missing = _start_server(private)
        for fault, why in missing.items():
            print(f"skipped: {fault}: {why}", flush=True)
        pairs = [pair for pair in chosen if pair[0] not in missing]
        if not pairs:
            return 2
        for number in itertools.islice(itertools.count(seed), arguments.count):
            if arguments.count is None and time.monotonic() >= end:
                break
            reports.append(run_scenario(*pairs[number % len(pairs)], number, arguments.grace, missing))
            _tell(reports[-1])
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        forkserver.stop_servers()
        shutil.rmtree(private, ignore_errors=True)
    print(table(reports))
    if arguments.json is not None:
        arguments.json.write_text(as_json(reports))
    return any(report.violations for report in reports)


def _start_server(directory: str) -> dict[str, str]:
    """Start the fork server with the library of clocks, if there is one; returns the faults that are missing."""
    try:
        os.environ["LD_PRELOAD"] = clocks.build(directory)
    except clocks.NotAllowedError as error:
        forkserver.server()
        return {**missing_faults(has_clocks=False), "clock": str(error)}
    try:
        forkserver.server()
    finally:
        del os.environ["LD_PRELOAD"]
    return missing_faults(has_clocks=True)


def _tell(report: Report) -> None:
    """A line for each scenario, and its violations: a run may be cut short."""
    what = f"{report.fault}/{report.job} {report.seed}: {len(report.operations)} operations"
    print(what, *report.violations[:_SHOWN], sep="\n  VIOLATION: ", flush=True)
    if report.violations:
        print(report.output, f"  replay: {report.command}", sep="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
