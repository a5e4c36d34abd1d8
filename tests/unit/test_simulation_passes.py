"""Simulated backward passes keep the protocol's invariants, and the simulator detects planted bugs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from farprop.protocol.backward import ROOTS, PassId
from tests.simulation.harness import Outcome, Violation
from tests.simulation.passes import checks, forward, origin, runtime_mutants
from tests.simulation.passes.forward import Graph, Node
from tests.simulation.passes.history import PassHistory
from tests.simulation.passes.network import SLOWEST, Network
from tests.simulation.passes.origin import backward
from tests.simulation.passes.threads import start
from tests.simulation.passes.world import Faults, World, run
from tests.simulation.runner import Report, first_kill, mutants_of, replay, run_all

ROOT = Path(__file__).parents[2]
SEEDS = 400
MUTANTS = mutants_of("passes")


def _is_runtime_mutant(mutant: str) -> bool:
    function = MUTANTS[mutant].replacement
    return getattr(function, "__module__", "") == runtime_mutants.__name__


# Seeds that kill mutants which need many. If the simulator changes, others are searched for, which takes a minute.
_LIKELY = {
    "two-statuses-are-enough": 119,
    "unshared-after-failure": 879,
    "kept-for-ever": 43,
    "kept-statuses-lost": 90,
    "only-the-last-is-kept": 114,
    "order-taken-for-granted": 682,
    "announced-counts-twice": 503,
    "one-too-many-announced": 503,
    "every-message-announces": 503,
    "announced-and-not-marked": 503,
    "undone-where-noticed": 207,
    "undone-with-its-origin": 63,
    "lost-only-if-active": 750,
    "failure-told-once": 390,
    "abort-stops-at-the-dead": 89,
}


def _limit(mutant: str) -> int:
    """Seeds within which a mutant has to be killed. Runtime mutants need more than one fault at a time."""
    return 3000 if mutant in _LIKELY or _is_runtime_mutant(mutant) else 500


def test_no_seed_fails() -> None:
    outcomes = run_all(range(SEEDS), jobs=1, mutant=None, kind="passes")
    assert [replay(outcome, None) for outcome in outcomes if outcome.failure] == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_is_killed(mutant: str) -> None:
    found = first_kill(mutant, _limit(mutant), _LIKELY.get(mutant))
    assert found is not None, f"{_limit(mutant)} seeds, and nothing wrong with {mutant}"
    assert not str(found.failure).startswith("TypeError"), "the mutant is not called as what it replaces"
    assert run(found.seed).failure is None, "without the mutant, nothing is wrong with that seed"


def test_there_are_mutants_of_both_kinds() -> None:
    of_runtime = [mutant for mutant in MUTANTS if _is_runtime_mutant(mutant)]
    assert len(of_runtime) >= 5
    assert len(MUTANTS) - len(of_runtime) >= 20


def test_runs_cover_all_messages_and_faults() -> None:
    report = Report("passes")
    for outcome in run_all(range(800), jobs=1, mutant=None, kind="passes"):
        report.add(outcome)
    for names in report.kind.lists.values():
        for name in names:
            assert report.counts[name] >= 10, name
    for fault in report.kind.faults:
        assert 9 < report.runs_with[fault] < 600, fault
    assert report.runs - max(report.runs_with[fault] for fault in report.kind.faults) > 60
    assert {len(World(seed, tracing=False).workers) for seed in range(100)} == {2, 3, 4, 5}


def test_seed_determines_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Also in another process, where hash randomisation gives sets another order."""
    run(4, tracing=True)
    trace = capsys.readouterr().out
    assert len(trace.splitlines()) > 50
    for hash_seed in ("1", "2"):
        done = _command("--kind", "passes", "--seed", "4", PYTHONHASHSEED=hash_seed)
        assert done.returncode == 0
        assert done.stdout == trace + "all is well\n"


def test_failing_seed_prints_the_command_that_replays_it() -> None:
    done = _command("--seeds", "60", "--jobs", "2", "--mutant", "ends-though-blocked")
    assert done.returncode == 1
    match = re.fullmatch(
        r"python -m tests\.simulation (--seed \d+ --mutant ends-though-blocked)  # (.+)", done.stdout.splitlines()[0]
    )
    assert match, done.stdout
    again = _command(*match[1].split())
    assert again.returncode == 1
    assert again.stdout.splitlines()[-1] == match[2]


