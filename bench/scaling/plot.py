"""Draws small line charts side by side as SVG; both axes are logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]

COLUMNS = 3
WIDTH, HEIGHT = 280, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 34, 34
LEGEND = 30
# Two colours that differ in brightness, too, and two shapes: not everybody sees colours alike.
STYLES = [("#1d4ed8", "circle"), ("#d97706", "square")]
INK, FAINT, GRID = "#1f2937", "#6b7280", "#e5e7eb"


@dataclass(frozen=True)
class Panel:
    """One chart, with a line for each name."""

    title: str
    lines: Mapping[str, Points]


def draw(panels: Sequence[Panel]) -> str:
    """The charts in rows of three, under one legend."""
    rows = math.ceil(len(panels) / COLUMNS)
    width, height = COLUMNS * WIDTH, LEGEND + rows * HEIGHT
    body = [f'<rect width="{width}" height="{height}" fill="white"/>', *_legend(list(panels[0].lines))]
    for number, panel in enumerate(panels):
        x, y = number % COLUMNS * WIDTH, LEGEND + number // COLUMNS * HEIGHT
        body.append(f'<g transform="translate({x},{y})">{"".join(_panel(panel))}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11">\n' + "\n".join(body) + "\n</svg>\n"
    )


def _legend(names: Sequence[str]) -> Iterator[str]:
    for number, (name, (colour, shape)) in enumerate(zip(names, STYLES, strict=False)):
        x = LEFT + 110 * number
        yield f'<line x1="{x}" y1="18" x2="{x + 24}" y2="18" stroke="{colour}" stroke-width="2"/>'
        yield _marker(x + 12, 18, colour, shape)
        yield f'<text x="{x + 30}" y="22" fill="{INK}">{escape(name)}</text>'
    right = COLUMNS * WIDTH - RIGHT
    yield f'<text x="{right}" y="22" fill="{FAINT}" text-anchor="end">across: number of workers</text>'


def _panel(panel: Panel) -> Iterator[str]:
    points = [point for line in panel.lines.values() for point in line]
    yield f'<text x="{LEFT}" y="20" fill="{INK}" font-weight="bold">{escape(panel.title)}</text>'
    if not points:
        return
    sizes = sorted({x for x, _ in points})
    low, high = (min(y for _, y in points), max(y for _, y in points))
    marks = ticks(low, high)
    across = _Axis(sizes[0], sizes[-1], LEFT, WIDTH - RIGHT)
    up = _Axis(min(low, marks[0]), max(high, marks[-1]), HEIGHT - BOTTOM, TOP)
    for mark in marks:
        y = up.place(mark)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" fill="{FAINT}" text-anchor="end">{_number(mark)}</text>'
    for size in sizes:
        x = across.place(size)
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" fill="{FAINT}" text-anchor="middle">{_number(size)}</text>'
    for line, (colour, shape) in zip(panel.lines.values(), STYLES, strict=False):
        placed = [(across.place(x), up.place(y)) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (_marker(x, y, colour, shape) for x, y in placed)


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        if self.high == self.low:
            return (self.start + self.end) / 2
        return self.start + (self.end - self.start) * math.log(value / self.low) / math.log(self.high / self.low)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers around the values: powers of ten, with 2 and 5 between them if there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    every = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    below = [tick for tick in every if tick <= low]
    above = [tick for tick in every if tick >= high]
    return [tick for tick in every if below[-1] <= tick <= above[0]]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _marker(x: float, y: float, colour: str, shape: str) -> str:
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
    return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" fill="{colour}"/>'
