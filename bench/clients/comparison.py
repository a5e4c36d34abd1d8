"""Compares results, and makes the table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.clients.running import SIDES, Run

# Gradients of several calls are added in the order of their arrival, and training amplifies the differences.
TOLERANCE = 1e-3


def difference(left: Any, right: Any, tolerance: float = TOLERANCE, where: str = "") -> str:
    """The first place where two results differ; empty if there is none."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if left.keys() != right.keys():
            return f"{where or 'result'}: {sorted(left)} and {sorted(right)}"
        pairs = [(f"{where}.{key}".lstrip("."), left[key], right[key]) for key in left]
    elif isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            return f"{where or 'result'}: {len(left)} and {len(right)} values"
        pairs = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(left, right, strict=True))]
    elif isinstance(left, float) and isinstance(right, float):
        same = math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
        return "" if same else f"{where or 'result'}: {left:.6g} and {right:.6g}"
    else:
        return "" if left == right else f"{where or 'result'}: {left!r} and {right!r}"
    return next(filter(None, (difference(a, b, tolerance, place) for place, a, b in pairs)), "")


@dataclass
class Comparison:
    """The runs of one program on both sides."""

    program: str
    left_out: str = ""
    runs: dict[str, list[Run]] = field(default_factory=lambda: {side: [] for side in SIDES})

    @property
    def failures(self) -> dict[str, str]:
        """The first failure of each side that failed in any round."""
        found = {side: [run.failure for run in runs if run.failure] for side, runs in self.runs.items()}
        return {side: failures[0] for side, failures in found.items() if failures}

    @property
    def verdict(self) -> str:
        """`same`, or what is wrong."""
        if self.left_out:
            return f"left out: {self.left_out}"
        if self.failures:
            texts = []
            for side, failure in self.failures.items():
                failed = sum(bool(run.failure) for run in self.runs[side])
                texts.append(f"{side} failed {failed} of {len(self.runs[side])}: {failure}")
            return "; ".join(texts)
        first = self.runs["torch"][0].values
        for side in SIDES:
            for run in self.runs[side]:
                if found := difference(first, run.values):
                    return f"differs on {side}: {found}"
        return "same"

    @property
    def is_bad(self) -> bool:
        """Whether farprop is at fault: a result differs and all of torch's agree, or it fails and torch does not."""
        if self.left_out:
            return False
        fails_alone = "farprop" in self.failures and "torch" not in self.failures
        return fails_alone or self.verdict.startswith("differs on farprop")

    def row(self) -> list[str]:
        times: list[str] = []
        if all(any(not run.failure for run in self.runs[side]) for side in SIDES):
            good = {side: [run for run in self.runs[side] if not run.failure] for side in SIDES}
            loop = [median(run.seconds for run in good[side]) for side in SIDES]
            whole = [median(run.whole_seconds for run in good[side]) for side in SIDES]
            pairs = zip(self.runs["torch"], self.runs["farprop"], strict=True)
            ratios = [ours.seconds / theirs.seconds for theirs, ours in pairs if not (ours.failure or theirs.failure)]
            ratio = f"{median(ratios):.2f}" if ratios else ""
            times = [*(f"{seconds:.2f}" for seconds in loop), ratio, *(f"{seconds:.1f}" for seconds in whole)]
        return [self.program, *(times or [""] * 5), self.verdict]


HEADER = ["program", "torch s", "farprop s", "ratio", "torch whole s", "farprop whole s", "result"]


def markdown(comparisons: Sequence[Comparison]) -> str:
    rows = [HEADER, ["---", *["---:"] * 5, "---"], *(comparison.row() for comparison in comparisons)]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)


def exit_code(comparisons: Sequence[Comparison]) -> int:
    return int(any(comparison.is_bad for comparison in comparisons))