def test_replay_command_names_the_kind() -> None:
    outcome = Outcome(7, "something", run(7).counts, "passes")
    assert replay(outcome, None) == "python -m tests.simulation --kind passes --seed 7  # something"


def test_one_command_runs_all_kinds() -> None:
    done = _command("--seeds", "5", "--jobs", "1")
    assert done.returncode == 0
    assert re.search(
        r"^Whole jobs:\n5 seeds(.*\n)+Remote references:\n5 seeds(.*\n)+Backward passes:\n5 seeds", done.stdout
    )


def test_any_exception_of_a_run_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(world: World) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("tests.simulation.passes.checks.at_rest", fail)
    assert run(1).failure == "KeyError: 'lost'"
    monkeypatch.undo()
    monkeypatch.setattr(
        "tests.simulation.passes.checks.at_rest", lambda world: (_ for _ in ()).throw(Violation("left"))
    )
    assert run(1).failure == "Violation: left"


def test_pass_of_many_messages_has_time_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes through towers of recorded ones were given up while they ran, as if they had waited in vain."""
    monkeypatch.setattr(Network, "delay", lambda network: SLOWEST)
    world = _there_and_back(400)
    history = _pass_from_the_last_value(world)
    seconds = world.clock.now
    while not history.outcome and world.clock.step():
        seconds = world.clock.now
    assert history.outcome == "ended"
    assert history.messages["propagate"] > 300
    assert seconds > 1000


def test_pass_that_is_given_up_while_it_runs_is_said_to_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to have lost the credit that its messages carry."""
    monkeypatch.setattr(origin, "time_for", lambda world, history: 0.05)
    failures = [failure for seed in range(60) if (failure := run(seed).failure)]
    assert len(failures) > 5
    assert {re.sub("pass .* waited", "pass waited", failure) for failure in failures} == {
        "Violation: pass waited for its deadline, though nothing could come"
    }


def test_program_whose_values_all_hang_on_failed_passes_starts_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "reaches_forgotten", lambda world, origin, root: True)
    assert [run(seed).failure for seed in range(5)] == [None] * 5


def test_pass_that_misses_its_inputs_is_noticed() -> None:
    history = PassHistory(PassId(0, 1), False, (1,), {0: {ROOTS}, 1: {7}}, inputs={1: frozenset((2,))})
    with pytest.raises(Violation, match="its inputs depend on"):
        checks.not_needed(history)


def test_units_of_a_graph() -> None:
    graph = Graph()
    graph.add(Node(()))  # a leaf that is shared
    graph.add(Node((), hooked=True))
    graph.add(Node((0, 1)))
    graph.add(Node((2,)))
    graph.sends = {5: (2,), 6: (3,)}
    reaches = graph.reaches(())
    assert reaches == {5: {0, 1, 2}, 6: {0, 1, 2, 3}}
    assert {unit.sources for unit in graph.units(reaches)} == {frozenset({5}), frozenset({6}), frozenset({5, 6})}
    assert graph.sinks() == []


def _there_and_back(times: int) -> World:
    """Two workers that have sent each other a value, again and again."""
    world = World(seed=0, tracing=False)
    world.faults = Faults(0.0, 0, 0, 0.0, 0.0, 0.0)
    here, there = world.maker, (world.maker + 1) % len(world.workers)
    world.workers[here].meet()
    for sender, receiver in [(here, there), (there, here)] * times:
        context = world.workers[sender].context
        assert context is not None
        forward.message(world, sender, receiver, (len(context.graph.nodes) - 1,))
    return world


def _pass_from_the_last_value(world: World) -> PassHistory:
    """Start a pass."""
    worker = world.workers[world.maker]
    assert worker.context is not None
    roots = (len(worker.context.graph.nodes) - 1,)
    history = PassHistory(PassId(worker.rank, 1), False, roots, forward.used_sends(world, worker.rank, roots))
    world.histories.append(history)
    start(worker, backward(worker, history))
    return history


def _command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0", **environment},  # with another one, the command starts itself again
        capture_output=True,
        text=True,
        check=False,
    )
