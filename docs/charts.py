"""``python docs/charts.py`` draws the pictures of docs/examples: docs/images/example-*.svg.

A picture shows the numbers that its page says the example prints. That of the notebook is among its outputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from drawings import DOCS, Drawing

Points = Sequence[tuple[float, float]]


class Panel:
    """A part of a drawing with axes: ``x`` and ``y`` are the ends of their scales, and y's has four steps."""

    def __init__(
        self,
        drawing: Drawing,
        place: tuple[float, float, float, float],
        title: str,
        x: tuple[float, float],
        y: tuple[float, float],
        form: str = "{:g}",
    ) -> None:
        self.drawing = drawing
        self.left, self.top, self.width, self.height = place
        self.x, self.y = x, y
        drawing.text(self.left, self.top - 16, title, "title")
        for quarter in range(5):
            value = y[0] + (y[1] - y[0]) * quarter / 4
            _, at = self.at(x[0], value)
            opacity = 1 if quarter == 0 else 0.25
            drawing.parts.append(f'<path class="line" opacity="{opacity}" d="M{self.left} {at} h{self.width}"/>')
            drawing.text(self.left - 8, at + 4, form.format(value), "small", "end")

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return round(self.left + self.width * across, 1), round(self.top + self.height * (1 - up), 1)

    def label_x(self, values: Sequence[float], name: str) -> None:
        for value in values:
            self.drawing.text(self.at(value, 0)[0], self.top + self.height + 18, f"{value:g}", "small", "middle")
        self.drawing.text(self.left + self.width / 2, self.top + self.height + 38, name, "small", "middle")

    def curve(self, points: Points, kind: str, width: float = 2.5, opacity: float = 1.0) -> None:
        path = "M" + " L".join(f"{x} {y}" for x, y in (self.at(*point) for point in points))
        style = f"fill: none; stroke-width: {width}; stroke-opacity: {opacity}; stroke-linejoin: round"
        self.drawing.parts.append(f'<path class="{kind}" style="{style}" d="{path}"/>')

    def dots(self, points: Points, kind: str) -> None:
        for x, y in (self.at(*point) for point in points):
            self.drawing.parts.append(f'<circle class="{kind}" style="stroke-width: 2" cx="{x}" cy="{y}" r="4"/>')

    def bar(self, x: float, y: float, width: float, kind: str, text: str) -> None:
        """A bar in the middle of ``x``; its width is in pixels."""
        across, top = self.at(x, y)
        self.drawing.box(across - width / 2, top, width, round(self.top + self.height - top, 1), kind)
        self.drawing.text(across, top - 6, text, "small", "middle")


def legend(drawing: Drawing, x: float, y: float, names: dict[str, str]) -> None:
    for name, kind in names.items():
        drawing.box(x, y, 14, 14, kind)
        drawing.text(x + 22, y + 12, name, "small")
        x += 44 + 6.5 * len(name)


# What the pages say that the examples print


