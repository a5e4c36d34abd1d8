"""Events of calls: who hears of them, and what they say."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.protocol.events import MOST_MESSAGE, ClientCall, Event, ServedCall, Span, discreet
from farprop.protocol.inspection import to_json
from farprop.runtime.recorder import recorder
from tests.inspection import functions as f
from tests.references.looking import wait_until
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport

_events: list[Event] = []
_ends: list[Callable[[], None]] = []


def _listen() -> None:
    _ends.append(recorder.subscribe(_events.append))


def _stop() -> list[Event]:
    """End all subscriptions of this test, and return what was heard, without farprop's own calls."""
    while _ends:
        _ends.pop()()
    assert not recorder.is_on
    found = [event for event in _events if not getattr(event, "system", False)]
    _events.clear()
    return found


def _served(count: int) -> None:
    """Wait until this worker has heard of so many requests: a caller may have the answer before."""
    wait_until(lambda: sum(isinstance(e, ServedCall) and not e.system for e in list(_events)) >= count)


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _by_way_of(worker: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(worker, _doubled, args=(x,))


def _make_calls() -> None:
    x = torch.ones(100)
    rpc.rpc_sync("worker1", _doubled, args=(x,))
    rpc.rpc_async("worker1", _doubled, args=(x,)).wait()
    rpc.remote("worker1", _doubled, args=(x,)).to_here()
    with pytest.raises(ValueError, match="no such thing"):
        rpc.rpc_sync("worker1", f.raise_value_error)


def test_calls_are_told_at_both_ends() -> None:
    with cluster(2) as job:
        for rank in (0, 1):
            job.run(rank, _listen)
        job.run(0, _make_calls)
        job.run(1, _served, 5)
        made = [event for event in job.run(0, _stop) if isinstance(event, ClientCall)]
        served = {event.number: event for event in job.run(1, _stop) if isinstance(event, ServedCall)}
    assert sorted(event.kind for event in made) == ["remote", "rpc_async", "rpc_sync", "rpc_sync", "to_here"]
    assert [event.outcome for event in made if event.function.endswith("raise_value_error")] == ["ValueError"]
    assert len(served) == len(made)
    for event in made:
        there = served[event.number]
        assert (event.callee, there.caller) == ("worker1", "worker0")
        assert event.function == there.function
        assert event.outcome == there.outcome
        assert event.began <= event.encoded <= event.sent <= event.ended
        assert event.sent <= event.answered <= event.ended
        assert there.arrived <= there.started <= there.decoded <= there.returned <= there.ended
        # One host, one clock. A small answer may be read before its sender has taken the time.
        assert event.began <= there.started
        assert there.returned <= event.ended
        assert event.sent_bytes == there.received_bytes
        assert event.received_bytes == there.sent_bytes
        assert not event.system
    assert all(event.sent_bytes >= 400 for event in made if event.function.endswith("_doubled"))


class _BadText(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _fail(how: str) -> None:
    raise {
        "hostile": ValueError("\x1b[2J\ud800 a\nb"),
        "long": ValueError("x" * 100_000),
        "textless": _BadText(),
    }[how]


def _fail_often() -> None:
    for how in ("hostile", "long", "textless"):
        try:
            rpc.rpc_sync("worker1", _fail, args=(how,))
        except ValueError:
            pass


def test_failed_calls_have_a_message_at_both_ends() -> None:
    expected = ["?[2J? a b", "x" * (MOST_MESSAGE - 1) + "…", ""]
    with cluster(2) as job:
        for rank in (0, 1):
            job.run(rank, _listen)
        job.run(0, _fail_often)
        job.run(1, _served, len(expected))
        for rank in (0, 1):
            # A served call may be told after the next one: its caller has the answer already.
            calls = (event for event in job.run(rank, _stop) if not isinstance(event, Span))
            events = sorted(calls, key=lambda event: event.number)
            assert [event.message for event in events] == expected
            to_json(events)  # any text can travel
            assert all(discreet(event).message == "" for event in events)  # type: ignore[union-attr]


def test_nested_call_names_the_call_that_it_is_part_of() -> None:
    with cluster(3) as job:
        for rank in (0, 1):
            job.run(rank, _listen)
        job.run(0, rpc.rpc_sync, "worker1", _by_way_of, args=("worker2", torch.ones(3)))
        job.run(1, _served, 1)
        (outer,) = job.run(0, _stop)
        inner = [event for event in job.run(1, _stop) if isinstance(event, ClientCall)]
    assert outer.parent is None
    assert [event.parent for event in inner] == [("worker0", outer.number)]


def _one_pass() -> int:
    w = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", _doubled, args=(w,)).sum()
        dist_autograd.backward(context_id, [loss])
    return context_id


def test_backward_pass_is_told_as_calls_of_gradients() -> None:
    with cluster(2) as job:
        for rank in (0, 1):
            job.run(rank, _listen)
        context_id = job.run(0, _one_pass)
        job.run(1, _served, 2)
        forward, gradients = [event for event in job.run(0, _stop) if isinstance(event, ClientCall)]
        job.run(1, _stop)
    assert forward.context == context_id
    assert (gradients.kind, gradients.function, gradients.outcome) == ("gradients", "gradients", "ok")


def _with_a_bad_listener() -> tuple[Any, int]:
    def bad(event: Event) -> None:
        heard.append(event)
        raise RuntimeError("it is no good")

    heard: list[Event] = []
    _ends.append(recorder.subscribe(bad))
    for _ in range(3):
        value = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
    assert recorder.is_on == (len(_ends) > 1)
    return value, len(heard)


def test_listener_that_raises_harms_no_call_and_is_removed() -> None:
    with cluster(2) as job:
        value, heard = job.run(0, _with_a_bad_listener)
        assert (value.tolist(), heard) == ([2.0, 2.0], 1)
        job.run(0, _listen)
        _, heard = job.run(0, _with_a_bad_listener)
        assert heard == 1
        assert len(job.run(0, _stop)) == 3  # the other listener heard of all


def _interrupted_subscription() -> None:
    _listen()
    first = rpc.rpc_async("worker1", f.wait_here)
    _ends.pop()()  # in the middle of a call
    rpc.rpc_sync("worker1", f.release)
    first.wait()
    _listen()
    rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))


def test_subscription_may_end_in_the_middle_of_a_call() -> None:
    with cluster(2) as job:
        job.run(0, _interrupted_subscription)
        functions = [event.function for event in job.run(0, _stop)]
    assert functions[-1] == "torch:add"


def _calls_of_a_forked_child() -> tuple[bool, bool]:
    """Whether anybody listens in a child that was forked while somebody listened here, and here."""
    _listen()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"on" if recorder.is_on else b"off")
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said == b"on", recorder.is_on


def test_nobody_listens_in_a_forked_child() -> None:
    with cluster(2) as job:
        assert job.run(0, _calls_of_a_forked_child) == (False, True)
        job.run(0, _stop)
