"""Putting a flaw into the machine for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock


class Flaw(NamedTuple):
    """A method that takes the place of the right one. Its docstring says what is wrong with it."""

    owner: type
    method: str
    replacement: Callable[..., Any]
    kind: str
    """Which kind of simulated job has to find it."""


FLAWS: dict[str, Flaw] = {}


def flaw(owner: type, method: str, kind: str = "references") -> Callable[[Any], Any]:
    """Register a function, or a property, as a flaw."""

    def register(replacement: Any) -> Any:
        function = replacement.fget if isinstance(replacement, property) else replacement
        FLAWS[function.__name__.replace("_", "-")] = Flaw(owner, method, replacement, kind)
        return replacement

    return register


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """The machine has this flaw, or none, while the block runs."""
    if name is None:
        yield
        return
    found = FLAWS[name]
    with mock.patch.object(found.owner, found.method, found.replacement):
        yield
