"""``make fuzz``: runs each target for some seconds, one after the other, and prints a table of the results.

The corpus and the inputs that failed are kept under ``build/fuzz``. When the cause of a failure is fixed, its input
becomes a test in ``tests/security/test_fuzzing.py``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.targets import TARGETS, seeds

DIRECTORY = Path("build/fuzz")
LONGEST_INPUT = 100_000
SLOWEST = 10  # seconds for one input; more counts as a hang
MOST_MEMORY = 1024  # MiB; torch takes 300 to 400 of them


class Result(NamedTuple):
    target: str
    runs: int
    a_second: int
    memory: int
    outcome: str


def fuzz(target: str, seconds: int) -> Result:
    corpus, failures = DIRECTORY / target / "corpus", DIRECTORY / target / "failures"
    corpus.mkdir(parents=True, exist_ok=True)
    failures.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds(target)):
        (corpus / f"seed{number}").write_bytes(seed)
    before = set(failures.iterdir())
    arguments = [
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST_INPUT}",
        f"-timeout={SLOWEST}",
        f"-rss_limit_mb={MOST_MEMORY}",
        f"-artifact_prefix={failures}/",
        "-print_final_stats=1",
        str(corpus),
    ]
    child = [sys.executable, "-m", "tests.fuzz.child", target, *arguments]
    ended = subprocess.run(child, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    (DIRECTORY / target / "log").write_text(ended.stdout)

    def number_of(name: str) -> int:
        found = re.search(rf"stat::{name}:\s+(\d+)", ended.stdout)
        return int(found[1]) if found else 0

    new = set(failures.iterdir()) - before
    if new:
        outcome = f"FAILED: {', '.join(map(str, sorted(new)))}"
    elif ended.returncode:
        last = ended.stdout.strip().splitlines()[-1:] or [""]
        outcome = f"did not run: {last[0]}"
    else:
        outcome = "nothing found"
    return Result(
        target,
        number_of("number_of_executed_units"),
        number_of("average_exec_per_sec"),
        number_of("peak_rss_mb"),
        outcome,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="for each target")
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of {', '.join(TARGETS)}; all if none is given")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    results = []
    for target in given.targets or TARGETS:
        print(f"{target}: {given.seconds} s ...", flush=True)
        results.append(fuzz(target, given.seconds))
    print(f"\n{'target':<14}{'runs':>12}{'a second':>10}{'MiB':>7}  outcome")
    for result in results:
        print(f"{result.target:<14}{result.runs:>12}{result.a_second:>10}{result.memory:>7}  {result.outcome}")
    return int(any(result.outcome != "nothing found" for result in results))


if __name__ == "__main__":
    sys.exit(main())
