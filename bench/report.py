"""Writes outcomes as text tables with aligned columns, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.cases import Case
from bench.floor_side import KINDS
from bench.rounds import Outcome, ratio, round_ratios, rounded

Outcomes = Mapping[str, Outcome]


def comparison(cases: Sequence[Case], outcomes: Outcomes, ours: str, theirs: str) -> str:
    """The table: a row per case, then the failures, if any."""
    header = [
        "case",
        f"{ours} µs",
        "p99",
        f"{theirs} µs",
        "p99",
        f"{theirs}/{ours}",
        "rounds",
        "to reach",
        "reached",
        f"{ours}/floor",
    ]
    rows = [[*_row(case, outcomes[case.name]), _floor_cell(case, outcomes)] for case in cases]
    failures = [
        f"{case.name} failed on {ours if side == 'ours' else theirs}: {error}"
        for case in cases
        for side, error in outcomes[case.name].errors.items()
    ]
    return "\n".join([render(header, rows), *failures])


def alone_name(case: Case) -> str:
    """The name of the job that does the work of a case in one process."""
    return f"{case.name} alone"


def _floor_cell(case: Case, outcomes: Outcomes) -> str:
    factor = _over_floor(case, outcomes)
    return "" if factor is None else times(factor)


def to_json(cases: Sequence[Case], outcomes: Outcomes) -> dict[str, Any]:
    floors = {
        kind: outcomes[kind].summaries["floor"].to_json()
        for kind in KINDS
        if kind in outcomes and "floor" in outcomes[kind].summaries
    }
    return {"cases": [_case_json(case, outcomes) for case in cases], "floor": floors}


def _row(case: Case, outcome: Outcome) -> list[str]:
    cells = [case.label]
    for side in ("ours", "theirs"):
        summary = outcome.summaries.get(side)
        cells += [micros(summary.median), micros(summary.p99)] if summary else ["failed", ""]
    if outcome.errors:
        return [*cells, "", "", times(case.goal), "no"]
    ours, theirs = outcome.summaries["ours"], outcome.summaries["theirs"]
    each = round_ratios(theirs, ours)
    reached = "yes" if ratio(theirs, ours) >= case.goal else "no"
    # if most rounds agree, the difference is not noise
    votes = f"{sum(value >= case.goal for value in each)}/{len(each)}"
    spread = f"{times(min(each))} to {times(max(each))}"
    return [*cells, times(ratio(theirs, ours)), spread, times(case.goal), f"{reached} {votes}"]


def _case_json(case: Case, outcomes: Outcomes) -> dict[str, Any]:
    outcome = outcomes[case.name]
    entry: dict[str, Any] = {"name": case.name, "label": case.label, "goal": case.goal}
    entry |= {side: summary.to_json() for side, summary in outcome.summaries.items()}
    if outcome.errors:
        return entry | {"errors": outcome.errors, "reached": False}
    ours, theirs = outcome.summaries["ours"], outcome.summaries["theirs"]
    value = ratio(theirs, ours)
    entry |= {
        "ratio": rounded(value),
        "round_ratios": rounded(round_ratios(theirs, ours)),
        "reached": value >= case.goal,
    }
    if (factor := _over_floor(case, outcomes)) is not None:
        entry["floor_us"] = rounded(median(floor_of(case, outcomes) or []))
        entry["times_the_floor"] = rounded(factor)
    return entry


def floor_of(case: Case, outcomes: Outcomes) -> list[float] | None:
    """The floor of a case in each round: the same work in one process, and a bare ping-pong for each round trip."""
    if not case.floor or "floor" not in outcomes[case.floor].summaries:
        return None
    trips = [case.round_trips * trip for trip in outcomes[case.floor].summaries["floor"].round_medians]
    if case.alone is None:
        return trips
    alone = outcomes[alone_name(case)].summaries.get("floor")
    return alone and [sum(parts) for parts in zip(alone.round_medians, trips, strict=True)]


def _over_floor(case: Case, outcomes: Outcomes) -> float | None:
    ours, floor = outcomes[case.name].summaries.get("ours"), floor_of(case, outcomes)
    if ours is None or floor is None:
        return None
    return median(mine / least for mine, least in zip(ours.round_medians, floor, strict=True))


def micros(value: float) -> str:
    """A time in µs: whole numbers with thousands separated, one decimal below ten."""
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def times(value: float) -> str:
    """A ratio with one decimal: more would be noise."""
    return f"{value:.1f}"


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right, a rule under the header."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        first = line[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        return "  ".join([first, *rest]).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([aligned(lines[0]), rule, *(aligned(line) for line in lines[1:])])
