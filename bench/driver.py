"""The parent's side: starts the processes of each side, asks them to measure, and stops them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 120
STOP_SECONDS = 20

# One intra-op thread on each side: this compares calls, not torch's thread pools.
BASE_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class BenchError(RuntimeError):
    """A side could not start, or could not run a case."""


class Side(Protocol):
    """One side of a comparison: it can measure a round."""

    def measure(self, case: str, samples: int, warmup: int, seconds: float) -> list[float]: ...


class Child:
    """A process that runs `bench.channel.serve`."""

    def __init__(
        self,
        module: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        patience: float = 180,
        prefix: Sequence[str] = (),
    ) -> None:
        inherited = {key: value for key, value in os.environ.items() if key != "FARPROP_TRANSPORT"}
        self.name = " ".join([module, *args])
        self.patience = patience
        self.process = subprocess.Popen(
            [*prefix, python, "-m", module, *args],
            cwd=ROOT,
            env={**inherited, **BASE_ENV, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> None:
        self.receive(START_SECONDS)

    def measure(self, case: str, samples: int, warmup: int, seconds: float) -> list[float]:
        """One round of up to `samples` and about `seconds`, in µs a sample."""
        return _times(self._ask({"case": case, "samples": samples, "warmup": warmup, "seconds": seconds}))

    def repeat(self, case: str, count: int) -> None:
        """Run a case `count` times without keeping times."""
        self._ask({"case": case, "samples": count, "warmup": 0, "untimed": True})

    def request_stop(self) -> None:
        """Tell the child to stop, and don't wait for it: two workers have to shut down together."""
        assert self.process.stdin is not None
        self.thaw()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def join(self) -> None:
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{self.name} did not stop in {STOP_SECONDS} s and was killed", file=sys.stderr)
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        self.send(command)
        return self.receive(self.patience)

    def send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise BenchError(f"{self.name} is gone") from error

    def receive(self, patience: float) -> dict[str, Any]:
        stdout = self.process.stdout
        assert stdout is not None
        # a reply is one line written at once, so readability means a whole line
        if not select.select([stdout], [], [], patience)[0]:
            self.process.kill()
            raise BenchError(f"{self.name} did not answer in {patience:.0f} s")
        line = stdout.readline()
        if not line:
            raise BenchError(f"{self.name} ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer


def _answer_or_error(child: Child) -> dict[str, Any] | BenchError:
    """The answer is read from every child, also if one of them failed: else the next question would get it."""
    try:
        return child.receive(child.patience)
    except BenchError as error:
        return error


def _times(answer: dict[str, Any]) -> list[float]:
    return [float(sample) for sample in answer["us"]]


@dataclass(frozen=True)
class Site:
    """Where the processes of a side run, and the module of the cases that they know."""

    cases: str = "bench.cases"
    address: str = "127.0.0.1"
    """Where rank 0 is found."""
    prefixes: Sequence[Sequence[str]] | None = None
    """For each rank, the words before its command, such as those that enter a network namespace."""

    def children(self, module: str, package: str, size: int, env: Mapping[str, str]) -> list[Child]:
        port = str(free_port())
        return [
            Child(
                *(module, package, str(rank), str(size), self.address, port, self.cases),
                env=env,
                prefix=self.prefixes[rank] if self.prefixes else (),
            )
            for rank in range(size)
        ]


HERE = Site()


class Workers:
    """The workers of one rpc package: w0 measures and calls the others."""

    def __init__(self, package: str, env: Mapping[str, str], count: int = 2, site: Site = HERE) -> None:
        self.children = site.children("bench.rpc_side", package, count, env)
        self.measure = self.children[0].measure
        self.repeat = self.children[0].repeat


class Ranks:
    """The ranks of one process group."""

    def __init__(
        self,
        package: str,
        size: int,
        env: Mapping[str, str] | None = None,
        site: Site = HERE,
    ) -> None:
        self.children = site.children("bench.group_side", package, size, env or {})

    def measure(self, case: str, samples: int, warmup: int, seconds: float) -> list[float]:
        """Measure a round; return rank 0's times. All ranks take the same number of samples, so none may stop early."""
        del seconds
        return self.measure_all(case, samples, warmup)[0]

    def measure_all(self, case: str, samples: int, warmup: int) -> list[list[float]]:
        """Measure a round; return the times of each rank."""
        for child in self.children:
            child.send({"case": case, "samples": samples, "warmup": warmup, "seconds": math.inf})
        answers = [_answer_or_error(child) for child in self.children]
        for answer in answers:
            if isinstance(answer, BenchError):
                raise answer
        return [_times(answer) for answer in answers if not isinstance(answer, BenchError)]


class Dormant:
    """Workers or a group that is frozen except while it measures.

    Waiting is not enough: a thread of torch's (TP_SHM_reactor) polls all the time in every idle worker, so an
    idle pair takes two cores from the side that is measured. Both sides are frozen alike.
    """

    def __init__(self, processes: Workers | Ranks) -> None:
        self._processes = processes
        self._each(Child.freeze)

    def measure(self, case: str, samples: int, warmup: int, seconds: float) -> list[float]:
        self._each(Child.thaw)
        try:
            return self._processes.measure(case, samples, warmup, seconds)
        finally:
            self._each(Child.freeze)

    def _each(self, action: Callable[[Child], None]) -> None:
        for child in self._processes.children:
            action(child)


def start(groups: Sequence[Sequence[Child]]) -> None:
    """Wait until processes that were started together are ready."""
    for child in (child for group in groups for child in group):
        child.wait_ready()


def stop(groups: Sequence[Sequence[Child]]) -> None:
    children = [child for group in groups for child in group]
    for child in children:
        child.request_stop()
    for child in children:
        child.join()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
