"""Calls under ``torch.autograd.profiler_legacy``: the caller's profile shows the operators that ran on other workers.

While a thread profiles, its calls ask the callee to profile too. The callee sends the events of its operators back
with the answer, and they appear in the caller's ``function_events``, under the call's key and marked as remote. Torch's
profiler knows nothing of this, so two of its functions are wrapped: the one that starts a profile (to know its
settings), and the one that turns records into events (to add ours).

Under the newer ``torch.profiler``, a call is an event of the thread that makes it, and its run is one of the thread
that runs it if a profile of all threads is on there. Nothing travels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEvent

from farprop._torch import (
    enter_record,
    exit_record,
    is_legacy_profile,
    legacy_profile,
    parse_records,
    start_trace,
)
from farprop.errors import ProtocolError
from farprop.wire.message import ANSWER, TRACED, Message

REMOTE_OP = "#remote_op: "

# The id of this worker, for events that ran here; -1 without RPC.
own_node_id = -1

_perf = time.perf_counter
_state = threading.local()
_T = TypeVar("_T")
_SETTINGS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


# Profiles of all calls that this process serves: their settings, and where the events of each call go.
served_calls: list[tuple[dict[str, bool], list[list[Any]]]] = []

# Whether the profile of torch's in this process is a part of ``farprop.profile``, which notes calls itself.
is_farprops_own = False


def settings_of(profile: Any) -> dict[str, bool]:
    return {name: bool(getattr(profile, name)) for name in _SETTINGS}


class Session:
    """One profile on one thread: its settings, when it began, and the events of calls made under it."""

    def __init__(self, profile: Any) -> None:
        self.settings = settings_of(profile)
        self.started = _perf()
        self.events: list[FunctionEvent] = []

    def add_call(self, key: str, began: float, own_id: int, remote: list[dict[str, Any]] | None) -> None:
        """Add a call that has ended. ``remote`` are the events that the callee recorded."""
        start = (began - self.started) * 1e6
        end = (_perf() - self.started) * 1e6
        self.events.append(
            FunctionEvent(
                id=0, name=key, trace_name=key, thread=threading.get_ident() % 10**6, start_us=start, end_us=end,
                node_id=own_id, is_async=True, is_legacy=True, stack=[],
            )
        )  # fmt: skip
        for event in remote or ():
            name = f"{key}{REMOTE_OP}{event['name']}"
            times = {"start_us": start + event["start_us"], "end_us": start + event["end_us"]}
            self.events.append(FunctionEvent(**{**event, "name": name, "trace_name": name, "is_remote": True, **times}))


class ProfiledFunction:
    """One call made under a profile: ``key`` is its name there."""

    __slots__ = ("_began", "_own_id", "key", "session")

    def __init__(self, session: Session, key: str, own_id: int) -> None:
        self.session = session
        self.key = key
        self._own_id = own_id
        self._began = _perf()

    def add(self, answer: Message | None) -> None:
        """The call has ended: add it to the profile, with the callee's events if there is an answer."""
        recorded = answer is not None and answer.kind == ANSWER and answer.flags & TRACED
        remote = unpack_record(answer.trace) if answer is not None and recorded else None
        self.session.add_call(self.key, self._began, self._own_id, remote)


class RecordedFunction:
    """One call made under ``torch.profiler``: an event that begins here, and ends on any thread."""

    __slots__ = ("_event",)

    def __init__(self, key: str) -> None:
        self._event = enter_record(key)

    def add(self, answer: Message | None) -> None:
        """The call has ended. A second time does nothing."""
        event, self._event = self._event, None
        if event is not None:
            exit_record(event)


CallProfile = ProfiledFunction | RecordedFunction


# Profiles in messages. They are not pickled: a restricted job must be able to refuse them unread.


def pack_record(events: list[dict[str, Any]]) -> bytes:
    return msgspec.json.encode(events)


def unpack_record(data: bytes | memoryview) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(data, type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the profile of a call is malformed: {error}") from error


def session() -> Session | None:
    """The legacy profile of this thread, or None."""
    if not is_legacy_profile():
        return None
    stack = getattr(_state, "sessions", None)
    return stack[-1] if stack else None


def run_profiled(
    settings: dict[str, bool], function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Callable[[], list[dict[str, Any]]]]:
    """On the callee, run a function under a profile.

    Returns:
        The function's result, and a function that returns the recorded events, including those of nested calls. Call it
        when the answer is sent: if the function returned a future, its nested calls end later.
    """
    profile = legacy_profile(**settings)
    with profile:
        own = session()
        value = function(*args, **kwargs)
    parsed = list(profile.function_events or ())
    shown = set(map(id, parsed))

    def record() -> list[dict[str, Any]]:
        late = [event for event in (own.events if own is not None else ()) if id(event) not in shown]
        return [_portable(event) for event in (*parsed, *late)]

    return value, record


def run_served(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """On the callee, run a function under the profiles in ``served_calls``."""
    profiles = list(served_calls)
    profile = legacy_profile(**{name: any(settings[name] for settings, _ in profiles) for name in _SETTINGS})
    with profile:
        value = function(*args, **kwargs)
    for _, calls in profiles:
        calls.append(list(profile.function_events or ()))
    return value


def run_recorded(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """On the callee, run a function while ``torch.profiler`` is on in this process."""
    with record_function(name):
        return function(*args, **kwargs)


def _portable(event: FunctionEvent) -> dict[str, Any]:
    return {
        "id": event.id,
        "name": event.name,
        "thread": event.thread,
        "start_us": event.time_range.start,
        "end_us": event.time_range.end,
        "node_id": event.node_id,
        "fwd_thread": event.fwd_thread,
        "input_shapes": event.input_shapes,
        "stack": event.stack,
        "scope": event.scope,
        "cpu_memory_usage": event.cpu_memory_usage,
        "device_memory_usage": event.device_memory_usage,
        "is_async": event.is_async,
        "sequence_nr": event.sequence_nr,
        "is_legacy": True,
        "flops": event.flops,
    }


def _wrapped_start(profile: Any) -> None:
    assert start_trace is not None
    start_trace.theirs(profile)
    if not hasattr(_state, "sessions"):
        _state.sessions = []
    _state.sessions.append(Session(profile))


def _wrapped_parse(records: Any) -> list[FunctionEvent]:
    assert parse_records is not None
    functions: list[FunctionEvent] = parse_records.theirs(records)
    for event in functions:
        if event.node_id < 0:
            event.node_id = own_node_id
    stack = getattr(_state, "sessions", None)
    if stack:
        functions.extend(stack.pop().events)
        functions.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    return functions


# Both or none: the second ends what the first begins.
if start_trace is not None and parse_records is not None:
    setattr(start_trace.owner, start_trace.name, _wrapped_start)
    setattr(parse_records.owner, parse_records.name, _wrapped_parse)
