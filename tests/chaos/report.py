"""The table at the end of a run, and the same as JSON."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.chaos.faults import FAULTS
from tests.chaos.operations import Outcome
from tests.chaos.scenario import Report

_COLUMNS = ("fault", "scenarios", "operations", "values", "errors", "slowest overrun", "detection", "violations")


def table(reports: Sequence[Report]) -> str:
    """One line for each kind of fault, and how to replay what failed."""
    rows = [list(_COLUMNS)]
    for row in _rows(reports):
        errors = ", ".join(f"{count} {name}" for name, count in row["errors"].items())
        detection = "-"
        if row["detections"]:
            detection = f"{row['detection_median']:.2f} s, worst {row['detection_worst']:.2f} s ({row['detections']})"
        rows.append(
            [
                row["fault"],
                str(row["scenarios"]),
                str(row["operations"]),
                str(row["values"]),
                errors or "-",
                f"{row['slowest_overrun']:.2f} s",
                detection,
                str(row["violations"]),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    failed = [report for report in reports if report.violations]
    lines += [f"violations: {len(report.violations)}, replay: {report.command}" for report in failed]
    return "\n".join(lines)


def as_json(reports: Sequence[Report]) -> str:
    """The table's rows, and each violation with its command."""
    violations = [
        {"fault": report.fault, "job": report.job, "seed": report.seed, "replay": report.command, "text": text}
        for report in reports
        for text in report.violations
    ]
    return json.dumps({"faults": _rows(reports), "violations": violations}, indent=1) + "\n"


def _rows(reports: Sequence[Report]) -> list[dict[str, Any]]:
    rows = []
    for fault in (*FAULTS, "all"):
        of_fault = [report for report in reports if fault in (report.fault, "all")]
        if not of_fault:
            continue
        operations = [operation for report in of_fault for operation in report.operations]
        detected = [seconds for report in of_fault for seconds in report.detected]
        rows.append(
            {
                "fault": fault,
                "scenarios": len(of_fault),
                "operations": len(operations),
                "values": sum(operation.outcome is Outcome.VALUE for operation in operations),
                "errors": dict(Counter(operation.error for operation in operations if operation.error).most_common()),
                "slowest_overrun": max(report.slowest for report in of_fault),
                "detections": len(detected),
                "detection_median": statistics.median(detected) if detected else None,
                "detection_worst": max(detected) if detected else None,
                "violations": sum(len(report.violations) for report in of_fault),
            }
        )
    return rows
