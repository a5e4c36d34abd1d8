"""Names and ranks of workers, and ids that are unique in a job."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator
from typing import NamedTuple

from farprop.errors import UsageError

MAX_NAME_LENGTH = 128
_NAME = re.compile(r"[A-Za-z0-9_\-:]+")


class WorkerInfo:
    """A worker's name and its id, which is its rank in the job.

    Args:
        name: the name.
        id: the rank.
    """

    __slots__ = ("id", "name")

    name: str
    id: int

    def __init__(self, name: str, id: int) -> None:
        check_worker_name(name)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "id", int(id))

    def __setattr__(self, attribute: str, value: object) -> None:
        raise AttributeError(f"WorkerInfo is read-only: can't set {attribute!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerInfo) and self.id == other.id and self.name == other.name

    def __hash__(self) -> int:
        return hash((self.name, self.id))

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    @property
    def label(self) -> str:
        """The worker's name in log lines."""
        return f"{self.name} (rank {self.id})"

    def __reduce__(self) -> tuple[object, ...]:
        return WorkerInfo, (self.name, self.id)


def check_worker_name(name: str) -> None:
    """Raise ``UsageError`` for a name that is empty, too long, or has characters other than torch allows."""
    if not name:
        raise UsageError("A worker's name must be non-empty. Give init_rpc a name such as 'worker0'.")
    if len(name) >= MAX_NAME_LENGTH:
        raise UsageError(
            f"A worker's name must be shorter than {MAX_NAME_LENGTH} characters, but {name[:20]!r}... has {len(name)}."
        )
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"Worker name must match {_NAME.pattern} (letters, digits, '_', '-' and ':'), but it is {name!r}."
        )


class GlobalId(NamedTuple):
    """An id that is unique in the job: the rank of the worker that made it, and a number that is unique there."""

    created_on: int
    local_id: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


def distinct(bits: int) -> Iterator[int]:
    """Numbers from a random one on: a process that takes the rank of a dead one makes other ids. Thread-safe."""
    return itertools.count(secrets.randbits(bits - 1) + 1)


def unguessable(bits: int) -> Iterator[int]:
    """Random numbers from 1 on, for ids in jobs whose workers don't trust each other. Thread-safe."""
    return iter(lambda: secrets.randbelow((1 << bits) - 1) + 1, 0)
