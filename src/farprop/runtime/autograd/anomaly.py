"""Anomaly mode across workers: the error of a node shows its line of the forward pass, and the calls that led to it.

Torch's anomaly mode records for each node where it was created. Farprop turns it on for calls and passes on other
workers, too, and sends the stack trace of each call along. Anomaly mode is slow, and meant for debugging.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from farprop.locks import make_lock
from farprop.runtime.autograd.nodes import LEAF_TYPE

_OWN_CODE = f'File "{Path(__file__).parents[2]}'
_MAX_FRAMES = 12

current_call_trace: ContextVar[str] = ContextVar("farprop_trail", default="")
is_enabled = torch.is_anomaly_enabled
_lock = make_lock("anomaly_mode")
_users = 0
_was_on = False


def call_trace_from_here(worker: str) -> str:
    """The call trace of a call from this thread: the trace of the call that runs here, and this thread's stack."""
    frames = traceback.format_stack()
    while frames and _OWN_CODE in frames[-1]:
        frames.pop()
    return f"{current_call_trace.get()}called from {worker}:\n{_lines_of_user(frames)}"


def _lines_of_user(frames: list[str]) -> str:
    """The user's frames: those above farprop's own at the bottom of a pool thread."""
    own = [place for place, frame in enumerate(frames) if _OWN_CODE in frame]
    return "".join(frames[own[-1] + 1 if own else 0 :][-_MAX_FRAMES:])


@contextmanager
def anomaly_mode() -> Iterator[None]:
    """Turn on torch's anomaly mode while any thread is inside. It is a setting of the whole process."""
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


def run_with_call_trace(call_trace: str, function: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that was called in anomaly mode."""
    outer = current_call_trace.set(call_trace)
    try:
        with anomaly_mode():
            return function(*args, **kwargs)
    finally:
        current_call_trace.reset(outer)


@contextmanager
def watched(nodes: Iterable[Any], call_trace: str, worker: str) -> Iterator[None]:
    """Run a part of a graph in anomaly mode: an error gets a note with the node that raised it, and its origin."""
    last: list[Any] = []
    handles = [node.register_prehook(_noting(node, last)) for node in nodes if type(node) is not LEAF_TYPE]
    try:
        with anomaly_mode():
            yield
    except Exception as error:
        if last:
            error.add_note(_explained(last[0], call_trace, worker))
        raise
    finally:
        for handle in handles:
            handle.remove()


def _noting(node: Any, last: list[Any]) -> Any:
    def note(_: Any) -> None:
        last[:] = [node]

    return note


def _explained(node: Any, call_trace: str, worker: str) -> str:
    """The note for the error of a node."""
    lines = node.metadata.get("traceback_")
    if not lines:
        return (
            f"It happened in {node.name()} on {worker}. Use detect_anomaly() around the forward pass to see its line."
        )
    text = (
        f"It happened in {node.name()}, which is of this line of the forward pass on {worker}:\n{_lines_of_user(lines)}"
    )
    return f"{text}in a function {call_trace}" if call_trace else text
