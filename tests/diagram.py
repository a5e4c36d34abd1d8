"""``python -m tests.diagram``: draw the tables of ``records`` into ``docs/references.md``."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from farprop.protocol.references.records import USER_TABLE, VALUE_TABLE, User, UserEvent, Value, ValueEvent

PAGE = Path(__file__).parents[1] / "docs" / "references.md"
BEGIN = "<!-- Generated from records.py by python -m tests.diagram: edit that, not this. -->"
END = "<!-- End of the generated part. -->"

_State = TypeVar("_State", bound=enum.Enum)
_Event = TypeVar("_Event", bound=enum.Enum)


def updated(page: str) -> str:
    """Return the page with diagrams and tables drawn afresh.

    Raises:
        ValueError: The page lacks the two comments that mark the generated part.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the diagrams: the lines {BEGIN!r} and {END!r} mark it")
    return f"{before}{BEGIN}\n\n{_diagrams()}\n{END}{after}"


def _diagrams() -> str:
    parts = [
        "### A reference at its user\n",
        _draw(USER_TABLE, (User.CREATING, User.BORROWED, User.ARRIVED, User.CONFIRMED)),
        _explain("state", User),
        _explain("event", UserEvent),
        "### A value at its owner\n",
        _draw(VALUE_TABLE, (Value.AWAITED, Value.FREED)),
        _explain("state", Value),
        _explain("event", ValueEvent),
    ]
    return "\n".join(parts)


def _draw(table: Mapping[tuple[_State, _Event], _State], first: Iterable[_State]) -> str:
    """One table as a Mermaid diagram. ``first`` are the initial states; states without a successor are final."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), following in table.items():
        arrows.setdefault((state.name, following.name), []).append(event.name)
    ends = [state.name for state in dict.fromkeys(table.values()) if not any(start is state for start, _ in table)]
    lines = [f"[*] --> {state.name}" for state in first]
    lines += [f"{source} --> {target}: {', '.join(events)}" for (source, target), events in arrows.items()]
    lines += [f"{state} --> [*]" for state in ends]
    return "```mermaid\nstateDiagram-v2\n" + "".join(f"    {line}\n" for line in lines) + "```\n"


def _explain(what: str, names: Iterable[enum.Enum]) -> str:
    rows = "".join(f"| {name.name} | {name.value} |\n" for name in names)
    return f"| {what} | meaning |\n| --- | --- |\n{rows}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
