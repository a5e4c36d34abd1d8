"""``python docs/drawings.py`` draws the pictures of docs/explanation: docs/images/*.svg."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent

# A drawing has a background of its own, so that it can be read on a page of any colour.
STYLE = """
  .back { fill: #f6f8fb } .box { fill: #fff; stroke: #7a93b0 } .strong { fill: #1f3a5f; stroke: #1f3a5f }
  .warm { fill: #fff1e0; stroke: #d08a45 } .cool { fill: #e3f1fb; stroke: #4f93c4 }
  .green { fill: #e6f4e8; stroke: #5a9e68 }
  text { fill: #1c2733; font: 14px system-ui, sans-serif } .small { font-size: 12px; fill: #51606f }
  .title { font-weight: 600 } .light { fill: #fff } .code { font-family: ui-monospace, monospace; font-size: 13px }
  .line { stroke: #51606f; fill: none; stroke-width: 1.5 } .back-line { stroke: #c2571a; fill: none; stroke-width: 2 }
  .head { fill: #51606f } .back-head { fill: #c2571a } .orange { fill: #c2571a }
  @media (prefers-color-scheme: dark) {
    .back { fill: #171d26 } .box { fill: #212a36; stroke: #64809f } .strong { fill: #2f5687; stroke: #2f5687 }
    .warm { fill: #3a2b1b; stroke: #b87a3c } .cool { fill: #1b3243; stroke: #4f93c4 }
    .green { fill: #1f3525; stroke: #5a9e68 }
    text { fill: #dde5ee } .small { fill: #a3b1c0 } .light { fill: #fff }
    .line { stroke: #a3b1c0 } .head { fill: #a3b1c0 } .back-line { stroke: #ffb454 }
    .back-head, .orange { fill: #ffb454 }
  }
"""


class Drawing:
    """An SVG of boxes, texts and arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = width, height
        self.title = title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="7"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def labelled(self, x: float, y: float, width: float, height: float, lines: list[str], kind: str = "box") -> None:
        """A box with a title and smaller lines below it, in its middle."""
        self.box(x, y, width, height, kind)
        top = y + height / 2 - 9 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            style = ("title" if number == 0 else "small") + (" light" if kind == "strong" else "")
            self.text(x + width / 2, top + 18 * number, line, style, "middle")

    def arrow(self, *points: tuple[float, float], back: bool = False, dashed: bool = False) -> None:
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        kind, head = ("back-line", "back-head") if back else ("line", "head")
        self.parts.append(f'<path class="{kind}"{dash} marker-end="url(#{head})" d="{path}"/>')

    def line(self, *points: tuple[float, float], dashed: bool = False) -> None:
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        dash = ' stroke-dasharray="2 4"' if dashed else ""
        self.parts.append(f'<path class="line"{dash} d="{path}"/>')

    def svg(self) -> str:
        width, height = self.size
        heads = "".join(
            f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path class="{kind}" d="M0 0 8 4 0 8z"/></marker>'
            for kind in ("head", "back-head")
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(self.title)}">\n'
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n"
            f'<defs>{heads}</defs>\n<rect class="back" width="{width}" height="{height}" rx="12"/>\n{body}\n</svg>\n'
        )


def draw_map() -> Drawing:
    """The layers, as import-linter knows them."""
    rows: list[tuple[str, list[tuple[str, str]]]] = [
        ("cool", [("cli", "farprop run, ps, why, top, trace, doctor")]),
        ("cool", [("launch", "workers here, on hosts, on Ray"), ("doctor", "what is wrong with a machine")]),
        ("cool", [("profiler", "one timeline"), ("dashboard", "the live page"), ("telemetry", "metrics, traces")]),
        ("cool", [("inspect", "what the workers of a job do, and why they wait")]),
        ("green", [("nn", "RemoteModule, DDP"), ("optim", "DistributedOptimizer"), ("jit", "compiled code")]),
        ("green", [("autograd", "contexts, backward passes"), ("distributed", "process groups")]),
        ("green", [("rpc", "calls, references, membership"), ("compat", "under torch's names")]),
        ("box", [("testing", "fault plans")]),
        ("strong", [("runtime", "agent, connections, threads, server, references, backward passes: one worker")]),
        ("warm", [("transport", "sockets, TLS, shared memory: bytes between two ends")]),
        ("warm", [("wire", "messages, frames, codecs: objects and tensors to bytes and back")]),
        ("warm", [("protocol", "state machines without sockets, threads or clocks")]),
        ("box", [("ids", ""), ("config", ""), ("locks", ""), ("program", ""), ("_torch", "")]),
        ("box", [("errors", "")]),
    ]
    drawing = Drawing(920, 54 + 54 * len(rows), "The layers of farprop: imports point downwards only")
    for number, (kind, cells) in enumerate(rows):
        y = 20 + 54 * number
        width = (720 - 10 * (len(cells) - 1)) / len(cells)
        for place, (name, what) in enumerate(cells):
            drawing.labelled(30 + place * (width + 10), y, width, 46, [name, what] if what else [name], kind)
    for first, last, name, what in (
        (0, 3, "See and start", "from outside"),
        (4, 7, "What people", "import"),
        (8, 8, "One worker", ""),
        (9, 11, "What travels", ""),
        (12, 13, "Leaves", ""),
    ):
        top, bottom = 20 + 54 * first, 66 + 54 * last
        drawing.line((764, top), (772, top), (772, bottom), (764, bottom))
        drawing.text(784, (top + bottom) / 2 + (0 if what else 5), name, "title")
        drawing.text(784, (top + bottom) / 2 + 18, what, "title")
    drawing.text(30, 20 + 54 * len(rows) + 20, "Imports point downwards only.", "small")
    return drawing


def draw_call() -> Drawing:
    """One rpc_sync, at both ends."""
    drawing = Drawing(920, 560, "The life of a call: what the caller's thread and the callee's leader do")
    drawing.labelled(40, 20, 340, 40, ["worker0: the thread that calls"], "strong")
    drawing.labelled(540, 20, 340, 40, ["worker1: the leader of its thread pool"], "strong")
    drawing.line((210, 60), (210, 540), dashed=True)
    drawing.line((710, 60), (710, 540), dashed=True)
    for y, lines in (
        (80, ["encode", "fast codec: no pickle for plain tensors"]),
        (140, ["note it among the pending calls", "deadline, id; from here on it ends exactly once"]),
        (200, ["write to the socket", "one system call; large tensors: shared memory"]),
        (330, ["look for the answer itself", "spin for a moment, then sleep in poll"]),
        (480, ["decode, return", "or raise the exception of the function"]),
    ):
        drawing.labelled(60, y, 300, 48, lines, "cool")
    for y, lines in (
        (80, ["wait in epoll", "one thread of the pool: the leader"]),
        (225, ["read the frame, admit the request", "or refuse it: OverloadedError"]),
        (285, ["decode, find the function", "by name; restricted jobs: only exposed ones"]),
        (345, ["run it, on this thread", "after 1 ms another thread becomes the leader"]),
        (405, ["encode the answer, write it", ""]),
    ):
        drawing.labelled(550, y, 320, 48, [line for line in lines if line], "warm")
    drawing.arrow((360, 224), (550, 249))
    drawing.text(455, 218, "request", "small", "middle")
    drawing.arrow((550, 429), (360, 504), back=True)
    drawing.text(450, 490, "answer", "small orange", "middle")
    drawing.text(210, 318, "no other thread is woken on the way back", "small", "middle")
    return drawing


def draw_graph() -> Drawing:
    """The graph of a forward pass over two workers, and the way of the gradients."""
    drawing = Drawing(920, 400, "The autograd graph of one call, and the way back through it")
    drawing.box(20, 20, 880, 160, "cool")
    drawing.text(36, 44, "worker0", "title")
    drawing.box(20, 220, 880, 160, "warm")
    drawing.text(36, 366, "worker1", "title")
    for x, y, lines in (
        (40, 70, ["a", "leaf"]),
        (230, 70, ["SendRpcBackward", "message 1"]),
        (540, 70, ["RecvRpc", "message 2"]),
        (735, 70, ["sum", "loss"]),
        (230, 250, ["RecvRpc", "message 1"]),
        (385, 310, ["mul", "a × weight"]),
        (540, 250, ["SendRpcBackward", "message 2"]),
        (735, 310, ["weight", "leaf"]),
    ):
        wide = 8 if len(lines[0]) > 12 else 0
        drawing.labelled(x - wide, y, 145 + 2 * wide, 56, lines)
    drawing.arrow((185, 88), (222, 88))
    drawing.arrow((285, 126), (285, 250))
    drawing.arrow((300, 306), (300, 330), (385, 330))
    drawing.arrow((530, 330), (610, 330), (610, 306))
    drawing.arrow((595, 250), (595, 126))
    drawing.arrow((685, 88), (735, 88))
    drawing.arrow((735, 110), (685, 110), back=True)
    drawing.arrow((630, 126), (630, 250), back=True)
    drawing.arrow((630, 306), (630, 348), (530, 348), back=True)
    drawing.arrow((385, 348), (280, 348), (280, 306), back=True)
    drawing.arrow((530, 360), (735, 360), back=True)
    drawing.arrow((320, 250), (320, 126), back=True)
    drawing.arrow((222, 110), (185, 110), back=True)
    drawing.text(273, 205, "the call", "small", "end")
    drawing.text(333, 205, "gradients", "small orange")
    drawing.text(583, 205, "its answer", "small", "end")
    drawing.text(643, 205, "gradients", "small orange")
    return drawing


def draw_credit() -> Drawing:
    """How the origin knows that a pass has ended."""
    drawing = Drawing(920, 430, "Credit recovery: when all of it is back, nothing runs and nothing is under way")
    for x, name, what in ((130, "worker0", "origin of the pass"), (460, "worker1", ""), (790, "worker2", "")):
        drawing.labelled(x - 90, 16, 180, 48, [name, what] if what else [name], "strong")
        drawing.line((x, 64), (x, 414), dashed=True)
    drawing.labelled(40, 80, 180, 44, ["runs from the roots", "has all of the credit: 1"], "cool")
    drawing.arrow((220, 110), (370, 150))
    drawing.text(310, 118, "gradients, 1", "small", "middle")
    drawing.labelled(370, 136, 180, 44, ["runs its graph", "divides its share: ½ and ½"], "cool")
    drawing.arrow((550, 166), (700, 206))
    drawing.text(640, 174, "gradients, ½", "small", "middle")
    drawing.arrow((370, 170), (220, 226), back=True)
    drawing.text(316, 218, "gradients, ½", "small orange", "middle")
    drawing.labelled(40, 212, 180, 44, ["reaches its leaves", "½ is back"], "cool")
    drawing.labelled(700, 192, 180, 44, ["reaches its leaves", "nothing follows"], "cool")
    drawing.arrow((700, 226), (222, 350), back=True)
    drawing.text(520, 296, "½", "small orange", "middle")
    drawing.labelled(40, 340, 180, 56, ["½ + ½ = 1: at rest", "the pass has ended"], "green")
    return drawing


def draw_microseconds() -> Drawing:
    """The table of docs/benchmarks.md, as bars."""
    section = (DOCS / "benchmarks.md").read_text().split("\n## Where a step's time goes\n")[1]
    _, _, *lines = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    rows = [(name, int(caller or 0), int(callee or 0)) for name, caller, callee in cells]
    drawing = Drawing(920, 76 + 34 * len(rows), "Where the microseconds of a forward and backward over one hop go")
    drawing.box(400, 18, 14, 14, "cool")
    drawing.text(422, 30, "caller, µs", "small")
    drawing.box(510, 18, 14, 14, "warm")
    drawing.text(532, 30, "callee, µs", "small")
    for number, (name, caller, callee) in enumerate(rows):
        y = 48 + 34 * number
        drawing.text(385, y + 17, name, "small", anchor="end")
        x = 400.0
        for kind, value in (("cool", caller), ("warm", callee)):
            if value:
                width = value * 1.6
                drawing.box(x, y, width, 24, kind)
                drawing.text(x + width / 2, y + 17, str(value), "small", "middle")
                x += width + 2
    return drawing


def draw_all(images: Path) -> None:
    """Write all drawings into this directory."""
    for name, drawing in {
        "map": draw_map(),
        "call": draw_call(),
        "backward-graph": draw_graph(),
        "credit": draw_credit(),
        "microseconds": draw_microseconds(),
    }.items():
        (images / f"{name}.svg").write_text(drawing.svg())


if __name__ == "__main__":
    draw_all(DOCS / "images")
