"""Spans of calls for OpenTelemetry, at both ends, with the context of the trace carried in the call.

Only OpenTelemetry's API is used: without an SDK that the program has set up, nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable

try:
    from opentelemetry import context as otel_context
    from opentelemetry import propagate, trace
except ImportError as error:
    raise ImportError("farprop.telemetry.opentelemetry needs OpenTelemetry: pip install 'farprop[otel]'") from error

from farprop.errors import UsageError
from farprop.protocol.events import OK
from farprop.runtime.agent_registry import current_agent, is_agent_set
from farprop.runtime.recorder import recorder

_MOST_CARRIED = 4096  # characters: baggage of the program's travels in every call


def start(tracer_provider: trace.TracerProvider | None = None) -> Callable[[], None]:
    """Make spans of this worker's calls from now on: of those that it makes, and of those that it runs for others.

    The span of a called function is a child of the caller's span if both workers have called this. Farprop's own calls
    have no spans.

    Args:
        tracer_provider: Where the tracer comes from; by default the program's global provider.

    Returns:
        A function that stops it. A second time does nothing.

    Raises:
        UsageError: It has been started already.

    Example:
        ``stop = farprop.telemetry.opentelemetry.start()``
    """
    if recorder.tracer is not None:
        raise UsageError("Spans of calls are made already. Stop that first.")
    tracer = _Tracer(trace.get_tracer("farprop", tracer_provider=tracer_provider))
    recorder.tracer = tracer
    unsubscribe = recorder.subscribe(_ignore)

    def stop() -> None:
        if recorder.tracer is tracer:
            recorder.tracer = None
        unsubscribe()

    return stop


def _ignore(event: object) -> None:
    """Spans are made by the tracer. This only has the recorder make records of calls."""


class _Tracer:
    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def client_span(self, kind: str, function: str, began: float) -> _Span:
        span = self._tracer.start_span(
            function,
            kind=trace.SpanKind.CLIENT,
            attributes={"rpc.system": "farprop", "rpc.method": function, "farprop.kind": kind},
            start_time=_wall(began),
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span))
        if sum(len(name) + len(value) for name, value in carrier.items()) > _MOST_CARRIED:
            carrier = {name: value for name, value in carrier.items() if name == "traceparent"}
        return _Span(span, carrier)

    def server_span(self, function: str, carrier: dict[str, str], arrived: float) -> _Span:
        context = propagate.extract(carrier)
        span = self._tracer.start_span(
            function,
            context,
            kind=trace.SpanKind.SERVER,
            attributes={
                "rpc.system": "farprop",
                "rpc.method": function,
                "farprop.queue_seconds": time.monotonic() - arrived,
            },
            start_time=_wall(arrived),
        )
        entered = _Span(span, {})
        entered.token = otel_context.attach(trace.set_span_in_context(span, context))
        return entered


class _Span:
    """A call at one of its ends; see ``farprop.runtime.recorder.CallSpan``."""

    def __init__(self, span: trace.Span, carrier: dict[str, str]) -> None:
        self.carrier = carrier
        self.token: object = None
        self._span = span

    def leave(self) -> None:
        token, self.token = self.token, None
        if token is not None:
            otel_context.detach(token)  # type: ignore[arg-type]

    def end(self, caller: str, callee: str, number: int, outcome: str) -> None:
        own = current_agent().get_worker_info().name if is_agent_set() else ""
        caller, callee = caller or own, callee or own
        self._span.set_attribute("farprop.caller", caller)
        self._span.set_attribute("farprop.callee", callee)
        if number:
            self._span.set_attribute("farprop.call_id", f"{caller}>{callee}#{number}")
        if outcome != OK:
            self._span.set_attribute("error.type", outcome)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, outcome))
        self._span.end()


def _wall(at: float) -> int:
    """A moment of the monotonic clock as OpenTelemetry has it: nanoseconds of the time of day."""
    return time.time_ns() - int((time.monotonic() - at) * 1e9)
