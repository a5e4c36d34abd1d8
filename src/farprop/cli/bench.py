"""The command ``bench``: farprop and torch's own RPC side by side, on this machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from farprop import __version__
from farprop.cli.tables import table
from farprop.doctor.load import busy_cores
from farprop.errors import FarpropError, UsageError

_CASES = {
    "empty": "empty call",
    "small": "call with small tensors",
    "large": "10 MB there and back",
    "backward": "forward and backward, one hop",
}
_SIDES = {"farprop": "farprop", "torch": "torch.distributed"}
_SAMPLE_SECONDS = 0.3
_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_EPILOG = """\
Two workers of each side are started on this host. The sides take turns, and
one is stopped (SIGSTOP) while the other is measured. Times are medians; RATIO
says how much longer torch's take. It runs for about 20 seconds. For numbers
that mean something, let nothing else run meanwhile.

exit codes: 0 done; 1 a side failed; 2 wrong usage

examples:
  farprop bench
  farprop bench --rounds 10 --json
"""


def add(commands: Any) -> None:
    """Add this command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="how fast calls are here, beside torch.distributed.rpc",
        description="Measure farprop and torch.distributed.rpc side by side, on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each side is measured (3)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.rounds < 1:
        raise UsageError(f"--rounds {arguments.rounds} must be 1 or more.")
    import torch

    times: dict[tuple[str, str], list[float]] = {(case, side): [] for case in _CASES for side in _SIDES}
    busy = []
    with contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(_started(name, package)) for name, package in _SIDES.items()}
        for side in sides.values():
            side.await_start()
        for number in range(arguments.rounds):
            busy.append(busy_cores())
            for case in _CASES:
                # Each begins as often as the other.
                for name in sorted(sides, reverse=bool(number % 2)):
                    times[case, name] += sides[name].measure(case)
    results = [_compared(case, times) for case in _CASES]
    machine = {
        "farprop": __version__,
        "torch": str(torch.__version__),
        "cores": len(os.sched_getaffinity(0)),
        "busy_cores": round(median(busy), 2),
    }
    if arguments.json:
        print(json.dumps({**machine, "rounds": arguments.rounds, "cases": results}, indent=1))
    else:
        _show(machine, results)
    return 0


def _compared(case: str, times: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {"case": _CASES[case]}
    for side in _SIDES:
        samples = sorted(times[case, side])
        found[side] = {
            "median_us": round(median(samples), 1),
            "p99_us": round(samples[int(0.99 * (len(samples) - 1))], 1),
            "samples": len(samples),
        }
    found["ratio"] = round(found["torch"]["median_us"] / found["farprop"]["median_us"], 2)
    return found


def _show(machine: dict[str, Any], results: list[dict[str, Any]]) -> None:
    rows = [
        (
            result["case"],
            *(_microseconds(result[side][which]) for side in _SIDES for which in ("median_us", "p99_us")),
            f"{result['ratio']:.2f}",
        )
        for result in results
    ]
    print(table(("CASE", "FARPROP", "P99", "TORCH", "P99", "RATIO"), rows))
    print(
        f"\nfarprop {machine['farprop']}, torch {machine['torch']}; "
        f"other work kept {machine['busy_cores']:.1f} of {machine['cores']} cores busy."
    )
    if machine["busy_cores"] > machine["cores"] / 4:
        print("That is much: the numbers would be others on an idle machine.")


def _microseconds(count: float) -> str:
    return f"{count:.0f} µs" if count < 1000 else f"{count / 1000:.1f} ms"


class _Side:
    """The two workers of a side. They are stopped but while they measure: torch's are busy also if nobody calls."""

    def __init__(self, name: str, package: str) -> None:
        self.name = name
        port = _free_port()
        self.workers: list[subprocess.Popen[str]] = []
        for rank in range(2):
            program = f"from farprop.cli.bench_worker import main; main({package!r}, {rank}, {port})"
            self.workers.append(
                subprocess.Popen(
                    [sys.executable, "-c", program],
                    # Its functions are not exposed, and one thread for operators: this compares calls.
                    env={**os.environ, "FARPROP_RESTRICTED": "0", "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def await_start(self) -> None:
        for worker in self.workers:
            self._read(worker, _START_SECONDS)
        self._signal(signal.SIGSTOP)

    def measure(self, case: str) -> list[float]:
        """Samples of a case, in microseconds."""
        self._signal(signal.SIGCONT)
        measuring = self.workers[0]
        assert measuring.stdin is not None
        print(case, _SAMPLE_SECONDS, file=measuring.stdin, flush=True)
        samples: list[float] = json.loads(self._read(measuring, _START_SECONDS))
        self._signal(signal.SIGSTOP)
        return samples

    def _read(self, worker: subprocess.Popen[str], seconds: float) -> str:
        assert worker.stdout is not None
        if not select.select([worker.stdout], [], [], seconds)[0]:
            raise FarpropError(f"A worker of the side {self.name} has not answered within {seconds:.0f} s.")
        line = worker.stdout.readline()
        if not line:
            last = worker.communicate()[1].strip().splitlines()[-1:] or ["it wrote nothing"]
            raise FarpropError(f"A worker of the side {self.name} has ended: {last[0]}")
        return line

    def _signal(self, number: int) -> None:
        for worker in self.workers:
            worker.send_signal(number)

    def stop(self) -> None:
        """Let the workers end as programs do, and kill those that don't."""
        self._signal(signal.SIGCONT)
        end = time.monotonic() + _STOP_SECONDS
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.close()
            worker.stdin = None
        for worker in self.workers:
            try:
                worker.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.communicate()


@contextlib.contextmanager
def _started(name: str, package: str) -> Iterator[_Side]:
    side = _Side(name, package)
    try:
        yield side
    finally:
        side.stop()


def _free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
