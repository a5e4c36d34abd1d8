"""Finding where a gradient went wrong: the line of the forward pass, on its worker, and the calls that led to it.

Torch's anomaly mode notes for each node where it was made. Here it travels with calls and passes, so that every worker
notes; and the calls leave a trail, which a node that fails is shown with. All of it is slow and only for looking.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from farprop.runtime.gradients.nodes import LEAF_TYPE

_OWN_CODE = f'File "{Path(__file__).parents[2]}'
_MAX_FRAMES = 12

current_trail: ContextVar[str] = ContextVar("farprop_trail", default="")
is_enabled = torch.is_anomaly_enabled
_lock = threading.Lock()
_users = 0
_was_on = False


def trail_from_here(worker: str) -> str:
    """Where a call comes from that is about to be made: the calls that led to this thread, and the lines of it."""
    frames = traceback.format_stack()
    while frames and _OWN_CODE in frames[-1]:
        frames.pop()
    return f"{current_trail.get()}called from {worker}:\n{_lines_of_user(frames)}"


def _lines_of_user(frames: list[str]) -> str:
    """What comes after farprop's own lines, which are at the bottom of a thread that runs a call."""
    own = [place for place, frame in enumerate(frames) if _OWN_CODE in frame]
    return "".join(frames[own[-1] + 1 if own else 0 :][-_MAX_FRAMES:])


@contextmanager
def anomaly_mode() -> Iterator[None]:
    """Torch's mode is the whole process's: it is on while anybody wants it here."""
    global _users, _was_on
    with _lock:
        _users += 1
        if _users == 1:
            _was_on = torch.is_anomaly_enabled()
            torch.set_anomaly_enabled(True)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                torch.set_anomaly_enabled(_was_on)


def run_with_trail(trail: str, function: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that was called in anomaly mode."""
    outer = current_trail.set(trail)
    try:
        with anomaly_mode():
            return function(*args, **kwargs)
    finally:
        current_trail.reset(outer)


@contextmanager
def watched(nodes: Iterable[Any], trail: str, worker: str) -> Iterator[None]:
    """Run a part of a graph in anomaly mode: what it raises says which node raised it, and where that comes from."""
    last: list[Any] = []
    handles = [node.register_prehook(_noting(node, last)) for node in nodes if type(node) is not LEAF_TYPE]
    try:
        with anomaly_mode():
            yield
    except Exception as error:
        if last:
            error.add_note(_explained(last[0], trail, worker))
        raise
    finally:
        for handle in handles:
            handle.remove()


def _noting(node: Any, last: list[Any]) -> Any:
    def note(_: Any) -> None:
        last[:] = [node]

    return note


def _explained(node: Any, trail: str, worker: str) -> str:
    """What to say about a node that failed."""
    lines = node.metadata.get("traceback_")
    if not lines:
        return (
            f"It happened in {node.name()} on {worker}. Use detect_anomaly() around the forward pass to see its line."
        )
    text = (
        f"It happened in {node.name()}, which is of this line of the forward pass on {worker}:\n{_lines_of_user(lines)}"
    )
    return f"{text}in a function {trail}" if trail else text
