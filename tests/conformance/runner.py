"""Runs a few tests at a time, each in its own process, which is forked from this one."""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from tests.conformance.ranks import die_with_parent
from tests.conformance.suites import Suite

PASSED, FAILED, SKIPPED, EXCLUDED = "passed", "failed", "skipped", "excluded"

_fork = multiprocessing.get_context("fork")
# It asserts that a pass hangs if a result is unused, which is true only in FAST mode.
_FAST = frozenset({"DistAutogradTest.test_backward_unused_send_function"})


@dataclass
class Outcome:
    name: str
    result: str
    seconds: float = 0.0
    detail: str = ""


@dataclass
class _Job:
    name: str
    process: ForkProcess
    answer: Connection
    started: float
    scratch: Path


class Runner:
    """Runs each test under a hard time limit, after which its whole process group is killed."""

    def __init__(
        self,
        suites: dict[str, Suite],
        *,
        jobs: int,
        timeout: float,
        logs: Path,
    ) -> None:
        self._suites = suites
        self._jobs = jobs
        self._timeout = timeout
        self._logs = logs
        self._running: list[_Job] = []

    def run(self, names: Iterable[str], report: Callable[[Outcome], None]) -> None:
        shutil.rmtree(self._logs, ignore_errors=True)
        self._logs.mkdir(parents=True)
        waiting = list(names)[::-1]
        # SIGTERM runs the clean-up below, as Ctrl-C does.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
        # Tests leave rendezvous files behind, so they get their own directory.
        with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
            try:
                while waiting or self._running:
                    while waiting and len(self._running) < self._jobs:
                        name = waiting.pop()
                        error = self._suite(name).import_error
                        if error is None:
                            self._start(name, Path(scratch) / name)
                        else:
                            report(Outcome(name, FAILED, detail=_last_line(error)))
                            self._log(name).write_text(error)
                    for outcome in self._finished():
                        report(outcome)
            finally:
                for job in self._running:
                    self._end(job)

    def _suite(self, name: str) -> Suite:
        return self._suites[name.partition(".")[0]]

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _start(self, name: str, scratch: Path) -> None:
        # A lock that another thread holds during the fork would stay locked in the child.
        if len(os.listdir("/proc/self/task")) != 1:
            raise RuntimeError("the conformance runner has more than one thread and can't fork safely")
        scratch.mkdir()
        answer, theirs = _fork.Pipe(duplex=False)
        process = _fork.Process(target=self._child, args=(name, scratch, theirs), name=name)
        process.start()
        theirs.close()
        self._running.append(_Job(name, process, answer, time.monotonic(), scratch))

    def _finished(self) -> list[Outcome]:
        """Wait for the next tests to end or to run out of time."""
        if not self._running:
            return []
        deadline = min(job.started for job in self._running) + self._timeout
        ready = wait([job.answer for job in self._running], max(0.0, deadline - time.monotonic()))
        outcomes = []
        for job in list(self._running):
            seconds = time.monotonic() - job.started
            if job.answer in ready:
                result, detail = self._receive(job)
            elif seconds >= self._timeout:
                result, detail = FAILED, f"killed after {self._timeout:.0f} s"
            else:
                continue
            self._end(job)
            self._running.remove(job)
            outcomes.append(Outcome(job.name, result, seconds, detail))
        return outcomes

    def _receive(self, job: _Job) -> tuple[str, str]:
        try:
            result, detail = job.answer.recv()
        except EOFError:
            return FAILED, "the test's process died"
        return result, detail

    def _end(self, job: _Job) -> None:
        # Before the join: until then the process is at least a zombie, so its pid can't be reused.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid or 0, signal.SIGKILL)
        job.process.join()
        job.process.close()
        job.answer.close()
        shutil.rmtree(job.scratch, ignore_errors=True)

    def _child(self, name: str, scratch: Path, answer: Connection) -> None:
        os.setsid()
        die_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for job in self._running:
            job.answer.close()
        tempfile.tempdir = os.environ["TMPDIR"] = str(scratch)
        if name in _FAST:
            os.environ["FARPROP_AUTOGRAD_MODE"] = "fast"
        log = os.open(self._log(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        answer.send(_run_test(self._suite(name).build(), name.partition(".")[2]))


def _run_test(class_: type[unittest.TestCase], method: str) -> tuple[str, str]:
    result = unittest.TestResult()
    class_(method).run(result)
    problems = [text for _, text in result.errors + result.failures]
    if problems or result.unexpectedSuccesses or not result.testsRun:
        text = "\n".join(problems) or "did not run, or passed though it was expected to fail"
        print(text, file=sys.stderr, flush=True)
        return FAILED, _last_line(text)
    if result.skipped:
        return SKIPPED, result.skipped[0][1]
    return PASSED, ""


def _last_line(text: str) -> str:
    """The line that says what went wrong, in the first rank that failed."""
    first, *_ = re.split(r"(?m)^Process [1-9]\d* exited with error code", text.partition("Process 0 exited")[2] or text)
    lines = [line for line in first.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return (errors or lines or ["no message"])[-1].strip()
