"""The arithmetic and the tables of `bench/`; no processes."""

from __future__ import annotations

import json

import pytest

from bench import __main__ as command
from bench.cases import CASES
from bench.channel import Measured, _timed
from bench.driver import BenchError
from bench.imports import STATEMENTS, rows
from bench.machine import Usage
from bench.memory import SAMPLES, is_flat
from bench.report import comparison, floor_of, micros, render, times, to_json
from bench.rounds import Job, Outcome, alternate, p99, ratio, round_ratios, summarise


class FakeSide:
    """Returns prepared numbers, one list for each measurement, and records the order of measurements."""

    def __init__(self, name: str, visits: list[list[float]], log: list[str]) -> None:
        self.name = name
        self.visits = iter(visits)
        self.log = log

    def measure(self, case: str, samples: int, warmup: int, seconds: float) -> list[float]:
        self.log.append(f"{self.name}:{case}")
        try:
            return next(self.visits)
        except StopIteration:
            raise BenchError(f"{self.name} is gone") from None


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([7.0], 7.0), ([3.0, 1.0, 2.0], 3.0), ([float(n) for n in range(100, 0, -1)], 99.0)],
)
def test_p99_is_the_nearest_rank(samples: list[float], expected: float) -> None:
    assert p99(samples) == expected


def test_summary_pools_all_rounds_and_keeps_each() -> None:
    summary = summarise([[1.0, 2.0, 9.0], [4.0, 5.0]])
    assert (summary.median, summary.p99, summary.samples) == (4.0, 9.0, 5)
    assert summary.round_medians == [2.0, 4.5]
    assert summary.round_p99s == [9.0, 5.0]


def test_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # the second round was disturbed on both sides; the ratio of the pooled medians would be 5
    slow = summarise([[40.0], [400.0], [50.0]])
    fast = summarise([[10.0], [100.0], [10.0]])
    assert round_ratios(slow, fast) == [4.0, 4.0, 5.0]
    assert ratio(slow, fast) == 4.0


def test_ratio_needs_as_many_rounds_on_both_sides() -> None:
    with pytest.raises(ValueError, match="argument"):
        ratio(summarise([[1.0], [1.0]]), summarise([[1.0]]))


@pytest.mark.parametrize(("value", "text"), [(3.14, "3.1"), (10.4, "10"), (251234.5, "251,234")])
def test_micros(value: float, text: str) -> None:
    assert micros(value) == text


def test_times_keeps_one_decimal() -> None:
    assert times(4.96) == "5.0"


def test_table_aligns_its_columns() -> None:
    assert render(["case", "µs"], [["empty", "5"], ["add", "1,234"]]).splitlines() == [
        "case      µs",
        "-----  -----",
        "empty      5",
        "add    1,234",
    ]


def test_rounds_alternate_and_times_are_per_call() -> None:
    log: list[str] = []
    a = FakeSide("a", [[10.0], [20.0]], log)
    b = FakeSide("b", [[100.0], [200.0]], log)
    job = Job("w", {"ours": (a, "w"), "theirs": (b, "w2")}, samples=1, warmup=0, calls=10)
    outcome = alternate([job], 2, 1.0, lambda number: None)["w"]
    assert log == ["a:w", "b:w2", "a:w", "b:w2"]
    assert outcome.summaries["ours"].round_medians == [1.0, 2.0]
    assert outcome.summaries["theirs"].round_medians == [10.0, 20.0]


def test_failing_side_is_reported_and_not_measured_again() -> None:
    log: list[str] = []
    a, b = FakeSide("a", [[1.0], [1.0], [1.0]], log), FakeSide("b", [[1.0]], log)
    job = Job("w", {"ours": (a, "w"), "theirs": (b, "w")}, samples=1, warmup=0)
    outcome = alternate([job], 3, 1.0, lambda number: None)["w"]
    assert outcome.errors == {"theirs": "b is gone"}
    assert list(outcome.summaries) == ["ours"]
    assert log.count("b:w") == 2


def outcome_of(ours: list[list[float]], theirs: list[list[float]]) -> Outcome:
    return Outcome({"ours": summarise(ours), "theirs": summarise(theirs)})


def test_report_says_which_goals_were_met_and_in_how_many_rounds() -> None:
    cases = [CASES["empty"], CASES["echo-1mb"]]
    outcomes = {
        "unix": Outcome({"floor": summarise([[50.0], [40.0], [50.0]])}),
        "tcp": Outcome({"floor": summarise([[80.0]])}),
        "empty": outcome_of([[100.0], [100.0], [100.0]], [[500.0], [300.0], [600.0]]),
        "echo-1mb": Outcome(errors={"ours": "RuntimeError: lost"}, summaries={"theirs": summarise([[9.0]])}),
    }
    lines = comparison(cases, outcomes, "farprop", "torch").splitlines()
    cells = [" ".join(line.split()) for line in lines]
    assert cells[2] == "empty Python function, rpc_sync 100 100 500 600 5.0 3.0 to 6.0 4.0 yes 2/3 2.0"
    assert cells[3] == "echo 1 MB failed 9.0 9.0 3.0 no"
    assert lines[4] == "echo-1mb failed on farprop: RuntimeError: lost"
    entry, failed = json.loads(json.dumps(to_json(cases, outcomes)))["cases"]
    assert (entry["ratio"], entry["reached"], entry["times_the_floor"]) == (5.0, True, 2.0)
    assert entry["round_ratios"] == [5.0, 3.0, 6.0]
    assert (failed["reached"], failed["errors"]) == (False, {"ours": "RuntimeError: lost"})