def printed(name: str) -> str:
    page = (DOCS / "examples" / f"{name}.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return next(text for language, text in blocks if not language)


def losses_in(text: str) -> list[tuple[float, float]]:
    return [(int(step), float(loss)) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", text)]


# The pictures


def draw_split_learning() -> Drawing:
    text = printed("split_learning_restricted")
    right = [(int(step), float(share)) for step, share in re.findall(r"step +(\d+) .* right +([\d.]+)%", text)]
    drawing = Drawing(920, 330, "The loss falls to 0.06, and 98 % of patients that were not trained on are diagnosed")
    panels = [
        (Panel(drawing, (70, 56, 350, 210), "Loss", (0, 100), (0, 0.4), "{:.1f}"), losses_in(text), "cool"),
        (
            Panel(drawing, (530, 56, 350, 210), "Right, of patients not trained on", (0, 100), (80, 100), "{:g} %"),
            right,
            "warm",
        ),
    ]
    for panel, points, kind in panels:
        panel.label_x(range(0, 101, 20), "step")
        panel.curve(points, kind)
        panel.dots(points, kind)
    return drawing


def draw_inference() -> Drawing:
    text = printed("inference_service")
    rows = re.findall(r"^ +(\d+) +([\d,]+)/s +([\d,]+)/s +([\d.]+)$", text, re.MULTILINE)
    found = [(clients, *[int(rate.replace(",", "")) for rate in rates], size) for clients, *rates, size in rows]
    most = max(rate for _, single, batched, _ in found for rate in (single, batched))
    scale = next(1000 * top for top in (2, 4, 8, 12, 16, 20, 40) if 1000 * top >= most)
    drawing = Drawing(
        920, 370, "Answers a second, by the number of clients: one picture after the other, and in batches"
    )
    panel = Panel(drawing, (80, 60, 800, 230), "Answers a second", (0, len(found)), (0, scale), "{:,.0f}")
    legend(drawing, 560, 32, {"one picture after the other": "cool", "in batches": "warm"})
    for place, (clients, single, batched, size) in enumerate(found):
        panel.bar(place + 0.3, single, 58, "cool", f"{single:,}")
        panel.bar(place + 0.7, batched, 58, "warm", f"{batched:,}")
        x = panel.at(place + 0.5, 0)[0]
        drawing.text(x, 310, f"{clients} client" + "s" * (clients != "1"), "small", "middle")
        drawing.text(x, 328, f"batches of {size}", "small", "middle")
    return drawing


def draw_survivor() -> Drawing:
    undisturbed, disturbed = printed("survive_failure").split("With a worker that is killed:")
    (killed_at,) = map(int, re.findall(r"step +(\d+)  lost", disturbed))
    drawing = Drawing(920, 380, "The losses of a run with a killed worker are those of a run without")
    panel = Panel(drawing, (70, 60, 800, 250), "Loss", (0, 100), (0, 2.4), "{:.1f}")
    panel.label_x(range(0, 101, 10), "step")
    legend(drawing, 560, 32, {"undisturbed": "cool", "with a worker that is killed": "warm"})
    panel.curve(losses_in(undisturbed), "cool", 9, 0.45)
    panel.curve(losses_in(disturbed), "warm")
    panel.dots(losses_in(disturbed), "warm")
    saved = killed_at // 10 * 10
    x, _ = panel.at(killed_at, 0)
    drawing.line((x, 104), (x, 308), dashed=True)
    drawing.text(x + 10, 116, f"SIGKILL in the middle of step {killed_at}", "small orange")
    drawing.arrow((x, 150), (panel.at(saved, 0)[0], 150), (panel.at(saved, 0)[0], 250), back=True)
    drawing.text(x + 10, 155, f"on from the checkpoint of step {saved}, with another worker", "small")
    return drawing


def draw_group() -> Drawing:
    runs = {}
    for part in re.split(r"(?<=right)\n", printed("own_process_group").strip()):
        (name, kilobytes) = re.findall(r"torch\.(\w+): ([\d.]+) kB", part)[0]
        runs[name] = losses_in(part), float(kilobytes)
    kinds = dict(zip(runs, ("cool", "warm"), strict=True))
    drawing = Drawing(920, 340, "Training with gradients in bfloat16 sends half of the bytes, and learns as well")
    legend(drawing, 250, 26, kinds)
    losses = Panel(drawing, (70, 60, 460, 210), "Loss", (0, 100), (0, 2), "{:.1f}")
    losses.label_x(range(0, 101, 20), "step")
    reduced = Panel(drawing, (640, 60, 240, 210), "kB a step", (0, 2), (0, 120))
    for place, (name, (points, kilobytes)) in enumerate(runs.items()):
        losses.curve(points, kinds[name], 8 if place == 0 else 2.5, 0.45 if place == 0 else 1)
        losses.dots(points, kinds[name])
        reduced.bar(place + 0.5, kilobytes, 70, kinds[name], f"{kilobytes:g}")
        drawing.text(reduced.at(place + 0.5, 0)[0], 288, name, "small", "middle")
    return drawing


def draw_notebook() -> Drawing:
    cells = json.loads((DOCS.parent / "examples" / "notebook.ipynb").read_text())["cells"]
    (svg,) = [
        "".join(o["data"]["image/svg+xml"])
        for c in cells
        for o in c.get("outputs", ())
        if "image/svg+xml" in o.get("data", ())
    ]
    drawing = Drawing(920, 140, "Pictures of digits with the answers of the model below them; three are wrong")
    drawing.parts.append(svg.replace('width="720" height="80"', 'x="15" y="20" width="890" height="99"', 1))
    return drawing


def draw_all() -> dict[str, str]:
    """All pictures, by the name of their file."""
    return {
        f"example-{name}.svg": drawing.svg()
        for name, drawing in {
            "split_learning_restricted": draw_split_learning(),
            "inference_service": draw_inference(),
            "survive_failure": draw_survivor(),
            "own_process_group": draw_group(),
            "notebook": draw_notebook(),
        }.items()
    }


if __name__ == "__main__":
    for file, drawn in draw_all().items():
        (DOCS / "images" / file).write_text(drawn)
