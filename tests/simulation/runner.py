"""The kinds of simulated jobs, many runs of them, and the report. Importing this registers all mutants."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.pool import Pool
from typing import NamedTuple

from tests.simulation import mutants, world
from tests.simulation.groups import mutants as group_mutants
from tests.simulation.groups import world as group_world
from tests.simulation.harness import MUTANTS, Mutant, Outcome, mutated
from tests.simulation.job import mutants as job_mutants
from tests.simulation.job import world as job_world
from tests.simulation.parcels import mutants as parcel_mutants
from tests.simulation.parcels import world as parcel_world
from tests.simulation.passes import mutants as pass_mutants
from tests.simulation.passes import recorded_mutants, runtime_mutants
from tests.simulation.passes import world as pass_world
from tests.simulation.streams import mutants as stream_mutants
from tests.simulation.streams import world as stream_world

MUTANT_FILES = (
    mutants,
    pass_mutants,
    runtime_mutants,
    recorded_mutants,
    group_mutants,
    parcel_mutants,
    stream_mutants,
    job_mutants,
)


class Kind(NamedTuple):
    """A kind of simulated job, and what a report says of it."""

    title: str
    run: Callable[..., Outcome]
    lists: dict[str, tuple[str, ...]]  # counts that are listed on a line each
    faults: tuple[str, ...]  # counts that are shown in a table
    kept: str = ""  # the text for the count "kept ids"


KINDS = {
    "job": Kind(
        "Whole jobs",
        job_world.run,
        {
            "calls": ("runs", "failed calls", "cancelled calls", "lost values"),
            "passes": ("passes", "failed passes"),
            "groups": ("collectives", "failed collectives"),
            "network": ("chunks", "dials"),
            "membership": ("joinings", "leavings", "returns"),
        },
        ("broken connections", "crashes", "vanished hosts", "silences"),
    ),
    "references": Kind(
        "Remote references",
        world.run,
        {
            "messages": ("calls", "answers", "forks", "returned", "batches", "replies"),
            "operations": ("REGISTER", "ACCEPT", "RETURN", "DELETE", "FORGO", "REVOKE", "RECALL"),
        },
        (
            "lost messages",
            "doubled messages",
            "timeouts",
            "unsent messages",
            "interrupted sends",
            "broken connections",
            "partitions",
            "false deaths",
            "crashes",
        ),
        "ids that the workers keep until somebody dies",
    ),
    "passes": Kind(
        "Backward passes",
        pass_world.run,
        {
            "passes": ("SMART", "FAST", "recorded", "to inputs", "complete", "compared with the other mode"),
            "outcomes": ("ended", "failed", "stuck", "cut short"),
            "messages": ("gradients", "give-backs", "surveys", "releases", "answers"),
            "bundles": ("bundles", "bundles that run together", "messages of a series", "kept credit"),
            "failure": ("failures", "aborts"),
            "clean-up": ("clean-ups", "questions"),
        },
        ("timeouts", "early deadlines", "failing units", "broken connections", "crashes"),
    ),
    "groups": Kind(
        "Process groups",
        group_world.run,
        {"words": ("part words", "closed words", "goodbye words", "broken words")},
        ("mismatches", "deaths", "partings"),
    ),
    "streams": Kind(
        "Streams",
        stream_world.run,
        {"messages": ("items", "pulls", "answers", "answers with several items")},
        ("early closes", "closes of unknown streams", "lost connections"),
    ),
    "parcels": Kind("Parcels", parcel_world.run, {"messages": ("routes", "chunks")}, parcel_world.FAULTS),
}


def mutants_of(kind: str) -> dict[str, Mutant]:
    return {name: mutant for name, mutant in MUTANTS.items() if mutant.kind == kind}


_CHUNK = 50


def _pool(jobs: int) -> Pool:
    """Processes with a core each: the threads of a simulated job take turns, which is much faster on one core."""
    context = multiprocessing.get_context("fork")
    cores = context.SimpleQueue()
    for core in itertools.islice(itertools.cycle(sorted(os.sched_getaffinity(0))), jobs):
        cores.put(core)
    return context.Pool(jobs, lambda: os.sched_setaffinity(0, {cores.get()}))


class Kill(NamedTuple):
    """How many seeds a mutant survived, and how it died; no failure if it lives."""

    mutant: str
    seeds: int
    failure: str | None


def kills(names: Iterable[str], most: int, jobs: int, kind: str, likely: Mapping[str, int]) -> Iterator[Kill]:
    """For each of these mutants, how many seeds it takes until one fails; the ``likely`` one is tried first."""
    tasks = [(name, itertools.chain([likely[name]] if name in likely else [], range(most)), kind) for name in names]
    with _pool(jobs) as pool:
        yield from pool.imap(_kill, tasks)


def _kill(task: tuple[str, Iterable[int], str]) -> Kill:
    name, seeds, kind = task
    tried = 0
    with mutated(name):
        for seed in seeds:
            tried += 1
            failure = KINDS[kind].run(seed).failure
            if failure is not None:
                return Kill(name, tried, failure)
    return Kill(name, tried, None)


class Report:
    """The sums over many runs of one kind."""

    def __init__(self, kind: str = "references") -> None:
        self.kind = KINDS[kind]
        self.runs = 0
        self.failed = 0
        self.counts: Counter[str] = Counter()
        self.runs_with: Counter[str] = Counter()

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        self.failed += outcome.failure is not None
        self.counts.update(outcome.counts)
        self.runs_with.update(outcome.counts.keys())

    def text(self, seconds: float) -> str:
        lines = [f"{self.runs:,} seeds, {self.counts['steps']:,} steps, {seconds:.0f} s: {self.failed:,} failed"]
        lines += [f"{name + ':':12}{self._listed(names)}" for name, names in self.kind.lists.items()]
        if self.kind.kept:
            lines.append(f"{self.kind.kept}: {self.counts['kept ids']:,}")
        lines.append(f"{'faults':20}{'number':>12}{'runs with it':>16}")
        lines += [f"{fault:20}{self.counts[fault]:>12,}{self.runs_with[fault]:>16,}" for fault in self.kind.faults]
        return "\n".join(lines)

    def _listed(self, names: Iterable[str]) -> str:
        return ", ".join(f"{self.counts[name]:,} {name}" for name in names)


def replay(outcome: Outcome, mutant: str | None) -> str:
    """One line that runs a seed again."""
    option = f" --mutant {mutant}" if mutant else ""
    kind = f" --kind {outcome.kind}" if outcome.kind != kind_of(None, mutant) else ""
    return f"python -m tests.simulation{kind} --seed {outcome.seed}{option}  # {outcome.failure}"


def kind_of(kind: str | None, mutant: str | None) -> str:
    """The kind of job to run: the one asked for, or the one that has to kill the mutant."""
    return kind or (MUTANTS[mutant].kind if mutant else "references")


def run_all(seeds: range, jobs: int, mutant: str | None, kind: str | None = None) -> Iterator[Outcome]:
    """The outcomes of all seeds, in order."""
    kind = kind_of(kind, mutant)
    if jobs == 1:
        with mutated(mutant):
            yield from map(KINDS[kind].run, seeds)
        return
    chunks = [(seeds[start : start + _CHUNK], mutant, kind) for start in range(0, len(seeds), _CHUNK)]
    with _pool(jobs) as pool:
        for outcomes in pool.imap(_run_chunk, chunks):
            yield from outcomes


def first_kill(mutant: str, limit: int, likely: int | None = None) -> Outcome | None:
    """The first run that shows what is wrong with a mutant, of some number of seeds. A likely one is tried before."""
    ranges = [range(likely, likely + 1)] if likely is not None else []
    for seeds in (*ranges, range(limit)):
        found = next((outcome for outcome in run_all(seeds, 1, mutant) if outcome.failure), None)
        if found is not None:
            return found
    return None


def _run_chunk(chunk: tuple[range, str | None, str]) -> list[Outcome]:
    seeds, mutant, kind = chunk
    outcomes = list(run_all(seeds, 1, mutant, kind))
    # Workers that crashed leave futures of torch's whose callbacks hold them, which the collector can't see. It would
    # look at ever more of them after each run, and did twice the work after 50,000 seeds.
    gc.freeze()
    return outcomes
