"""``python docs/pipeline_picture.py trace.json picture.svg`` draws one step of a pipeline out of a trace of it.

The trace is that of ``farprop.profile``, as ``examples/pipeline_transformer.py`` writes it. The shortest of its steps
is drawn: a row for each stage, a bar for each micro-batch that it worked on, forward and backward.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LEFT, WIDTH, ROW, TOP = 64, 720, 44, 34

# It has a background of its own, so that it can be read on a page of any colour.
STYLE = """
  .back { fill: #f6f8fb } .forward { fill: #4f93c4 } .backward { fill: #d08a45 }
  text { fill: #1c2733; font: 13px system-ui, sans-serif } .bar { fill: #fff; font-size: 11px; text-anchor: middle }
  @media (prefers-color-scheme: dark) { .back { fill: #171d26 } text { fill: #dde5ee } .bar { fill: #fff } }
"""


def steps_of(trace: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The bars of each step, in order. A step ends with the last backward of the first stage."""
    bars = sorted((event for event in trace["traceEvents"] if event.get("cat") == "stage"), key=lambda bar: bar["ts"])
    last = max(bar["args"]["micro_batch"] for bar in bars)
    steps: list[list[dict[str, Any]]] = [[]]
    for bar in bars:
        steps[-1].append(bar)
        if bar["name"] == f"backward {last} of stage 0":
            steps.append([])
    return steps[:-1]


def draw(bars: list[dict[str, Any]]) -> str:
    began = min(bar["ts"] for bar in bars)
    taken = max(bar["ts"] + bar["dur"] for bar in bars) - began
    stages = 1 + max(bar["args"]["stage"] for bar in bars)
    work = sum(bar["dur"] for bar in bars)
    height = TOP + ROW * stages + 34
    parts = [
        f'<rect class="back" width="{LEFT + WIDTH + 16}" height="{height}" rx="8"/>',
        f'<text x="{LEFT}" y="22">One step of {taken / 1e3:.0f} ms: forwards (blue) and backwards (orange)</text>',
        f'<text x="{LEFT}" y="{height - 12}">bubble: {1 - work / stages / taken:.0%} of the time of a stage</text>',
    ]
    for stage in range(stages):
        parts.append(f'<text x="8" y="{TOP + ROW * stage + 27}">stage {stage}</text>')
    for bar in bars:
        kind, number = bar["name"].split()[:2]
        x, width = LEFT + WIDTH * (bar["ts"] - began) / taken, WIDTH * bar["dur"] / taken
        y = TOP + ROW * bar["args"]["stage"] + 6
        parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.6):.1f}" height="32" rx="2"/>'
        )
        if width > 9:
            parts.append(f'<text class="bar" x="{x + width / 2:.1f}" y="{y + 20}">{number}</text>')
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 16} {height}" role="img">'
    return f"{head}\n<title>A step of a pipeline</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"


def main(trace: str, picture: str) -> None:
    steps = steps_of(json.loads(Path(trace).read_text()))
    Path(picture).write_text(
        draw(min(steps, key=lambda bars: max(bar["ts"] + bar["dur"] for bar in bars) - bars[0]["ts"]))
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
