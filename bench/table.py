"""Plain text tables with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def micros(value: float) -> str:
    """A time in µs: whole numbers with thousands separated, one decimal below ten."""
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def times(value: float) -> str:
    """A ratio: one decimal is all that a noisy machine gives."""
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
