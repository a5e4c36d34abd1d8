"""What a check says: whether something is wrong, what was found, and what to do."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Status(enum.StrEnum):
    """How bad it is. With a warning a job can run; with a failure it can't, or not as its settings say."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    name: str
    status: Status
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Result:
    return Result(name, Status.OK, found)


def warning(name: str, found: str, advice: str) -> Result:
    return Result(name, Status.WARNING, found, advice)


def failure(name: str, found: str, advice: str = "") -> Result:
    return Result(name, Status.FAILURE, found, advice)


def has_failed(results: Iterable[Result]) -> bool:
    return any(result.status is Status.FAILURE for result in results)
