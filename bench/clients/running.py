"""One run of a program on one side, with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from bench.clients.programs.job import RESULT
from bench.driver import ROOT

SIDES = ("torch", "farprop")


@dataclass(frozen=True)
class Run:
    """The outcome of a run: why it failed (empty: it did not), its values, and the seconds of its loop and in all."""

    failure: str
    seconds: float = 0.0
    whole_seconds: float = 0.0
    values: Any = None


def run(program: str, side: str, python: str, limit: float, tiny: bool = False) -> Run:
    """Run ``bench.clients.programs.<program>``."""
    module = f"bench.clients.programs.{program}"
    command = [python, "-W", "ignore"]
    command += ["-m", "farprop.compat", "-m", module] if side == "farprop" else ["-m", module]
    if tiny:
        command.append("--tiny")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        # Its own session, so that its workers can be ended with it.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        whole = time.perf_counter() - began
        _end_session(process.pid)
        process.wait()
        output.seek(0)
        errors.seek(0)
        return read(code, output.read(), errors.read(), limit, whole)


def read(code: int | None, output: str, errors: str, limit: float, whole_seconds: float) -> Run:
    """The outcome of a run, from its exit code (None: it was killed at the time limit) and its output."""
    if code is None:
        return Run(f"hangs (ended after {limit:g} s)")
    results = [line.removeprefix(RESULT) for line in output.splitlines() if line.startswith(RESULT)]
    if code or not results:
        return Run(reason(errors) or f"exit code {code}, without a result")
    result = json.loads(results[-1])
    return Run("", result["seconds"], whole_seconds, result["values"])


def reason(errors: str) -> str:
    """The first exception in the output of a program: later ones often follow from it."""
    lines = errors.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            ends = [end for end in lines[number + 1 :] if end and not end.startswith((" ", "\t"))]
            if ends:
                return ends[0][:200]
    return lines[-1][:200] if lines else ""


def _end_session(leader: int) -> None:
    """End the workers that a program left behind."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass
