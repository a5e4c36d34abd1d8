"""Drawings of an autograd context: a box for each worker, and arrows for the tensors that they sent each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from farprop.protocol.inspection import GraphPart, GraphSend, Silence

_BOX_WIDTH, _BOX_HEIGHT, _GAP, _MARGIN = 190, 70, 90, 24
_MOST_CHARACTERS = 25  # that a line of a box has room for
_LINE, _CORNER = 15, 8
_LEVEL = 58  # the height of an arrow with two lines of text


@dataclass(frozen=True)
class Arrow:
    """Messages from one worker to another in the forward pass. Gradients go the other way."""

    sender: str
    receiver: str
    messages: int
    tensors: int
    nbytes: int | None = None
    """The bytes of the tensors; None unless somebody listened to events when all of the messages were sent."""
    seconds: float | None = None
    """From encoding to decoding, the mean of the messages; None as above."""
    error: float = 0.0
    """How wrong that may be: the clocks of two hosts are compared by asking."""

    @property
    def lines(self) -> list[str]:
        """What the drawing says about it."""
        text = _count(self.messages, "message")
        lines = [f"{text}, {_count(self.tensors, 'tensor')}" if self.tensors else text]
        if self.nbytes is not None and self.seconds is not None:
            each = " each" if self.messages > 1 else ""
            time = f"under {_time(self.error)}" if self.seconds < self.error else _time(self.seconds)
            lines.append(f"{_size(self.nbytes)}, {time}{each}")
        return lines


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"


def _size(nbytes: int) -> str:
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{max(1.0, seconds * 1e6):.0f} µs"


class Drawing:
    """The graph of an autograd context. A notebook shows it; ``svg``, ``mermaid`` and ``dot`` are its text.

    Args:
        context_id: the context.
        parts: each worker's part of it, or why it is not known.
    """

    def __init__(self, context_id: int, parts: Sequence[GraphPart | Silence]) -> None:
        self.context_id = context_id
        self.parts = list(parts)
        self.workers = [part.worker if isinstance(part, GraphPart) else part.name for part in parts]
        known = {part.worker: part for part in parts if isinstance(part, GraphPart)}
        self.arrows: list[Arrow] = []
        for receiver, part in known.items():
            for sender, ids in part.received.items():
                sends = [send for send in known[sender].sends if send.message_id in ids] if sender in known else []
                tensors = sum(send.tensors for send in sends)
                self.arrows.append(Arrow(sender, receiver, len(ids), tensors, *_measured(known, sender, part, sends)))

    def __repr__(self) -> str:
        return f"<Drawing of context {self.context_id}: {len(self.workers)} workers, {len(self.arrows)} arrows>"

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Write the drawing to a file.

        Args:
            path: The file. Its ending says what is written: ``.svg``, ``.dot``, or ``.mmd`` for Mermaid.

        Raises:
            ValueError: The ending is another one.
        """
        texts = {".svg": self.svg, ".dot": self.dot, ".mmd": self.mermaid}
        ending = Path(path).suffix
        if ending not in texts:
            raise ValueError(f"A drawing is saved as .svg, .dot or .mmd, not as {ending!r}.")
        Path(path).write_text(texts[ending])

    @property
    def mermaid(self) -> str:
        """The drawing in Mermaid's language."""
        lines = ["flowchart LR"]
        for number, (worker, part) in enumerate(zip(self.workers, self.parts, strict=True)):
            lines.append(f'  w{number}["{worker}<br/>{"<br/>".join(_facts(part))}"]')
        for arrow in self.arrows:
            ends = self._number(arrow.sender), self._number(arrow.receiver)
            lines.append(f'  w{ends[0]} -->|"{"<br/>".join(arrow.lines)}"| w{ends[1]}')
        return "\n".join(lines) + "\n"

    @property
    def dot(self) -> str:
        """The drawing in the language of Graphviz."""
        lines = ["digraph context {", "  rankdir=LR; node [shape=box];"]
        for number, (worker, part) in enumerate(zip(self.workers, self.parts, strict=True)):
            text = "\\n".join([worker, *_facts(part)]).replace('"', "'")
            lines.append(f'  w{number} [label="{text}"];')
        for arrow in self.arrows:
            ends = self._number(arrow.sender), self._number(arrow.receiver)
            text = "\\n".join(arrow.lines)
            lines.append(f'  w{ends[0]} -> w{ends[1]} [label="{text}"];')
        return "\n".join([*lines, "}"]) + "\n"

    @property
    def svg(self) -> str:
        """The drawing as SVG."""
        levels = self._levels()
        most = max(levels, default=0)
        room = _LEVEL * most + _MARGIN
        width = 2 * _MARGIN + len(self.workers) * (_BOX_WIDTH + _GAP) - _GAP
        height = 2 * room + _BOX_HEIGHT
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="12" fill="none" stroke="#888">'
        )
        marker = (
            '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="#888" stroke="none"/></marker></defs>'
        )
        parts = [head, marker]
        for number, (worker, part) in enumerate(zip(self.workers, self.parts, strict=True)):
            left = _MARGIN + number * (_BOX_WIDTH + _GAP)
            parts.append(f'<rect x="{left}" y="{room}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="8"/>')
            for line, text in enumerate([worker, *_facts(part)][:4]):
                weight = ' font-weight="bold"' if not line else ""
                at = f'x="{left + 12}" y="{room + 20 + 16 * line}"'
                shown = text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
                title = f"<title>{escape(text)}</title>" if shown != text else ""
                parts.append(f'<text {at}{weight} fill="#888" stroke="none">{title}{escape(shown)}</text>')
        parts += [self._arrow(arrow, level, most, room) for arrow, level in zip(self.arrows, levels, strict=True)]
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _levels(self) -> list[int]:
        """How far from the boxes each arrow is: those that would lie on each other have different levels."""
        found = [0] * len(self.arrows)
        taken: list[tuple[bool, int, int, int]] = []
        ends = [(self._number(arrow.sender), self._number(arrow.receiver)) for arrow in self.arrows]
        for at in sorted(range(len(ends)), key=lambda at: abs(ends[at][0] - ends[at][1])):
            goes_right, low, high = ends[at][0] <= ends[at][1], min(ends[at]), max(ends[at])
            level = 1
            while any(
                (goes_right, level) == other[:2] and not (low < high <= other[2] or other[2] < other[3] <= low)
                for other in taken
            ):
                level += 1
            taken.append((goes_right, level, low, high))
            found[at] = level
        return found

    def _arrow(self, arrow: Arrow, level: int, levels: int, room: int) -> str:
        """Arrows to the right are above the boxes, those to the left below, so they don't hide each other."""
        first, last = self._number(arrow.sender), self._number(arrow.receiver)
        goes_right = last >= first
        edge, out = (room, -1) if goes_right else (room + _BOX_HEIGHT, 1)
        start, end = (_MARGIN + number * (_BOX_WIDTH + _GAP) + _BOX_WIDTH // 2 for number in (first, last))
        # An arrow that is farther out has its ends farther in, so that it does not cross the others.
        apart = 10 + (_BOX_WIDTH // 2 - 30) * (levels - level) // levels
        if first == last:
            start, end = start - apart, end + apart
        else:
            start, end = start - out * apart, end + out * apart
        line = edge + out * _LEVEL * level - out * 2 * _LINE
        towards = _CORNER if end > start else -_CORNER
        parts = [
            f'<path d="M{start} {edge}V{line - out * _CORNER}Q{start} {line} {start + towards} {line}H{end - towards}'
            f'Q{end} {line} {end} {line - out * _CORNER}V{edge}" marker-end="url(#end)"/>'
        ]
        lines = arrow.lines
        first_line = line - 6 - _LINE * (len(lines) - 1) if goes_right else line + _LINE
        for number, text in enumerate(lines):
            at = f'x="{(start + end) // 2}" y="{first_line + _LINE * number}" text-anchor="middle"'
            parts.append(f'<text {at} fill="#888" stroke="none">{escape(text)}</text>')
        return "\n".join(parts)

    def _number(self, worker: str) -> int:
        return self.workers.index(worker) if worker in self.workers else 0


def _measured(
    known: dict[str, GraphPart], sender: str, receiver: GraphPart, sends: Sequence[GraphSend]
) -> tuple[int | None, float | None, float]:
    """The bytes of messages, how long they were on their way, and the error of that; None if some are not known."""
    nbytes, seconds = 0, 0.0
    for send in sends:
        arrived = receiver.arrived.get(send.message_id)
        if send.nbytes is None or send.sent is None or arrived is None:
            return None, None, 0.0
        nbytes += send.nbytes
        seconds += (arrived - receiver.clock_ahead) - (send.sent - known[sender].clock_ahead)
    if not sends:
        return None, None, 0.0
    return nbytes, seconds / len(sends), known[sender].clock_error + receiver.clock_error


def _facts(part: GraphPart | Silence) -> list[str]:
    if isinstance(part, Silence):
        return [part.reason]
    facts = [f"{_count(part.nodes, 'node')}, {_count(part.leaves, 'leaf', 'leaves')}"]
    if part.gradients:
        facts.append(_count(part.gradients, "gradient"))
    return facts
