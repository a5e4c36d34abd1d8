"""From outcomes to the tables and the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.floor_side import KINDS
from bench.rounds import Outcome
from bench.stats import ratio, round_ratios, rounded
from bench.table import micros, render, times
from bench.works import Work

Outcomes = Mapping[str, Outcome]


def comparison(works: Sequence[Work], outcomes: Outcomes, ours: str, theirs: str) -> str:
    """The table: a row a work, then what failed, if anything did."""
    header = [
        "work",
        f"{ours} µs",
        "p99",
        f"{theirs} µs",
        "p99",
        f"{theirs}/{ours}",
        "rounds",
        "to reach",
        "reached",
    ]
    rows = [_row(work, outcomes[work.name]) for work in works]
    failures = [
        f"{work.name} failed on {ours if side == 'ours' else theirs}: {error}"
        for work in works
        for side, error in outcomes[work.name].errors.items()
    ]
    return "\n".join([render(header, rows), *failures])


def floor_lines(works: Sequence[Work], outcomes: Outcomes, ours: str) -> list[str]:
    """Ours against a bare ping-pong in the same rounds."""
    lines = []
    for work in works:
        if work.floor and (factor := _over_floor(work, outcomes)) is not None:
            floor = micros(outcomes[work.floor].summaries["floor"].median)
            lines.append(f"{work.label}: {ours} is {times(factor)} x the floor ({KINDS[work.floor]}, {floor} µs)")
    return lines


def to_json(works: Sequence[Work], outcomes: Outcomes) -> dict[str, Any]:
    floors = {
        kind: outcomes[kind].summaries["floor"].to_json() for kind in KINDS if "floor" in outcomes[kind].summaries
    }
    return {"works": [_work_json(work, outcomes) for work in works], "floor": floors}


def _row(work: Work, outcome: Outcome) -> list[str]:
    cells = [work.label]
    for side in ("ours", "theirs"):
        summary = outcome.summaries.get(side)
        cells += [micros(summary.median), micros(summary.p99)] if summary else ["failed", ""]
    if outcome.errors:
        return [*cells, "", "", times(work.goal), "no"]
    ours, theirs = outcome.summaries["ours"], outcome.summaries["theirs"]
    each = round_ratios(theirs, ours)
    reached = "yes" if ratio(theirs, ours) >= work.goal else "no"
    # how many rounds say so tells a real difference from a lucky one
    votes = f"{sum(value >= work.goal for value in each)}/{len(each)}"
    spread = f"{times(min(each))} to {times(max(each))}"
    return [*cells, times(ratio(theirs, ours)), spread, times(work.goal), f"{reached} {votes}"]


def _work_json(work: Work, outcomes: Outcomes) -> dict[str, Any]:
    outcome = outcomes[work.name]
    entry: dict[str, Any] = {"name": work.name, "label": work.label, "goal": work.goal}
    entry |= {side: summary.to_json() for side, summary in outcome.summaries.items()}
    if outcome.errors:
        return entry | {"errors": outcome.errors, "reached": False}
    ours, theirs = outcome.summaries["ours"], outcome.summaries["theirs"]
    value = ratio(theirs, ours)
    entry |= {
        "ratio": rounded(value),
        "round_ratios": rounded(round_ratios(theirs, ours)),
        "reached": value >= work.goal,
    }
    if work.floor:
        entry["times_the_floor"] = rounded(_over_floor(work, outcomes))
    return entry


def _over_floor(work: Work, outcomes: Outcomes) -> float | None:
    ours = outcomes[work.name].summaries.get("ours")
    floor = outcomes[work.floor].summaries.get("floor")
    return ratio(ours, floor) if ours and floor else None
