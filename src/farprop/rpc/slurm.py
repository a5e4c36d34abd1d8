"""Slurm's notation for lists of nodes, such as ``gpu[01-04,07],login1``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from farprop.errors import UsageError

_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def hosts(nodes: str) -> Iterator[str]:
    """The hosts of a list of nodes, in its order. They are made one by one: a wrong list may name billions.

    Args:
        nodes: as in ``SLURM_JOB_NODELIST``. Each host may have several brackets.

    Raises:
        UsageError: it is no such list.
    """
    parts = _split(nodes)
    if not parts:
        raise UsageError(f"The list of nodes {nodes!r} is empty or not in Slurm's notation, such as gpu[01-04,07].")
    for part in parts:
        yield from _expand(part, nodes)


def first_host(nodes: str) -> str:
    """The first host of a list of nodes. Slurm starts rank 0 there, unless a user's own list says otherwise.

    Raises:
        UsageError: it is no such list.
    """
    return next(hosts(nodes))


def _split(nodes: str) -> list[str]:
    """Split at the commas outside of brackets; an empty list if brackets don't match."""
    parts, depth = [""], 0
    for character in nodes.strip():
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            return []
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts if depth == 0 and all(parts) else []


def _expand(part: str, nodes: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    for text in inside.split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} in the list of nodes {nodes!r} is not a number or a range, such as 01-04.")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise UsageError(f"{text!r} in the list of nodes {nodes!r} is a range that ends before it begins.")
        for number in range(int(first), int(last) + 1):
            # A range keeps the zeros of its first number: 01-10 is 01, 02, ..., 10.
            yield from _expand(f"{before}{number:0{len(first)}}{after}", nodes)
