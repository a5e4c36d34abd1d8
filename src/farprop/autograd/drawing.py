"""Drawings of an autograd context: a box for each worker, and arrows for the tensors that they sent each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from farprop.protocol.inspection import GraphPart, Silence

_BOX_WIDTH, _BOX_HEIGHT, _GAP, _MARGIN = 170, 74, 110, 24
_MOST_CHARACTERS = 28  # that a line of a box has room for
_LEVEL = 46  # how much higher an arrow is for each box that it passes


@dataclass(frozen=True)
class Arrow:
    """Messages from one worker to another in the forward pass. Gradients go the other way."""

    sender: str
    receiver: str
    messages: int
    tensors: int

    @property
    def label(self) -> str:
        text = f"{self.messages} message{'s' * (self.messages != 1)}"
        return f"{text}, {self.tensors} tensor{'s' * (self.tensors != 1)}" if self.tensors else text


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
                sends = known[sender].sends if sender in known else []
                tensors = sum(send.tensors for send in sends if send.message_id in ids)
                self.arrows.append(Arrow(sender, receiver, len(ids), tensors))

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
            lines.append(f'  w{ends[0]} -->|"{arrow.label}"| w{ends[1]}')
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
            lines.append(f'  w{ends[0]} -> w{ends[1]} [label="{arrow.label}"];')
        return "\n".join([*lines, "}"]) + "\n"

    @property
    def svg(self) -> str:
        """The drawing as SVG."""
        spans = [abs(self._number(arrow.sender) - self._number(arrow.receiver)) for arrow in self.arrows]
        room = _LEVEL * max(spans, default=0) + _MARGIN
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
        parts += [self._arrow(arrow, room) for arrow in self.arrows]
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _arrow(self, arrow: Arrow, room: int) -> str:
        """Arrows to the right are above the boxes, those to the left below, so they don't hide each other."""
        first, last = self._number(arrow.sender), self._number(arrow.receiver)
        goes_right = last >= first
        edge = room if goes_right else room + _BOX_HEIGHT
        rise = _LEVEL * max(1, abs(last - first)) * (-1 if goes_right else 1)
        start, end = (_MARGIN + number * (_BOX_WIDTH + _GAP) + _BOX_WIDTH // 2 for number in (first, last))
        end += 0 if first != last else 40
        top = edge + rise
        label = f'x="{(start + end) // 2}" y="{edge + rise * 3 // 4 - 4}" text-anchor="middle"'
        return (
            f'<path d="M{start} {edge}C{start} {top} {end} {top} {end} {edge}" marker-end="url(#end)"/>\n'
            f'<text {label} fill="#888" stroke="none">{escape(arrow.label)}</text>'
        )

    def _number(self, worker: str) -> int:
        return self.workers.index(worker) if worker in self.workers else 0


def _facts(part: GraphPart | Silence) -> list[str]:
    if isinstance(part, Silence):
        return [part.reason]
    facts = [f"{part.nodes} nodes, {part.leaves} leaves"]
    if part.gradients:
        facts.append(f"{part.gradients} gradients")
    return facts
