"""``python docs/learning_curves.py`` draws what the examples have learned: docs/images/example-*.svg.

As in charts.py, a picture shows the numbers that its page says the example prints.
"""

from __future__ import annotations

import re

from charts import Panel, Points, legend, printed
from drawings import DOCS, Drawing

PLACE = (80, 60, 690, 250)  # of the axes. Behind them is room for what is written at lines.


def points_in(name: str, pattern: str) -> list[tuple[float, float]]:
    """The two numbers that a pattern has found in each line that an example has printed."""
    return [(float(x), float(y)) for x, y in re.findall(pattern, printed(name))]


def draw_curve(panel: Panel, points: Points, level: float, meaning: str) -> None:
    """A curve, and a dashed line at a level that is worth knowing."""
    (left, y), (right, _) = (panel.at(end, level) for end in panel.x)
    panel.drawing.line((left, y), (right, y), dashed=True)
    panel.drawing.text(right + 12, y + 4, meaning, "small")
    panel.curve(points, "cool")
    panel.dots(points, "cool")


def draw_parameter_server() -> Drawing:
    found = re.findall(r"(worker\d) \| step +\d+  after +(\S+) s  loss (\S+)", printed("parameter_server"))
    drawing = Drawing(920, 380, "The losses of three trainers, which don't wait for each other, fall together")
    panel = Panel(drawing, (80, 60, 800, 250), "Loss of each trainer", (0, 1), (0, 2), "{:.1f}")
    panel.label_x([0, 0.2, 0.4, 0.6, 0.8, 1], "seconds")
    kinds = dict(zip(["worker1", "worker2", "worker3"], ["cool", "warm", "green"], strict=True))
    legend(drawing, 560, 32, kinds)
    for name, kind in kinds.items():
        points = [(float(seconds), float(loss)) for worker, seconds, loss in found if worker == name]
        panel.curve(points, kind)
        panel.dots(points, kind)
    return drawing


def draw_reinforcement_learning() -> Drawing:
    points = points_in("reinforcement_learning", r"round +(\d+)  mean return +(\S+)")
    drawing = Drawing(920, 380, "The mean return rises from 20 to more than 470, of 500 that are possible")
    panel = Panel(drawing, PLACE, "Mean return: for how many steps poles stand", (0, 60), (0, 600))
    panel.label_x(range(0, 61, 10), "round")
    draw_curve(panel, points, 500, "the most possible")
    return drawing


def draw_embeddings() -> Drawing:
    points = points_in("embeddings", r"step +(\d+)  loss \S+  right +([\d.]+)%")
    drawing = Drawing(920, 380, "The share of unseen lines of which it finds the module rises to 86 %")
    panel = Panel(drawing, PLACE, "Right, of lines not trained on", (0, 200), (0, 100), "{:g} %")
    panel.label_x(range(0, 201, 40), "step")
    (largest,) = re.findall(r"([\d.]+)% of them of one", printed("embeddings"))
    draw_curve(panel, points, float(largest), "if it always said")
    drawing.text(panel.at(200, 0)[0] + 12, panel.at(200, float(largest))[1] + 20, "the largest module", "small")
    return drawing


def draw_maml() -> Drawing:
    points = points_in("maml", r"step +(\d+) .*right +([\d.]+)%")
    drawing = Drawing(920, 380, "The share of pictures that are told apart after seeing ten rises to 93 %")
    panel = Panel(drawing, PLACE, "Right, after seeing two pictures of each digit", (0, 60), (0, 100), "{:g} %")
    panel.label_x(range(0, 61, 10), "step of the outer loop")
    draw_curve(panel, points, 20, "by chance")
    return drawing


def draw_all() -> dict[str, str]:
    """All pictures, by the name of their file."""
    return {
        f"example-{name}.svg": drawing.svg()
        for name, drawing in {
            "embeddings": draw_embeddings(),
            "maml": draw_maml(),
            "parameter_server": draw_parameter_server(),
            "reinforcement_learning": draw_reinforcement_learning(),
        }.items()
    }


if __name__ == "__main__":
    for file, drawn in draw_all().items():
        (DOCS / "images" / file).write_text(drawn)