def test_goals_of_the_cases() -> None:
    assert {name: case.goal for name, case in CASES.items()} == {
        "empty": 4,
        "add-operator": 3,
        "add-python": 4,
        "in-flight": 6,
        "echo-1mb": 3,
        "echo-128mb": 5,
        "empty-tcp": 3,
        "empty-tls": 1 / 1.3,
        "echo-tls": 0.25,
        "restricted-empty": 1 / 1.2,
        "restricted-add": 1 / 1.2,
        "remote": 4,
        "gaps-sync": 4,
        "gaps-async": 3.5,
        "gaps-self": 8,
        "backward-1": 3.5,
        "backward-8": 3.5,
        "backward-alone": 3.5,
        "opt-step": 2.5,
        "program-rnn": 1.6,
        "program-hybrid": 1.6,
        "program-pipeline": 1.4,
        "program-batch_server": 1.5,
        "program-rl": 3,
        "script-add": 3,
        **{f"all-reduce-4KB-{ranks}": 2 for ranks in (2, 4)},
        **{f"all-reduce-{size}-{ranks}": 3 for size in ("1MB", "25MB", "100MB") for ranks in (2, 4)},
        "ddp": 2,
        "ddp-4": 1.6,
        "ddp-gloo": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "conditions", "kept"),
    [
        ([], ["quiet", "loaded"], True),
        (["--load"], ["loaded"], False),
        (["--quiet"], ["quiet"], False),
        (["--quick"], ["quiet", "loaded"], False),
        (["--only", "empty"], ["quiet", "loaded"], False),
    ],
)
def test_only_a_full_run_replaces_the_kept_results(arguments: list[str], conditions: list[str], kept: bool) -> None:
    plan = command.parse(arguments)
    assert plan.conditions == conditions
    assert (plan.output == command.FULL_RESULTS) == kept


@pytest.mark.parametrize(
    ("kib_a_sample", "fds_a_sample", "maps_a_sample", "flat"),
    [(0, 0, 0, True), (50, 0, 0, True), (500, 0, 0, False), (0, 1, 0, False), (0, 0, 1, False)],
)
def test_flat_memory(kib_a_sample: int, fds_a_sample: int, maps_a_sample: int, flat: bool) -> None:
    samples = [Usage(1000 + n * kib_a_sample, 20 + n * fds_a_sample, n * maps_a_sample) for n in range(SAMPLES + 1)]
    assert is_flat(samples) == flat


def test_filling_a_pool_at_the_start_is_not_growth() -> None:
    samples = [Usage(1000, 20, 0)] + [Usage(90_000, 24, 4)] * SAMPLES
    assert is_flat(samples)


def test_floor_of_a_program_is_its_work_in_one_process_and_its_round_trips() -> None:
    case = CASES["program-hybrid"]
    outcomes = {
        "unix": Outcome({"floor": summarise([[50.0], [40.0]])}),
        f"{case.name} alone": Outcome({"floor": summarise([[450.0], [480.0]])}),
        case.name: outcome_of([[1200.0], [1200.0]], [[2400.0], [2400.0]]),
    }
    assert floor_of(case, outcomes) == [600.0, 600.0]
    (entry,) = to_json([case], outcomes)["cases"]
    assert (entry["floor_us"], entry["times_the_floor"]) == (600.0, 2.0)


def test_samples_that_measure_themselves() -> None:
    assert _timed(lambda: Measured(7.0), 3, 1.0) == [7.0, 7.0, 7.0]


def test_imports_are_compared_by_their_medians() -> None:
    base, ours, compat = STATEMENTS
    samples = {
        base: [(1_000_000.0, 900_000.0), (1_000_000.0, 900_000.0), (4_000_000.0, 900_000.0)],
        ours: [(1_050_000.0, 945_000.0)] * 3,
        compat: [(1_200_000.0, 1_000_000.0)] * 3,
    }
    assert rows(samples) == [
        [base, "1,000", "4,000", "900", "1.000", "1.000", "", ""],
        [ours, "1,050", "1,050", "945", "1.050", "1.050", "1.10", "yes"],
        [compat, "1,200", "1,200", "1,000", "1.200", "1.111", "1.15", "no"],
    ]
