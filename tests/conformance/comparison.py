"""Results on torch and on farprop, side by side. Each side runs in its own process."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build"
RESULTS = ("passed", "failed", "skipped", "excluded")

Results = dict[str, dict[str, str]]


def results_of(on: str) -> Path:
    return BUILD / f"conformance-{on}.json"


def side_by_side(arguments: list[str]) -> int:
    """Run the tests on torch and on farprop, print a table, and return the exit code of the run on farprop."""
    found: dict[str, Results] = {}
    code = 0
    for on in ("torch", "farprop"):
        results_of(on).unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.conformance", *arguments, "--on", on]
        code = subprocess.run(command, check=False).returncode
        if not results_of(on).exists():
            sys.exit(f"no results on {on}")
        found[on] = json.loads(results_of(on).read_text())["tests"]
    print(table(found["torch"], found["farprop"]))
    return code


def table(on_torch: Results, on_farprop: Results) -> str:
    classes = sorted({name.partition(".")[0] for name in on_torch})
    width = max(map(len, [*classes, "total"]))
    cells = "".join(f"{result:>10}" for result in RESULTS)
    lines = [f"{'':{width}}{'on torch':>40}{'on farprop':>40}", f"{'':{width}}{cells}{cells}"]
    for class_ in [*classes, "total"]:
        row = f"{class_:{width}}"
        for results in (on_torch, on_farprop):
            prefix = "" if class_ == "total" else f"{class_}."
            counts = Counter(test["result"] for name, test in results.items() if name.startswith(prefix))
            row += "".join(f"{counts[result]:10}" for result in RESULTS)
        lines.append(row)
    lines += ["", "different:"]
    for name, theirs in on_torch.items():
        ours = on_farprop[name]
        if ours["result"] != theirs["result"]:
            sides = (f"{side['result']} on {on}" for side, on in ((theirs, "torch"), (ours, "farprop")))
            lines.append(f"  {name}: {', '.join(sides)}: {ours['detail'] or theirs['detail']}")
    return "\n".join(lines)
