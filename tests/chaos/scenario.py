"""One scenario: a job, a fault and a seed. It starts the workers, breaks them, and checks what must hold."""

from __future__ import annotations

import contextlib
import io
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos import jobs
from tests.chaos.faults import FAULTS, Event, draw_events
from tests.chaos.jobs import JOBS, Findings, Setting
from tests.chaos.operations import Operation, Outcome
from tests.support import leaks
from tests.support.workers import Cluster, Handle, processes

PAIRS = tuple((fault, job) for fault in FAULTS for job in JOBS if job != "ddp" or fault not in ("flood", "restart"))
_RUN_SECONDS = 4.0
_STUCK_SECONDS = 60.0  # far more than the deadlines of all operations that can be under way
_PROMISE = 1.0  # seconds after its deadline at which an operation must have ended
_FILE_LIMIT = 32 << 10  # shared memory is never as small

Stop = tuple[int, float, float]  # a rank, and from when to when it was stopped


@dataclass
class Report:
    """What a scenario has shown."""

    fault: str
    job: str
    seed: int
    operations: list[Operation] = field(default_factory=list)
    slowest: float = 0.0  # seconds after its deadline at which the slowest operation ended
    detected: list[float] = field(default_factory=list)  # seconds from the fault to an error, on each survivor
    violations: list[str] = field(default_factory=list)
    output: str = ""  # what the workers wrote

    @property
    def command(self) -> str:
        """How to run it again."""
        return f"python -m tests.chaos --seed {self.seed} --only {self.fault}/{self.job} --count 1"


