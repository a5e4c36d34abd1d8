"""`python -m bench.imports`: what `import farprop.rpc` and `import farprop.compat` add to `import torch`.

Each import runs in a fresh process, in turns. Bytecode is kept in a directory of its own and written before the first
measurement, as an installer does it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from statistics import median

from bench import machine
from bench.report import render
from bench.rounds import p99

BASE = "import torch"
# The statements, and the most that each may take: its time over that of `import torch`.
STATEMENTS = {BASE: 1.0, "import torch, farprop.rpc": 1.1, "import farprop.compat": 1.15}
ROUNDS = 15

Sample = tuple[float, float]  # wall-clock and CPU microseconds of one process


def rows(samples: Mapping[str, Sequence[Sample]]) -> list[list[str]]:
    """The rows of the table: a statement each, compared with the first one.

    The ratios are of medians: an import is one sample, so a pair of them is compared by chance.
    """
    walls = {statement: [wall for wall, _ in each] for statement, each in samples.items()}
    cpus = {statement: median(cpu for _, cpu in each) for statement, each in samples.items()}
    table = []
    for statement, most in STATEMENTS.items():
        ratio = median(walls[statement]) / median(walls[BASE])
        times = [median(walls[statement]), p99(walls[statement]), cpus[statement]]
        ratios = [f"{ratio:.3f}", f"{cpus[statement] / cpus[BASE]:.3f}"]
        verdict = ["", ""] if statement == BASE else [f"{most:.2f}", "yes" if ratio <= most else "no"]
        table.append([statement, *(f"{time / 1e3:,.0f}" for time in times), *ratios, *verdict])
    return table


def _measure(statement: str, env: Mapping[str, str]) -> Sample:
    """Run one fresh process from its start to its end."""
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", statement], env=env)
    _, status, used = os.wait4(child.pid, 0)
    wall = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"`{statement}` ended with {child.returncode}")
    return wall * 1e6, (used.ru_utime + used.ru_stime) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.imports", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"processes of each kind (default {ROUNDS})")
    options = parser.parse_args()
    print(machine.describe(machine.facts()))
    samples: dict[str, list[Sample]] = {statement: [] for statement in STATEMENTS}
    with tempfile.TemporaryDirectory() as directory:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": directory}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for statement in STATEMENTS:
            _measure(statement, env)
        for number in range(options.rounds):
            # The order rotates: the machine may be in another state after each.
            order = list(STATEMENTS)
            for statement in order[number % len(order) :] + order[: number % len(order)]:
                samples[statement].append(_measure(statement, env))
    header = ["", "ms", "p99", "CPU ms", "ms/torch", "CPU/torch", "at most", "reached"]
    print(render(header, rows(samples)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
