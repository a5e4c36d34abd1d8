"""``python -m tests.conformance``: PyTorch's own tests on farprop."""

import argparse
import fnmatch
import json
import os
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conformance.comparison import BUILD, RESULTS, results_of, side_by_side

if TYPE_CHECKING:
    from tests.conformance.runner import Outcome

HERE = Path(__file__).parent


def main() -> int:
    options = _options()
    if options.on == "both":
        return side_by_side(sys.argv[1:])
    _prepare_environment(options.timeout)

    # Here, after the environment is set: torch reads it when it is imported.
    from tests.conformance.runner import EXCLUDED, FAILED, Outcome, Runner
    from tests.conformance.suites import load

    suites = load(options.on)
    every = [f"{name}.{test}" for name, suite in suites.items() for test in suite.names]
    names = every
    if options.required:
        names = _select(names, _lines(HERE / "required.txt"))
    if options.only:
        names = _select(names, options.only)
    if options.list:
        print("\n".join(names))
        return 0

    excluded = _exclusions(every) if options.on == "farprop" else {}
    outcomes = [Outcome(name, EXCLUDED, detail=excluded[name]) for name in names if name in excluded]
    wanted = [name for name in names if name not in excluded]

    def report(outcome: Outcome) -> None:
        outcomes.append(outcome)
        done = len(outcomes) - sum(name in excluded for name in names)
        line = f"[{done}/{len(wanted)}] {outcome.result:7} {outcome.seconds:6.1f} s  {outcome.name}"
        print(line + (f"  {outcome.detail}" if outcome.result == FAILED else ""), flush=True)

    started = time.monotonic()
    logs = BUILD / "conformance" / options.on
    runner = Runner(suites, jobs=options.jobs, timeout=options.timeout, logs=logs)
    runner.run(wanted, report)
    seconds = time.monotonic() - started

    outcomes.sort(key=lambda outcome: names.index(outcome.name))
    _write(options.on, seconds, outcomes)
    _print_table(outcomes)
    print(f"on {options.on}, {seconds:.0f} s, logs in {os.path.relpath(logs)}")
    counts = Counter(outcome.result for outcome in outcomes)
    print(", ".join(f"{counts[result]} {result}" for result in RESULTS[:3]))
    return 1 if counts[FAILED] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    add = parser.add_argument
    add("--only", nargs="+", metavar="CLASS[.TEST]", help="these classes or tests; * and ? match anything")
    add("--required", action="store_true", help="the tests of required.txt, which must pass in CI")
    add(
        "--on",
        choices=("farprop", "torch", "both"),
        default="farprop",
        help="torch: on its own RPC, Gloo and DDP, unredirected; both: one after the other, and compare",
    )
    add(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="tests at a time, of four processes each (%(default)s)",
    )
    add("--timeout", type=float, default=120.0, help="seconds until a test is killed (%(default)s)")
    add("--list", action="store_true", help="name the tests and run none")
    return parser.parse_args()


def _prepare_environment(timeout: float) -> None:
    # Many processes on few cores; also keeps libraries from starting threads before we fork.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # PyTorch's own limit comes first, because it collects the tracebacks of the ranks that hang.
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", str(int(max(5, timeout - 20))))


def _lines(path: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def _select(names: list[str], patterns: Iterable[str]) -> list[str]:
    """The tests that match a pattern; a pattern that matches none is a mistake."""
    selected: set[str] = set()
    for pattern in patterns:
        matching = [name for name in names if fnmatch.fnmatchcase(name, pattern if "." in pattern else f"{pattern}.*")]
        if not matching:
            sys.exit(f"no test matches {pattern!r}")
        selected.update(matching)
    return [name for name in names if name in selected]


def _exclusions(every: list[str]) -> dict[str, str]:
    with (HERE / "exclusions.toml").open("rb") as file:
        excluded: dict[str, str] = tomllib.load(file).get("excluded", {})
    for name, reason in excluded.items():
        if name not in every:
            sys.exit(f"exclusions.toml: there is no test {name}")
        if not reason.strip():
            sys.exit(f"exclusions.toml: {name} has no reason")
    return excluded


def _write(on: str, seconds: float, outcomes: Iterable["Outcome"]) -> None:
    tests = {
        outcome.name: {
            "result": outcome.result,
            "seconds": round(outcome.seconds, 2),
            "detail": outcome.detail,
        }
        for outcome in outcomes
    }
    content = {"on": on, "seconds": round(seconds, 1), "tests": tests}
    results_of(on).write_text(json.dumps(content, indent=1) + "\n")


def _print_table(outcomes: Iterable["Outcome"]) -> None:
    outcomes = list(outcomes)
    rows: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.name.partition(".")[0], Counter())[outcome.result] += 1
    rows["total"] = sum(rows.values(), Counter())
    width = max(map(len, rows))
    print(f"\n{'':{width}}" + "".join(f"{result:>10}" for result in RESULTS))
    for name, counts in rows.items():
        print(f"{name:{width}}" + "".join(f"{counts[result]:10}" for result in RESULTS))
    for result in ("failed", "excluded"):
        listed = [outcome for outcome in outcomes if outcome.result == result]
        if listed:
            print(f"\n{result}:")
        for outcome in listed:
            print(f"  {outcome.name}: {outcome.detail}")
    print()


if __name__ == "__main__":
    sys.exit(main())