def run_scenario(fault: str, job: str, seed: int, grace: float) -> Report:
    """Run a scenario, and check it."""
    report = Report(fault, job, seed)
    before = leaks.snapshot()
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        scenario = _Scenario(Setting(job, fault, seed, JOBS[job][1], directory))
        output = io.StringIO()  # what the workers wrote
        try:
            with contextlib.redirect_stderr(output):
                scenario.run()
        except Exception as error:
            # Something hangs, has died by itself, has left something behind, or raised outside of its operations.
            report.violations.append("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
        report.operations = [one for found in scenario.findings for one in found.operations]
        check_operations(report, scenario.stops, grace)
        if job == "server":
            report.violations += check_pushes(scenario.findings)
        report.detected = _detection_times(report.operations, scenario)
    report.violations += [f"left behind: {text}" for text in leaks.left_behind(before)]
    report.output = output.getvalue()
    return report


class _Scenario:
    """The driver's side of a scenario."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.events = draw_events(setting.fault, setting.size, _RUN_SECONDS, random.Random(setting.seed))
        self.findings: list[Findings] = []
        self.hits: list[tuple[str, int, float]] = []  # faults, the ranks that they hit, and when
        self.stops: list[Stop] = []
        self._places = list(range(setting.size))  # the process of each rank
        self._dead: set[int] = set()
        self._runs: list[Handle] = []
        self._floods: list[Handle] = []

    def run(self) -> None:
        ranks = range(self.setting.size)
        spare = self.setting.fault == "restart"
        with processes(self.setting.size + spare, timeout=_STUCK_SECONDS) as job:
            for event in self.events:
                if event.at == 0:
                    self._hit(job, event, until=0)
            _wait_for([job.start(rank, jobs.begin, self.setting, rank) for rank in ranks])
            began = time.monotonic()
            until = began + _RUN_SECONDS
            self._runs = [job.start(rank, jobs.run, until) for rank in ranks]
            for event in self.events:
                if event.at > 0:
                    time.sleep(max(0.0, began + event.at - time.monotonic()))
                    self._hit(job, event, until)
            survivors = [rank for rank in ranks if rank not in self._dead]
            _wait_for([self._runs[rank] for rank in survivors])
            self.findings += [Findings(operations) for operations in _wait_for(self._floods)]
            self._on_each(job, survivors, jobs.finish, survivors)
            self.findings += self._on_each(job, survivors, jobs.end)

    def _on_each(self, job: Cluster, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> list[Any]:
        return _wait_for([job.start(self._places[rank], function, *args) for rank in ranks])

    def _hit(self, job: Cluster, event: Event, until: float) -> None:
        rank, place = event.rank, self._places[event.rank]
        if rank in self._dead:
            return
        self.hits.append((event.fault, rank, time.monotonic()))
        match event.fault:
            case "kill":
                self._dead.add(rank)
                job.kill(place)
            case "stop":
                job.signal(place, signal.SIGSTOP)
                time.sleep(event.seconds)
                job.signal(place, signal.SIGCONT)
                self.stops.append((rank, self.hits[-1][-1], time.monotonic()))
            case "interrupt":
                job.signal(place, signal.SIGINT)
            case "restart":
                job.kill(place)
                time.sleep(event.seconds)
                self._places[rank] = self.setting.size
                self._runs[rank] = job.start(self.setting.size, jobs.begin_and_run, self.setting, rank, until)
            case "flood":
                self._floods.append(job.start(place, jobs.flood, rank, f"worker{event.target}", event.calls))
            case "no-shm":
                _, hard = resource.prlimit(job.pid(place), resource.RLIMIT_FSIZE)
                resource.prlimit(job.pid(place), resource.RLIMIT_FSIZE, (_FILE_LIMIT, hard))


def _wait_for(handles: Sequence[Handle]) -> list[Any]:
    return [handle.result() for handle in handles]


def check_operations(report: Report, stops: Sequence[Stop], grace: float) -> None:
    """Each operation ended in time, and in a right value or an error that the fault explains."""
    for operation in report.operations:
        what = f"{operation.kind!r} of rank {operation.rank}"
        late = _running_seconds(operation, stops) - operation.deadline
        report.slowest = max(report.slowest, late)
        if late > _PROMISE + grace:
            report.violations.append(
                f"{what} ended {late:.2f} s after its deadline of {operation.deadline:g} s: "
                f"{operation.error or operation.outcome.value}"
            )
        if operation.outcome in (Outcome.WRONG, Outcome.UNEXPECTED):
            report.violations.append(f"{what}: {operation.outcome.value} {operation.error}\n{operation.detail}")


def _running_seconds(operation: Operation, stops: Sequence[Stop]) -> float:
    """The seconds that an operation took, without those in which its process was stopped."""
    stopped = sum(
        max(0.0, min(operation.ended, end) - max(operation.began, start))
        for rank, start, end in stops
        if rank == operation.rank
    )
    return operation.ended - operation.began - stopped


def check_pushes(findings: Sequence[Findings]) -> list[str]:
    """Compare the server's ledger with what the trainers know. A killed server's ledger is lost with it."""
    problems = [problem for found in findings for problem in found.problems]
    applied = {found.server: set(found.applied) for found in findings if found.server}
    for found in findings:
        for server, acknowledged in found.acknowledged.items():
            if server in applied and (lost := set(acknowledged) - applied[server]):
                problems.append(f"pushes that were acknowledged and not applied: {sorted(lost)}")
        if ran := set(found.refused) & set().union(*applied.values()):
            problems.append(f"pushes that were applied, although their errors say that they did not run: {sorted(ran)}")
    return problems


def _detection_times(operations: Sequence[Operation], scenario: _Scenario) -> list[float]:
    """From the fault, or from the start of the failed operation if that was later, to the error."""
    if scenario.setting.fault == "interrupt":
        return [
            min(one.ended - hit for _, rank, hit in scenario.hits if rank == one.rank and hit <= one.ended)
            for one in operations
            if one.outcome is Outcome.INTERRUPTED
        ]
    kills = [hit for fault, _, hit in scenario.hits if fault in ("kill", "restart")]
    if scenario.setting.fault == "mixed" or not kills:
        return []
    (hit,) = kills
    first: dict[int, Operation] = {}
    for one in sorted(operations, key=lambda one: one.ended):
        if one.outcome is Outcome.ERROR and one.ended >= hit:
            first.setdefault(one.rank, one)
    return [one.ended - max(hit, one.began) for one in first.values()]
