"""Text for terminals: columns, sizes, ages, colours."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from farprop.protocol.waits import seconds_text

BOLD, DIM, RED, GREEN, YELLOW, CYAN = "1", "2", "31", "32", "33", "36"


def has_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def printable(text: str) -> str:
    """A line that workers have written, such as a function's name, without codes that a terminal would obey."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def coloured(text: str, *codes: str) -> str:
    """The line in these colours, if there are any and the output is a terminal."""
    text = printable(text)
    return f"\033[{';'.join(codes)}m{text}\033[0m" if codes and has_colours() else text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be. The last one is not filled up."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

    return "\n".join([coloured(line(head), BOLD), *map(printable, map(line, rows))])


def age(seconds: float | None) -> str:
    return "" if seconds is None else seconds_text(max(0.0, seconds))


def size(nbytes: int) -> str:
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
