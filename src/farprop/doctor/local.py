"""All checks of this host, and a trial: two workers are started, and call each other."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from farprop.config import Settings
from farprop.doctor import checks, facts
from farprop.doctor.load import busy_cores
from farprop.doctor.results import Result, Status
from farprop.doctor.speed import Speed
from farprop.protocol.json_decoding import decode

_TRIAL_SECONDS = 90.0


def check_host(workers: int = 1, towards: str | None = None) -> tuple[list[Result], Settings | None]:
    """Run the checks of this host that start nothing.

    Args:
        workers: how many workers the job has.
        towards: the host of the job's store, if it is known.

    Returns:
        Their results, and the settings; None if those are invalid.
    """
    variables = facts.variables()
    found = [checks.versions(facts.versions()), checks.variables(variables), checks.cores(facts.cores())]
    settings = None if variables.problem else Settings.from_env()
    if settings is not None:
        network = facts.network(settings) if towards is None else facts.network(settings, towards)
        result = checks.network(network)
        # A job that has its store's address needs no names, and its addresses are compared with those of the others.
        if towards is None or result.status is Status.FAILURE:
            found.append(result)
        if not network.problem:
            found.append(checks.ports(facts.ports(settings, network.address)))
        found += [checks.secrecy(facts.secrecy(settings)), checks.tls(facts.tls(settings))]
    found += [checks.memory(facts.memory()), checks.files(facts.files(), workers), checks.clock(facts.clock())]
    return found, settings


def try_calls(settings: Settings) -> list[Result]:
    """Start two workers that call themselves and each other, by all transports that the settings allow."""
    busy = busy_cores()
    transports = ["auto", "tcp"] if settings.transport == "auto" else ["tcp"]
    outcome = _run_trial(transports)
    return checks.calls(outcome.speeds, outcome.problem, busy, os.cpu_count() or 1)


@dataclass(frozen=True)
class _Outcome:
    speeds: list[Speed]
    problem: str


def _run_trial(transports: list[str]) -> _Outcome:
    # Ports have a check of their own, and the range may be meant for one worker a host.
    env = {name: value for name, value in os.environ.items() if name != "FARPROP_PORT_RANGE"}
    with tempfile.TemporaryDirectory() as directory:
        workers = [_start(rank, directory, transports, env) for rank in range(2)]
        try:
            return _outcome(workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()


def _start(rank: int, directory: str, transports: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "farprop.doctor.local_worker", str(rank), directory, *transports]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _outcome(workers: list[subprocess.Popen[str]]) -> _Outcome:
    end = time.monotonic() + _TRIAL_SECONDS
    answer = ""
    for rank, worker in enumerate(workers):
        try:
            printed, errors = worker.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return _Outcome([], f"they have not ended within {_TRIAL_SECONDS:.0f} s")
        if worker.returncode:
            last = errors.strip().splitlines()[-1:] or ["it wrote nothing"]
            return _Outcome([], f"the worker of rank {rank} ended with the code {worker.returncode}: {last[0]}")
        answer = answer or printed
    try:
        return decode(answer.strip().rpartition("\n")[2], _Outcome)
    except msgspec.MsgspecError as error:
        return _Outcome([], f"rank 0 printed something else than its results ({error})")
