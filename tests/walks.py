"""The way of a call and of a backward pass through farprop's modules, as it is: ``docs/architecture.md`` shows it.

python -m tests.walks            # write the walks into the page
python -m tests.walks --print    # print them, with the number of Python calls
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from statistics import mode
from typing import Any

import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from tests.support.workers import Cluster, cluster

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
WALKS = ("call", "call-with-grad", "backward")
SIDES = ("caller", "callee")
TRIES = 60

_log: list[tuple[str, str]] = []

Walk = list[tuple[str, str]]
"""Path of the module, and function, of each Python call, in order."""


def _note(frame: Any, event: str, _: Any) -> None:
    if event == "call" and frame.f_globals.get("__name__", "").startswith("farprop."):
        path = frame.f_code.co_filename.rpartition("/farprop/")[2]
        _log.append((path, frame.f_code.co_qualname))


def _on() -> None:
    _log.clear()
    sys.setprofile(_note)


def _off() -> Walk:
    sys.setprofile(None)
    return list(_log)


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def _walk_once(name: str, side: str) -> Walk:
    """In worker0: walk, with the profile function on one side."""
    a, b = (torch.ones(3, 3, requires_grad=name != "call") for _ in range(2))

    def begin() -> None:
        if side == "caller":
            _on()
        else:
            rpc.rpc_sync("worker1", _on)

    def end() -> Walk:
        return _off() if side == "caller" else rpc.rpc_sync("worker1", _off)

    if name == "call":
        begin()
        rpc.rpc_sync("worker1", add, args=(a, b))
        return end()
    with dist_autograd.context() as context_id:
        if name == "call-with-grad":
            begin()
            rpc.rpc_sync("worker1", add, args=(a, b))
            return end()
        loss = rpc.rpc_sync("worker1", add, args=(a, b)).sum()
        begin()
        dist_autograd.backward(context_id, [loss])
        return end()


def _request_alone(walk: Walk) -> Walk:
    """Of the callee's walk what belongs to the request: from when its bytes are there to when its answer is sent.
    Nothing if another thread had a part in it.
    """
    starts = [at for at, (_, function) in enumerate(walk) if function == "Server._on_events"]
    if len(starts) != 2:
        return []
    between = walk[starts[0] : starts[1]]
    polls = [at for at, (_, function) in enumerate(between) if function == "EventLoop.poll"]
    return between[: polls[0]] if polls else []


def walk(job: Cluster, name: str, side: str) -> list[Walk]:
    """What was seen in many tries, the shortest first: other threads may have a part in some."""
    for _ in range(20):
        job.run(0, _walk_once, name, side)  # functions are remembered, codecs imported
    found = [job.run(0, _walk_once, name, side) for _ in range(TRIES)]
    if side == "callee":
        found = [_request_alone(one) for one in found]
    return sorted((one for one in found if one), key=len)


def modules(walk: Walk) -> list[str]:
    """In the order in which they are entered first."""
    return list(dict.fromkeys(module for module, _ in walk))


def most_usual(walks: list[Walk]) -> Walk:
    """The walk that was seen most often: in others, another thread has a part."""
    return list(mode(tuple(walk) for walk in walks))


def lines(walk: Walk) -> list[str]:
    """A line for each module, with its functions in the order in which they are entered first."""
    functions: dict[str, dict[str, None]] = {}
    for module, function in walk:
        shown = function.replace(".<locals>", "").replace(".<listcomp>", "").replace(".<genexpr>", "")
        functions.setdefault(module, {})[shown] = None
    return [
        f"{number}. `{module}`: {', '.join(f'`{f}`' for f in found)}"
        for number, (module, found) in enumerate(functions.items(), 1)
    ]


def shown_modules(page: str, name: str, side: str) -> list[str]:
    """The modules of a walk as the page has them."""
    section = re.search(_section(name, side), page, re.S)
    assert section is not None, f"docs/architecture.md has no walk {name} {side}"
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section[2], re.M)


def _section(name: str, side: str) -> str:
    return rf"(<!-- walk {name} {side}[^\n]*-->\n)(.*?)(<!-- end -->)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="print the walks, and leave the page alone")
    wants_print = parser.parse_args().print
    page = PAGE.read_text()
    with cluster(2) as job:
        for name in WALKS:
            for side in SIDES:
                usual = most_usual(walk(job, name, side))
                counts = f"{len(modules(usual))} modules, {len(usual)} Python calls"
                if wants_print:
                    print(f"{name}, {side}: {counts}", *lines(usual), "", sep="\n")
                text = "\n".join([f"{counts}:", "", *lines(usual)])
                page = re.sub(_section(name, side), lambda m, text=text: f"{m[1]}{text}\n{m[3]}", page, flags=re.S)
    if not wants_print:
        PAGE.write_text(page)


if __name__ == "__main__":
    from tests import walks

    walks.main()  # not this module's: the workers know its functions by their names
