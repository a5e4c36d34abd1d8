"""Spans of calls between real workers, by OpenTelemetry's SDK."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import farprop.rpc as rpc
from farprop.errors import UsageError
from farprop.runtime.call_records import ServedRecord
from farprop.runtime.recorder import recorder
from farprop.telemetry import opentelemetry
from farprop.wire.message import Message
from tests.support.workers import cluster
from tests.telemetry import functions as f

pytestmark = pytest.mark.one_transport


def test_spans_of_nested_calls_are_one_trace() -> None:
    add, nested = f"{f.__name__}:add", f"{f.__name__}:nested"
    with cluster(3) as job:
        for rank in range(3):
            job.run(rank, f.make_spans)
        its_id, _ = job.run(0, f.under_a_span, rpc.rpc_sync, "worker1", f.nested, ("worker2",))
        (first, program), (inner, served), (last,) = (
            job.run(rank, f.finished, count) for rank, count in enumerate((2, 2, 1))
        )
        assert {span["trace"] for span in (first, program, inner, served, last)} == {its_id}
        assert [(span["name"], span["kind"]) for span in (first, served, inner, last)] == [
            (nested, "CLIENT"),
            (nested, "SERVER"),
            (add, "CLIENT"),
            (add, "SERVER"),
        ]
        chain = [program, first, served, inner, last]
        assert [span["parent"] for span in chain] == [None, *(span["id"] for span in chain[:-1])]
        for one, other in ((first, served), (inner, last)):
            assert one["attributes"]["farprop.call_id"] == other["attributes"]["farprop.call_id"]
        assert first["attributes"]["farprop.call_id"].startswith("worker0>worker1#")
        assert first["attributes"]["farprop.kind"] == "rpc_sync"
        for rank in range(3):
            job.run(rank, f.stop)
        job.run(0, f.under_a_span, rpc.rpc_sync, "worker1", f.nested, ("worker2",))
        assert [len(job.run(rank, f.finished, 0)) for rank in range(3)] == [1, 0, 0]


def test_called_functions_are_in_the_trace_and_errors_are_marked() -> None:
    with cluster(2) as job:
        for rank in (0, 1):
            job.run(rank, f.make_spans)
        its_id, inside = job.run(0, f.under_a_span, f.call_async, "worker1", f.current_trace)
        assert inside == (its_id, "ada")
        job.run(0, f.finished, 2), job.run(1, f.finished, 1)
        with pytest.raises(KeyError):
            job.run(0, rpc.rpc_sync, "worker1", f.fail)
        (client,), (server,) = job.run(0, f.finished, 1), job.run(1, f.finished, 1)
        assert client["status"] == server["status"] == "ERROR"
        assert client["attributes"]["error.type"] == server["attributes"]["error.type"] == "KeyError"
        job.run(1, f.stop)
        its_id, _ = job.run(0, rpc.rpc_sync, "worker1", f.current_trace)
        assert its_id == "0" * 32  # the callee makes no spans, and runs the call nevertheless
        job.run(0, f.stop)


@pytest.mark.parametrize("raises", [False, True])
def test_the_thread_leaves_the_trace(raises: bool) -> None:
    stop = opentelemetry.start(TracerProvider())
    served = ServedRecord("w0", Message(b"", [], name=b"module:function"), 0.0)
    served.on_decoded(f.fail, ())
    assert trace.get_current_span().get_span_context().is_valid
    if raises:
        served.end(Message(b"", []))  # the failure is sent before the function has been left
    served.on_returned()
    assert not trace.get_current_span().get_span_context().is_valid
    stop()


def test_a_tracer_that_fails_is_dropped() -> None:
    with cluster(2) as job:
        assert job.run(0, f.break_tracer)


def test_started_twice() -> None:
    stop = opentelemetry.start()
    with pytest.raises(UsageError, match="already"):
        opentelemetry.start()
    stop()
    stop()
    assert recorder.tracer is None
    assert not recorder.is_on
