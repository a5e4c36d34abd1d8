"""What the workers of these tests run."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from typing import Any

import torch
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import farprop.rpc as rpc
import farprop.telemetry.opentelemetry as spans
import farprop.telemetry.prometheus as metrics
from farprop.runtime.recorder import recorder
from tests.references.looking import wait_until

_left: list[Callable[[], Any]] = []
_exporter = InMemorySpanExporter()
_provider = TracerProvider()


def add(x: torch.Tensor, y: float) -> torch.Tensor:
    return x + y


def fail() -> None:
    raise KeyError("no such key")


def nested(to: str) -> torch.Tensor:
    return rpc.rpc_sync(to, add, (torch.ones(2), 1.0))  # type: ignore[no-any-return]


def current_trace() -> tuple[str, str]:
    """The trace that the called function is in, and the baggage that came with it."""
    found = trace.get_current_span().get_span_context()
    return f"{found.trace_id:032x}", str(baggage.get_baggage("user"))


def stop() -> None:
    while _left:
        _left.pop()()
    assert not recorder.is_on
    assert recorder.tracer is None


# Metrics


def serve_metrics(most_functions: int = 100) -> int:
    server = metrics.start(0, most_functions=most_functions)
    _left.append(server.close)
    return server.port


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()  # type: ignore[no-any-return]


def call_many(to: str) -> None:
    for _ in range(3):
        rpc.rpc_sync(to, add, (torch.ones(1000), 1.0))
    rpc.rpc_async(to, add, (torch.ones(1000), 1.0)).wait()
    for _ in range(2):
        try:
            rpc.rpc_sync(to, fail)
        except KeyError:
            pass


def call_others(to: str) -> None:
    for function in (torch.add, torch.mul, torch.sub, torch.div):
        rpc.rpc_sync(to, function, (torch.ones(2), 2))


# Spans


def make_spans() -> None:
    if not _exporter.get_finished_spans() and not _provider._active_span_processor._span_processors:
        _provider.add_span_processor(SimpleSpanProcessor(_exporter))
    _left.append(spans.start(_provider))


def finished(count: int) -> list[dict[str, Any]]:
    """The spans that have ended, once there are so many: at a callee they end after the answer is sent."""
    wait_until(lambda: len(_exporter.get_finished_spans()) >= count)
    found = [_described(span) for span in _exporter.get_finished_spans()]
    _exporter.clear()
    return found


def _described(span: ReadableSpan) -> dict[str, Any]:
    own = span.get_span_context()
    assert own is not None
    return {
        "name": span.name,
        "kind": span.kind.name,
        "trace": f"{own.trace_id:032x}",
        "id": own.span_id,
        "parent": None if span.parent is None else span.parent.span_id,
        "status": span.status.status_code.name,
        "attributes": dict(span.attributes or {}),
    }


def under_a_span(function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    with _provider.get_tracer("test").start_as_current_span("program") as span:
        token = context.attach(baggage.set_baggage("user", "ada"))
        try:
            return f"{span.get_span_context().trace_id:032x}", function(*args)
        finally:
            context.detach(token)


def call_async(to: str, function: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_async(to, function, args).wait()


class Broken:
    """A tracer that fails."""

    def client_span(self, *args: Any) -> Any:
        raise ValueError("no spans today")

    server_span = client_span


def break_tracer() -> bool:
    """Whether calls go on without a tracer that fails."""
    unsubscribe = recorder.subscribe(lambda event: None)
    recorder.tracer = Broken()
    try:
        value = rpc.rpc_sync("worker1", add, (torch.ones(2), 1.0))
        return bool((value == 2).all()) and recorder.tracer is None
    finally:
        unsubscribe()
