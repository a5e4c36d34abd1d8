"""What a worker has done: plain data, made while somebody listens (``runtime/recorder.py``), which travels as JSON.

An event is made when what it tells of has ended, or when a recording ends before that: then the times that are not
there yet are those of the recording's end, and the outcome is ``unfinished``. Times are seconds of ``time.monotonic()``
on the worker. Both ends of a call know it by the same id (``protocol/inspection.py``): its event at the caller and its
event at the callee have the same caller, callee and number.
"""

from __future__ import annotations

from typing import Any

import msgspec

from farprop.protocol.foreign_text import one_line

OK = "ok"
UNFINISHED = "unfinished"  # it had not ended when the recording did
MOST_MESSAGE = 300  # characters


class ClientCall(msgspec.Struct, frozen=True, array_like=True, tag="client", gc=False):
    """A call that this worker has made. The caller has its value, or its error."""

    callee: str
    number: int
    function: str
    kind: str
    """``rpc_sync``, ``rpc_async``, ``remote``, ``to_here``, or the name of one of farprop's own methods."""
    thread: int
    """The native id of the thread that made it."""
    parent: tuple[str, int] | None
    """The caller and the number of the call that this worker was running when it made this one."""
    context: int | None
    """The autograd context that it was made in."""
    began: float
    encoded: float
    sent: float
    answered: float
    """When its answer was read. The same as ``ended`` for a call that got none."""
    ended: float
    sent_bytes: int
    received_bytes: int
    outcome: str
    """``ok``, the name of the exception's type, or ``unfinished``."""
    system: bool = False
    """Whether it is farprop's own."""
    is_waited_for: bool = True
    """Whether the thread that made it waited for its answer, and did nothing else."""
    message: str = ""
    """That of the exception, on a line (``message_of``)."""


class ServedCall(msgspec.Struct, frozen=True, array_like=True, tag="served", gc=False):
    """A call of another worker, or of this one, that this worker has answered."""

    caller: str
    number: int
    function: str
    thread: int
    """The native id of the thread that ran it."""
    context: int | None
    arrived: float
    """When it was read: until ``started`` it was queued."""
    started: float
    decoded: float
    """When its arguments were there: the function ran from here to ``returned``."""
    returned: float
    ended: float
    """When its answer was sent. Later than ``returned`` by the encoding or, if it has returned a future, by that."""
    received_bytes: int
    sent_bytes: int
    outcome: str
    system: bool = False
    is_answered_later: bool = False
    """Whether the function has returned something that was not done. Its thread was free from ``returned`` on."""
    message: str = ""


class Span(msgspec.Struct, frozen=True, array_like=True, tag="span", gc=False):
    """Something else that took a while: the run of a local graph, a hook, a collective."""

    category: str
    name: str
    thread: int
    began: float
    ended: float
    details: dict[str, Any] = {}


# The categories of spans.
PASS = "pass"  # a backward pass, at its origin
BACKWARD = "backward"  # the run of a local graph
GRADIENTS = "gradients"  # the encoding of gradients for another worker
HOOK = "hook"
COLLECTIVE = "collective"
STAGE = "stage"  # a micro-batch through a stage of a pipeline, inside of the call that runs it
WAIT = "wait"  # a thread does nothing until something else is done

Event = ClientCall | ServedCall | Span


def discreet(event: Event) -> Event:
    """The event as workers of a restricted job may tell it to others: ids of contexts are keys to them, and what
    exceptions say is for the callers alone.
    """
    if isinstance(event, Span):
        return Span(event.category, event.name, event.thread, event.began, event.ended)
    if event.context is None and not event.message:
        return event
    return msgspec.structs.replace(event, context=None, message="")


def message_of(error: BaseException) -> str:
    """What an exception says, as events have it."""
    try:
        return one_line(str(error), MOST_MESSAGE)
    except Exception:  # ``__str__`` of an exception is the program's
        return ""


def call_name(kind: str, function: str, caller: str, callee: str) -> str:
    """The name of a call in profiles: ``rpc_sync#fn(src -> dst)``."""
    kind = "rpc_remote" if kind == "remote" else kind
    shown = kind if function == kind else f"{kind}#{function.rpartition(':')[2]}"
    return f"{shown}({caller} -> {callee})"
