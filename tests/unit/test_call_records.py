"""What is told of a call, whichever thread is faster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farprop.protocol.events import OK, ClientCall, Event
from farprop.runtime.call_records import RPC_ASYNC, CallRecord
from farprop.runtime.recorder import recorder
from farprop.wire.message import ANSWER, Message


@pytest.fixture
def told() -> Iterator[list[Event]]:
    events: list[Event] = []
    unsubscribe = recorder.subscribe(events.append)
    yield events
    unsubscribe()


def _record() -> CallRecord:
    return CallRecord(RPC_ASYNC, 1.0, Message(b"request", [], name=b"module:function"), waits=False)


def test_answer_may_be_there_before_the_thread_that_sent_the_request_goes_on(told: list[Event]) -> None:
    record = _record()
    record.on_sending("worker1", 7, None)
    record.on_answer(Message(b"answer", [], kind=ANSWER))
    record.end(None)
    record.on_sent()
    record.end(None)
    (event,) = told
    assert isinstance(event, ClientCall)
    assert (event.callee, event.number, event.outcome) == ("worker1", 7, OK)
    assert event.began <= event.sent <= event.answered <= event.ended


def test_call_that_could_not_be_sent_is_not_told(told: list[Event]) -> None:
    record = _record()
    record.end(ValueError("encoding"))
    record = _record()
    record.on_sending("worker1", 7, None)
    record.end(ConnectionError("sending"))
    assert told == []


def test_call_that_fails_after_it_was_sent_is_told(told: list[Event]) -> None:
    record = _record()
    record.on_sending("worker1", 7, None)
    record.on_sent()
    record.end(TimeoutError("late"))
    assert [event.outcome for event in told if isinstance(event, ClientCall)] == ["TimeoutError"]
