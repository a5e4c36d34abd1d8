"""`python -m bench.clients`: runs existing programs on torch and on farprop, and compares results and times."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import machine, venvs
from bench.clients import comparison
from bench.clients.comparison import Comparison
from bench.clients.running import SIDES, run
from bench.driver import ROOT, BenchError

OURS = ["parameter_server", "reinforcement", "split_rnn", "pipeline", "hybrid"]
# The versions in the table of docs/clients.md.
_TORCHRL = ["cloudpickle", "torchrl==0.14.1", "tensordict==0.14.3"]
THEIRS = {
    "torchrl_replay": _TORCHRL,
    "torchrl_collector": _TORCHRL,
    "pyg_features": ["cloudpickle", "torch_geometric==2.8.1"],
    # The last version whose pipelines use RPC; later ones use process groups.
    "pippy_forward": ["cloudpickle", "torchpippy==0.1.1"],
}
VENV = ROOT / "build" / "clients"
ROUNDS = 3
LIMIT = 180.0
TABLE = ROOT / "build" / "clients.md"


def interpreter(program: str) -> str:
    return str(venvs.python_with(VENV, THEIRS[program])) if program in THEIRS else sys.executable


def compare(program: str, rounds: int, limit: float) -> Comparison:
    """Run a program on torch and on farprop in turns, so that a disturbance of the machine hits both."""
    outcome = Comparison(program)
    try:
        python = interpreter(program)
    except BenchError as error:
        outcome.left_out = str(error)
        return outcome
    for _ in range(rounds):
        for side in SIDES:
            outcome.runs[side].append(run(program, side, python, limit))
        if all(outcome.runs[side][-1].failure for side in SIDES):
            break  # the program does not run on this machine
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds until a run counts as hanging")
    parser.add_argument("--only", action="append", choices=[*OURS, *THEIRS], help="may be given several times")
    parser.add_argument("--output", type=Path, default=TABLE, help="where to write the table")
    options = parser.parse_args()
    print(machine.describe(machine.facts()))
    others = machine.Others()
    outcomes = []
    for program in options.only or [*OURS, *THEIRS]:
        others.sample()
        outcomes.append(compare(program, options.rounds, options.limit))
        print(" ".join(outcomes[-1].row()), file=sys.stderr, flush=True)
    table = comparison.markdown(outcomes)
    print(f"{others}\n\n{table}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(table + "\n")
    return comparison.exit_code(outcomes)


if __name__ == "__main__":
    sys.exit(main())
