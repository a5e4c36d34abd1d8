"""One scenario: a job, a fault and a seed. It starts the workers, breaks them, and checks what must hold."""

from __future__ import annotations

import bisect
import contextlib
import heapq
import io
import itertools
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.chaos import jobs
from tests.chaos.faults import FAULTS, Event, draw_events, errors_of, faults_of, join_errors_of
from tests.chaos.flood import Flood
from tests.chaos.jobs import JOBS, Findings, Setting
from tests.chaos.operations import Operation, Outcome
from tests.chaos.site import Site
from tests.support import leaks
from tests.support.workers import Cluster, Handle, processes

PAIRS = tuple((fault, job) for fault in FAULTS for job in JOBS if fault in faults_of(job))
RUN_SECONDS = 4.0
_AFTER = 1.0
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


def run_scenario(fault: str, job: str, seed: int, grace: float, missing: Container[str] = ()) -> Report:
    """Run a scenario, and check it. Faults that are missing are left out of a mixture."""
    report = Report(fault, job, seed)
    before = leaks.snapshot()
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        scenario = _Scenario(fault, job, seed, directory, missing)
        output = io.StringIO()  # what the workers wrote
        try:
            with contextlib.redirect_stderr(output):
                scenario.run()
        except Exception as error:
            # Something hangs, has died by itself, has left something behind, or raised outside of its operations.
            report.violations.append("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
        report.operations = [one for found in scenario.findings for one in found.operations]
        check_operations(report, scenario.stops, grace)
        report.violations += scenario.problems
        if job == "server":
            report.violations += check_pushes(scenario.findings)
        report.detected = _detection_times(report.operations, scenario)
    report.violations += [f"left behind: {text}" for text in leaks.left_behind(before)]
    report.output = output.getvalue()
    return report


class _Scenario:
    """The driver's side of a scenario."""

    def __init__(self, fault: str, job: str, seed: int, directory: str, missing: Container[str]) -> None:
        size = JOBS[job][1]
        dice = random.Random(seed)
        drawn = draw_events(fault, size, RUN_SECONDS, dice)
        self.events = [event for event in drawn if event.fault not in missing and event.fault in faults_of(job)]
        if job == "ddp":
            # Not while they join: half of a record in the file of torch's store makes every reader wait for ever.
            self.events = [replace(e, at=max(0.0, e.at)) if e.fault == "disk" else e for e in self.events]
        self.site = Site(self.events, size, directory, seed)
        meeting = "dynamic" if fault == "restart" else "env"
        if fault == "disk" and job != "ddp":
            meeting = dice.choice(("env", "file", "dynamic"))
        self.setting = Setting(
            job,
            fault,
            seed,
            size,
            self.site.meeting_place,
            meeting,
            errors_of(self.events),
            join_errors_of(self.events),
            any(event.fault == "kill" for event in self.events),
        )
        self.findings: list[Findings] = []
        self.problems: list[str] = []
        self.hits: list[tuple[str, int, float]] = []  # faults, the ranks that they hit, and when
        self.stops: list[Stop] = []
        self._places = list(range(size))  # the process of each rank
        self._dead: set[int] = set()
        self._runs: list[Handle] = []
        self._floods: list[Flood] = []
        self._steps: list[tuple[float, int, Callable[[], None]]] = []  # what to do, and when
        self._numbers = itertools.count()

    def run(self) -> None:
        ranks = range(self.setting.size)
        with self.site as site:
            environments: list[dict[str, str]] = site.environments()
            if self.setting.fault == "restart":
                environments.append({})
            with processes(len(environments), environments, timeout=_STUCK_SECONDS) as job:
                self._join(job)
                until = time.monotonic() + self._run_seconds()
                self._runs = [job.start(rank, jobs.run, until) for rank in ranks]
                for event in self.events:
                    if event.at > 0:
                        self._plan(event.at, partial(self._hit, job, event, until))
                self._do_steps()
                survivors = [rank for rank in ranks if rank not in self._dead]
                _wait_for([self._runs[rank] for rank in survivors])
                for flood in self._floods:
                    found, problems = flood.results(self._dead, is_alone=self.setting.fault == "flood")
                    self.findings += found
                    self.problems += problems
                self._on_each(job, survivors, jobs.finish, survivors)
                self.findings += self._on_each(job, survivors, jobs.end)

    def _join(self, job: Cluster) -> None:
        ranks = range(self.setting.size)
        self._on_each(job, ranks, jobs.is_ready)
        for event in self.events:
            if event.at == 0:
                self._hit(job, event, until=0)
        joins = [job.start(rank, jobs.begin, self.setting, rank) for rank in ranks]
        for event in self.events:
            if event.at < 0:
                self._plan(-event.at, partial(self._hit, job, event, until=0))
        self._do_steps()
        joined = _wait_for(joins)
        dynamic = self.setting.meeting == "dynamic"
        if not all(joined):
            # The disk is free again. In a group without a size, the others wait for those who could not join.
            again = [rank for rank in ranks if not joined[rank]] if dynamic else list(ranks)
            if not dynamic:
                self._on_each(job, [rank for rank in ranks if joined[rank]], jobs.leave_early)
            self._on_each(job, again, jobs.begin_again)
        if dynamic:
            self._on_each(job, ranks, jobs.meet)

    def _run_seconds(self) -> float:
        """Until all faults are over, and then a little."""
        return max([RUN_SECONDS, *(event.at + event.seconds + _AFTER for event in self.events)])

    def _plan(self, seconds: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._steps, (time.monotonic() + seconds, next(self._numbers), step))

    def _do_steps(self) -> None:
        while self._steps:
            at, _, step = heapq.heappop(self._steps)
            time.sleep(max(0.0, at - time.monotonic()))
            step()

    def _on_each(self, job: Cluster, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> list[Any]:
        return _wait_for([job.start(self._places[rank], function, *args) for rank in ranks])

    def _hit(self, job: Cluster, event: Event, until: float) -> None:
        rank, place = event.rank, self._places[event.rank]
        if rank in self._dead:
            return
        began = time.monotonic()
        self.hits.append((event.fault, rank, began))
        match event.fault:
            case "kill":
                self._dead.add(rank)
                job.kill(place)
            case "stop":
                job.signal(place, signal.SIGSTOP)
                self._plan(event.seconds, partial(self._resume, job, event, began))
            case "interrupt":
                job.signal(place, signal.SIGINT)
            case "restart":
                job.kill(place)
                self._places[rank] = self.setting.size
                self._plan(event.seconds, partial(self._replace, job, rank, until))
            case "flood":
                if not {event.target, event.witness} & self._dead:
                    self._floods.append(Flood(job, event))
            case "no-shm":
                _, hard = resource.prlimit(job.pid(place), resource.RLIMIT_FSIZE)
                resource.prlimit(job.pid(place), resource.RLIMIT_FSIZE, (_FILE_LIMIT, hard))
            case _:
                self.site.begin(event)
                self._plan(event.seconds, partial(self.site.end, event))

    def _resume(self, job: Cluster, event: Event, began: float) -> None:
        job.signal(self._places[event.rank], signal.SIGCONT)
        self.stops.append((event.rank, began, time.monotonic()))

    def _replace(self, job: Cluster, rank: int, until: float) -> None:
        self._runs[rank] = job.start(self._places[rank], jobs.begin_and_run, self.setting, rank, until)


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
                f"{operation.error or operation.outcome.value}\n{operation.detail}"
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
    hits = sorted(hit for _, _, hit in scenario.hits)
    first: dict[tuple[int, int], float] = {}  # by rank, and by the last fault before the error
    for one in sorted(operations, key=lambda one: one.ended):
        last = bisect.bisect(hits, one.ended) - 1
        if one.outcome is Outcome.ERROR and last >= 0:
            first.setdefault((one.rank, last), one.ended - max(hits[last], one.began))
    return list(first.values())
