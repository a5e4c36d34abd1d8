"""`bench/`: its arithmetic, tables and drawings, and small runs of commands that start hosts or many workers."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench.cases import CASES
from bench.channel import Measured, _timed
from bench.driver import ROOT, BenchError
from bench.hosts import __main__ as hosts_command
from bench.hosts.cases import CASES as HOST_CASES
from bench.hosts.network import LINKS
from bench.imports import STATEMENTS, rows
from bench.machine import Usage
from bench.memory import SAMPLES, is_flat
from bench.report import comparison, floor_of, micros, render, times, to_json
from bench.rounds import Job, Outcome, alternate, p99, ratio, round_ratios, summarise
from bench.scaling.__main__ import Figures, combined, growth
from bench.scaling.plot import Panel, draw, ticks
from tests.support.hosts import Hosts, NotAllowedError


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
        "await": 2,
        "await-1000": 4,
        "coroutine-1000": 2,
        "echo-1mb": 3,
        "echo-128mb": 5,
        "stream-small": 10,
        "stream-1mb": 3,
        "to-one-50mb": 2,
        "to-four-50mb": 4,
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
        "profile-empty": 1 / 1.05,
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


def run_command(module: str, output: Path, *arguments: str) -> Any:
    """Run `python -m bench...`; return the JSON that it wrote."""
    command_line = [sys.executable, "-m", module, *arguments, "--output", str(output)]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text())


def test_table_between_hosts_has_the_ratio_to_the_wire() -> None:
    link, case = LINKS["1gbit"], HOST_CASES["echo-10mb"]
    wire = 2 * 10 * 2**20 * 8 / 1e9 * 1e6
    outcome = Outcome(
        summaries={
            "farprop": summarise([[1.1 * wire]]),
            "plain": summarise([[1.05 * wire]]),
            "torch": summarise([[2.2 * wire]]),
        }
    )
    outcomes = {case.name: outcome, "ping": Outcome({"wire": summarise([[50.0]])})}
    lines = hosts_command.table(link, [case], outcomes).splitlines()
    cells = [" ".join(line.split()) for line in lines]
    assert cells[2].endswith("2.0 2.0 to 2.0 1.10 2.20")
    assert cells[3].startswith("echo 10 MB, FARPROP_TLS=0")
    assert cells[3].endswith("1.05 2.20")
    assert cells[4] == "bare TCP, 100 bytes there and back 50 50"
    entry = hosts_command.to_json(link, [case], outcomes)["cases"][0]
    assert (entry["wire_us"], entry["ratios"]) == (round(wire, 2), {"farprop": 2.0, "plain": 2.1})


def test_bulk_does_not_go_over_the_relay() -> None:
    chosen = hosts_command.cases_on(LINKS["delay"], list(HOST_CASES.values()))
    assert {"empty", "backward-1", "all-to-all-4kb"} <= {case.name for case in chosen}
    assert not any(case.crossing for case in chosen)


def test_without_permission_the_benchmark_between_hosts_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Hosts) -> Hosts:
        raise NotAllowedError("hosts can't be made here: Operation not permitted")

    monkeypatch.setattr(Hosts, "__enter__", refuse)
    monkeypatch.setattr(sys, "argv", ["bench.hosts"])
    assert hosts_command.main() == 2
    assert "run it as root with iproute2 installed: hosts can't be made here" in capsys.readouterr().out


def test_benchmark_between_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """The fixture only says whether hosts can be made; the command makes its own."""
    arguments = ["--link", "10gbit", "--link", "delay", "--only", "empty", "--rounds", "1", "--quick"]
    links = run_command("bench.hosts", tmp_path / "hosts.json", *arguments)["links"]
    for link in links.values():
        (case,) = link["cases"]
        assert case["errors"] == {}
        assert case["farprop"]["samples"] > 0
        assert case["torch"]["samples"] > 0
    # there and back through a relay that holds each frame for 500 µs
    assert min(links["delay"]["wire"]["ping"]["round_medians"]) >= 1000


def figures(call_us: float, all_to_all_us: float | None) -> Figures:
    return Figures(0.1, call_us, call_us, call_us, all_to_all_us, 20.0, 20.0, 3.0, None, None, None)


def test_growth_is_the_exponent_between_the_two_largest_jobs_that_have_the_figure() -> None:
    by_size = {2: figures(5.0, 1.0), 4: figures(10.0, 4.0), 16: figures(40.0, None)}
    assert growth(by_size, "call_us") == pytest.approx(1.0)
    assert growth(by_size, "all_to_all_us") == pytest.approx(2.0)
    assert growth(by_size, "used_fds") is None


def test_rounds_of_scaling_are_combined_by_their_medians() -> None:
    together = combined([figures(1.0, None), figures(9.0, None), figures(2.0, None)])
    assert (together.call_us, together.all_to_all_us) == (2.0, None)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(3.0, 40.0, [2, 5, 10, 20, 50]), (1.0, 5e4, [1, 10, 100, 1000, 10_000, 100_000]), (7.0, 7.0, [5, 10])],
)
def test_ticks_are_round_numbers_around_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_drawing_has_a_marker_for_each_point() -> None:
    lines = {"farprop": [(2.0, 10.0), (4.0, 30.0)], "torch": [(2.0, 100.0)]}
    root = ET.fromstring(draw([Panel("µs & more", lines)]))
    space = "{http://www.w3.org/2000/svg}"
    panel = root.find(f"{space}g")
    assert panel is not None
    assert len(panel.findall(f"{space}circle")) == 2
    assert len(panel.findall(f"{space}rect")) == 1
    assert "µs & more" in [text.text for text in panel.iter(f"{space}text")]


def test_benchmark_of_scaling(tmp_path: Path) -> None:
    plot = tmp_path / "scaling.svg"
    arguments = ["--sizes", "2", "3", "--rounds", "1", "--seconds", "0.01", "--plot", str(plot)]
    results = run_command("bench.scaling", tmp_path / "scaling.json", *arguments)["results"]
    for side in ("farprop", "torch"):
        assert list(results[side]) == ["2", "3"]
        assert all(figure > 0 for figure in results[side]["3"].values())
    ET.parse(plot)


def test_benchmark_of_peak_memory(tmp_path: Path) -> None:
    arguments = ["--only", "echo-small", "--rounds", "1"]
    echo = run_command("bench.peak_memory", tmp_path / "peak.json", *arguments)["results"]["echo-small"]
    # a tensor of 1 MB, and its echo
    assert all(side[0]["workers_kib"][0] >= 2 << 10 for side in echo.values())
