"""How slices of threads become the time of a worker."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farprop.profiler.chrome import ChromeTrace
from farprop.profiler.session import WorkerTrace
from farprop.profiler.summary import call_times, missing_parts, states_of_thread, summarize
from farprop.profiler.text import duration, table
from farprop.profiler.timeline import COMPUTING, ENCODING, WAITING, Call, Slice, Worker, nested
from farprop.protocol.events import BACKWARD, UNFINISHED, WAIT, ClientCall, Event, ServedCall, Span
from farprop.protocol.inspection import Member
from farprop.protocol.recording import SAME_CLOCK, Operator, Recorded


def _slice(began: float, ended: float, state: str | None = COMPUTING) -> Slice:
    return Slice(began, ended, "", "", state)


def test_slices_are_cut_at_the_end_of_the_one_that_they_began_in() -> None:
    found = list(nested([_slice(5, 11), _slice(0, 10), _slice(10, 12), _slice(2, 3), _slice(7, 7)]))
    assert [(one.began, one.ended) for one in found] == [(0, 10), (2, 3), (5, 10), (10, 12)]


def test_innermost_slice_says_what_a_thread_does() -> None:
    slices = list(nested([_slice(1, 9, COMPUTING), _slice(2, 5, WAITING), _slice(3, 4, ENCODING), _slice(6, 7, None)]))
    assert list(states_of_thread(slices, None)) == [
        (1, 2, COMPUTING),
        (2, 3, WAITING),
        (3, 4, ENCODING),
        (4, 5, WAITING),
        (5, 6, COMPUTING),
        (6, 7, COMPUTING),
        (7, 9, COMPUTING),
    ]
    assert list(states_of_thread([_slice(2, 3, WAITING)], _slice(1, 4))) == [
        (1, 2, COMPUTING),
        (2, 3, WAITING),
        (3, 4, COMPUTING),
    ]


def _client(thread: int, *times: float, waits: bool = True, parent: tuple[str, int] | None = None) -> ClientCall:
    return ClientCall("b", 1, "m:f", "rpc_sync", thread, parent, None, *times, 0, 0, "ok", False, waits)


def _served(thread: int, *times: float, later: bool = False) -> ServedCall:
    return ServedCall("b", 1, "m:g", thread, None, *times, 0, 0, "ok", False, later)


def _worker(*events: Event, own_thread: int | None = None, operators: Any = (), **more: Any) -> Worker:
    threads = {1: "MainThread", 2: "farprop-a", 3: "farprop-a"}
    recorded = Recorded(0.0, 10.0, list(events), 0, list(operators), 0, [], threads, 1, 1.0, **more)
    return Worker(WorkerTrace(Member("a", 0, "host", 1, "net"), recorded, SAME_CLOCK), own_thread)


def _shares(worker: Worker) -> tuple[float, float, float, float]:
    found = summarize(worker)
    assert found.wall == 10
    return found.computing, found.encoding, found.waiting, found.idle


def test_worker_computes_if_one_of_its_threads_does() -> None:
    # The main thread waits from 2 to 8. Meanwhile another one serves a call, and computes from 4 to 5.
    worker = _worker(_client(1, 1, 1.5, 2, 8, 8.5), _served(2, 3, 3, 4, 5, 6))
    computing, encoding, waiting, idle = _shares(worker)
    assert computing == pytest.approx(1)
    assert encoding == pytest.approx(1 + 1 + 0.5 + 1)  # 1 to 2, 8 to 8.5, 3 to 4, 5 to 6
    assert waiting == pytest.approx(10 - 1 - 3.5 - 2.5)
    assert idle == pytest.approx(2.5)  # before the first call, and after the last
    assert summarize(worker).bubble == pytest.approx(1 - 4.5 / 7.5)


def test_thread_that_records_computes_between_its_calls() -> None:
    assert _shares(_worker(_client(1, 1, 1.5, 2, 8, 8.5), own_thread=1)) == pytest.approx((2.5, 1.5, 6, 0))


def test_threads_with_calls_of_their_own_compute_between_them() -> None:
    first, second = _client(1, 1, 1, 1, 2, 2), _client(1, 6, 6, 6, 7, 7)
    assert _shares(_worker(first, second)) == pytest.approx((4, 0, 2, 4))
    # Calls of a called function are its own time.
    first, second = _client(2, 1, 1, 1, 2, 2, parent=("b", 7)), _client(2, 6, 6, 6, 7, 7, parent=("b", 8))
    assert _shares(_worker(first, second)) == pytest.approx((0, 0, 2, 8))


def test_call_that_nobody_waits_for_takes_its_thread_while_it_is_sent() -> None:
    call = _client(1, 1, 1.5, 2, 9, 9.5, waits=False)
    wait = Span(WAIT, "wait", 1, 4, 9.5)
    assert _shares(_worker(call, wait)) == pytest.approx((2, 1, 5.5, 1.5))


def test_function_that_returns_a_future_computes_until_then() -> None:
    assert _shares(_worker(_served(2, 1, 1, 2, 3, 9, later=True))) == pytest.approx((1, 1, 0, 8))


def test_calls_that_had_not_ended_count_until_the_end() -> None:
    # The main thread has waited since before the recording. A call of it runs since 4, and another one is queued.
    waits = msgspec.structs.replace(_client(1, -5, -5, -5, 10, 10), outcome=UNFINISHED)
    runs = msgspec.structs.replace(_served(2, 3, 3, 4, 10, 10), outcome=UNFINISHED)
    queued = msgspec.structs.replace(_served(0, 6, 10, 10, 10, 10), number=2, outcome=UNFINISHED)
    worker = _worker(unfinished=[waits, runs, queued])
    assert _shares(worker) == pytest.approx((6, 1, 3, 0))
    assert set(worker.threads()) == {1, 2}
    assert "began before the recording (s)" in worker.threads()[1][0].details
    events = list(ChromeTrace([worker], [], worker.began).events())
    assert min(event["ts"] for event in events if "ts" in event) == 0
    assert [(event["id"], event["ts"]) for event in events if event["name"] == "queued"] == [
        ("b>a#2", 6e6),
        ("b>a#2", 1e7),
    ]


def test_parts_of_a_call_add_up_if_it_runs_on_after_its_caller_gave_up() -> None:
    client = msgspec.structs.replace(_client(1, 1, 1.5, 2, 5, 5), outcome="RpcTimeoutError")
    for times in ((2, 3, 3.5, 10, 10), (2, 10, 10, 10, 10)):  # it runs, or is queued
        served = msgspec.structs.replace(_served(2, *times), outcome=UNFINISHED)
        (found,) = call_times([Call("a", "b", 1, client, served)], 0)
        assert found.queue is not None
        assert found.run is not None
        assert found.wire is not None
        assert min(found.encode, found.queue, found.run, found.wire) >= 0
        assert found.encode + found.queue + found.run + found.wire == pytest.approx(found.seconds)


def test_calls_that_were_left_out_are_missing() -> None:
    worker = _worker(dropped_unfinished=1200)
    assert missing_parts([worker], {}) == {"a": "1,200 more calls that had not ended"}


def test_backward_and_operators_compute() -> None:
    assert _shares(_worker(Span(BACKWARD, "backward", 2, 1, 4))) == pytest.approx((3, 0, 0, 7))
    assert _shares(_worker(operators=[Operator("aten::mm", 1, 2, 4)])) == pytest.approx((2, 0, 0, 8))
    # What decodes arguments is an operator, too, and no work of the program's.
    decoding = _worker(_served(2, 1, 1, 2, 3, 4), operators=[Operator("aten::empty", 2, 1.2, 1.8)])
    assert _shares(decoding) == pytest.approx((1, 2, 0, 7))


def test_texts() -> None:
    assert [duration(seconds) for seconds in (None, 0, 1.5e-5, 0.00123, 0.0456, 0.789, 1.5, 99, 1234)] == [
        "-", "0 µs", "15 µs", "1.23 ms", "45.6 ms", "789 ms", "1.50 s", "99.0 s", "1234 s",
    ]  # fmt: skip
    assert table(("name", "x"), [("a", "10"), ("long name", "1")]) == "name        x\na          10\nlong name   1"
