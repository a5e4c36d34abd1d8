"""Running many programs on one job of workers."""

from __future__ import annotations

import gc
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from farprop.errors import FarpropError
from tests.autograd.oracle import wrappers
from tests.autograd.oracle.distributed import run_distributed
from tests.autograd.oracle.generator import generate
from tests.autograd.oracle.local import SPARSE_ERROR, may_add_dense_to_sparse, run_locally
from tests.autograd.oracle.outcome import differences
from tests.autograd.oracle.program import Program, reachable, size
from tests.references.looking import become_empty, wait_until
from tests.support.workers import Cluster

WORLD = 4
_CHUNK = 20


@dataclass
class Report:
    programs: int = 0
    steps: int = 0
    hook_calls: int = 0
    gradients: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)  # by seed

    def add(self, other: Report) -> None:
        self.programs += other.programs
        self.steps += other.steps
        self.hook_calls += other.hook_calls
        self.gradients += other.gradients
        self.kinds += other.kinds
        self.failures.update(other.failures)


# In a worker


def check_seeds(seeds: Sequence[int]) -> Report:
    """Generate the programs of these seeds, and run them from this worker."""
    report = Report()
    for seed in seeds:
        program, expected = generate(seed)
        report.programs += 1
        report.steps += size(program)
        report.hook_calls += len(expected.log)
        report.gradients += len(expected.gradients)
        report.kinds += kinds_in(program)
        if problems := _check(program, expected):
            report.failures[seed] = problems
    return report


def check_program(program: Program) -> str | None:
    """The differences as text, empty if there are none; None if torch refuses the program."""
    try:
        expected = run_locally(program)
    except (RuntimeError, KeyError, ValueError, IndexError, AttributeError, TypeError):
        return None
    return _check(program, expected)


def _check(program: Program, expected: object) -> str:
    try:
        found = run_distributed(program, WORLD)
    except (FarpropError, RuntimeError, AssertionError) as error:
        if SPARSE_ERROR in str(error) and may_add_dense_to_sparse(program):
            return ""
        return traceback.format_exc(limit=-6)
    return "\n".join(differences(program, expected, found))  # type: ignore[arg-type]


def kinds_in(program: Program) -> Counter[str]:
    """Count the kinds of steps, passes and hooks in a program."""
    kinds = Counter({f"mode {program.mode}": 1, f"{program.workers} workers": 1, "exact": int(program.exact)})
    for one in program.passes:
        kinds[f"pass {one.where}"] += 1
    if program.higher is not None:
        kinds[f"order {program.higher.order}, {'grad' if program.higher.inputs else 'backward'}"] += 1
    for number in reachable(program):
        for kind, _, _, more in program.blocks[number].steps:
            kinds[more[0] if kind == "op" else f"hook {more[1]}" if kind == "hook" else f"step {kind}"] += 1
    for leaf in program.leaves:
        kinds.update(f"hook on leaf {kind}" for _, kind, _ in leaf.hooks)
    return kinds


def wait_until_empty() -> None:
    """Wait until this worker has neither contexts nor references."""
    from farprop.runtime.agent_registry import current_agent

    wait_until(lambda: not len(current_agent().gradients.contexts), "all contexts have ended")
    become_empty()


# In the process that drives the job


def run_seeds(job: Cluster, seeds: Sequence[int], at_once: int = WORLD, seconds: float = 0) -> Iterator[Report]:
    """Run the programs from ``at_once`` workers at a time; yield a report for each batch. Stop after ``seconds``."""
    for warmed in [job.start(rank, wrappers.warm_up) for rank in range(WORLD)]:
        warmed.result()
    end = time.monotonic() + seconds
    chunks = [seeds[i : i + _CHUNK] for i in range(0, len(seeds), _CHUNK)]
    for first in range(0, len(chunks), at_once):
        if seconds and time.monotonic() > end:
            return
        running = [job.start(rank, check_seeds, chunk) for rank, chunk in enumerate(chunks[first : first + at_once])]
        for one in running:
            yield one.result()


def wait_until_all_empty(job: Cluster) -> None:
    for rank in range(WORLD):
        job.run(rank, gc.collect)  # a cycle on one worker may hold a value of another
    for rank in range(WORLD):
        job.run(rank, wait_until_empty)
