"""Metrics for Prometheus: calls by function and outcome, times, bytes, and what is open now.

A collector sums up the events of this process (``farprop.runtime.recorder``), and reads the rest when it is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from wsgiref.simple_server import WSGIServer

try:
    from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric
except ImportError as error:
    raise ImportError("farprop.telemetry.prometheus needs prometheus_client: pip install 'farprop[metrics]'") from error

from farprop.errors import UsageError
from farprop.locks import make_lock
from farprop.protocol.call_stats import CallStat, CallStats, total, upper_bound
from farprop.protocol.events import OK, Event, Span
from farprop.runtime.agent import Agent
from farprop.runtime.agent_registry import current_agent, is_agent_set
from farprop.runtime.recorder import recorder

_MOST_FUNCTIONS = 100
_MOST_ERRORS = 50
_OTHER = "other"
# Every third bucket of the sums, from 7.6 µs to 14 minutes: each is about twice as long as the one before.
_BOUNDS = range(9, 93, 3)


class Collector:
    """Farprop's metrics of this process. ``register`` makes one.

    Args:
        most_functions: the names of functions are labels; those beyond the first so many are summed up as ``other``.
    """

    def __init__(self, most_functions: int = _MOST_FUNCTIONS) -> None:
        self._most_functions = most_functions
        self._lock = make_lock("metrics")
        self._stats = CallStats()
        self._errors: dict[tuple[str, str], int] = {}
        self._functions: set[str] = set()
        self._unsubscribe: Callable[[], None] | None = recorder.subscribe(self._on_event)

    def _on_event(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, Span) or event.system:
                return
            self._stats.add(event)
            if event.outcome != OK:
                side = "client" if hasattr(event, "callee") else "server"
                kind = side, event.outcome
                if kind not in self._errors and len(self._errors) >= _MOST_ERRORS:
                    kind = side, _OTHER
                self._errors[kind] = self._errors.get(kind, 0) + 1

    def close(self) -> None:
        """Listen to no more events. A second time does nothing."""
        unsubscribe, self._unsubscribe = self._unsubscribe, None
        if unsubscribe is not None:
            unsubscribe()

    # Called by prometheus_client

    def describe(self) -> Iterable[Metric]:
        """Called by ``prometheus_client``: the metrics need not be known when the collector is registered.

        Returns:
            Nothing.
        """
        return []

    def collect(self) -> Iterator[Metric]:
        """Called by ``prometheus_client`` for each scrape.

        Yields:
            The metrics.
        """
        with self._lock:
            rows = [row.copy() for row in self._stats.rows()]
            errors = dict(self._errors)
        yield from self._call_metrics(rows)
        failed = CounterMetricFamily("farprop_call_errors", "Failed calls, by exception.", labels=["side", "error"])
        for (side, kind), count in errors.items():
            failed.add_metric([side, kind], count)
        yield failed
        if is_agent_set() and isinstance(agent := current_agent(), Agent):
            yield from _agent_metrics(agent)

    def _call_metrics(self, rows: list[CallStat]) -> Iterator[Metric]:
        labels = ["side", "function"]
        calls = CounterMetricFamily("farprop_calls", "Calls that have ended.", labels=[*labels, "outcome"])
        sent = CounterMetricFamily("farprop_sent_bytes", "Bytes of messages of these calls.", labels=labels)
        received = CounterMetricFamily("farprop_received_bytes", "Bytes of messages of these calls.", labels=labels)
        text = "Seconds that calls took: the whole call at its caller, from its arrival to its answer at its callee."
        seconds = HistogramMetricFamily("farprop_call_seconds", text, labels=labels)
        for row in self._by_function(rows):
            names = [row.side, row.function]
            calls.add_metric([*names, "ok"], row.calls - row.errors)
            calls.add_metric([*names, "error"], row.errors)
            sent.add_metric(names, row.sent_bytes)
            received.add_metric(names, row.received_bytes)
            seconds.add_metric(names, _cumulative(row), row.seconds)
        yield from (calls, sent, received, seconds)

    def _by_function(self, rows: list[CallStat]) -> list[CallStat]:
        """The sums over all peers, with the functions beyond the limit as one."""
        found: dict[tuple[str, str], list[CallStat]] = {}
        for row in rows:
            # Who has a label keeps it: a counter must not go down.
            if row.function not in self._functions and len(self._functions) < self._most_functions:
                self._functions.add(row.function)
            function = row.function if row.function in self._functions else _OTHER
            found.setdefault((row.side, function), []).append(row)
        return [total(same, side, function=function) for (side, function), same in found.items()]


def _cumulative(row: CallStat) -> list[tuple[str, float]]:
    """The histogram as Prometheus has it: how many calls took at most so long."""
    counts = [
        (f"{upper_bound(bound):.3g}", float(sum(n for bucket, n in row.buckets.items() if bucket <= bound)))
        for bound in _BOUNDS
    ]
    return [*counts, ("+Inf", float(row.calls))]


def _agent_metrics(agent: Agent) -> Iterator[Metric]:
    own = agent.get_worker_info()
    info = GaugeMetricFamily("farprop_worker", "1, with the name of this worker.", labels=["worker", "rank", "job"])
    info.add_metric([own.name, str(own.id), agent.snapshots.job], 1)
    yield info
    facts = agent.get_debug_info()
    in_flight = GaugeMetricFamily("farprop_calls_in_flight", "Calls without an answer.", labels=["side"])
    in_flight.add_metric(["client"], float(facts["agent.client_active_calls"]))
    in_flight.add_metric(["server"], float(facts["agent.server_active_calls"]))
    yield in_flight
    queued = GaugeMetricFamily("farprop_calls_queued", "Calls that wait for a thread.")
    queued.add_metric([], float(facts["agent.num_pending_requests"]))
    yield queued
    counts = agent.references.counts()
    references = GaugeMetricFamily(
        "farprop_references", "Values of this worker that references keep, and the references to them.", labels=["kind"]
    )
    references.add_metric(["values"], float(counts["num_owner_rrefs"]))
    references.add_metric(["forks"], float(counts["num_forks"]))
    yield references
    for name, text in (
        ("num_current_backward_passes", "Backward passes that run."),
        ("num_autograd_contexts", "Autograd contexts that exist."),
    ):
        gauge = GaugeMetricFamily(f"farprop_{name.removeprefix('num_').removeprefix('current_')}", text)
        gauge.add_metric([], float(agent.gradients.debug_info()[name]))
        yield gauge


# What programs call


def register(registry: CollectorRegistry = REGISTRY, most_functions: int = _MOST_FUNCTIONS) -> Callable[[], None]:
    """Add farprop's metrics to a registry. Calls are counted from now on, before and after ``init_rpc``.

    Args:
        registry: The registry; by default the one that ``prometheus_client`` exports.
        most_functions: How many functions get a label of their own. The calls of further ones are those of ``other``.

    Returns:
        A function that removes them. A second time does nothing.

    Example:
        ``remove = farprop.telemetry.prometheus.register()``
    """
    collector = Collector(most_functions)
    registry.register(collector)
    left = [collector]

    def remove() -> None:
        if left:
            collector.close()
            registry.unregister(left.pop())

    return remove


class MetricsServer:
    """A server of metrics. ``start`` makes one.

    Args:
        server: the HTTP server.
        thread: which runs it.
        remove: has calls counted no more.
    """

    def __init__(self, server: WSGIServer, thread: threading.Thread, remove: Callable[[], None]) -> None:
        self._server = server
        self._thread = thread
        self._remove = remove
        self._is_closed = False
        self.port: int = server.server_port

    def close(self) -> None:
        """Stop the server, and count no more calls. A second time does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._remove()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def start(port: int, addr: str = "127.0.0.1", most_functions: int = _MOST_FUNCTIONS) -> MetricsServer:
    """Serve the metrics of this worker, farprop's and those of ``prometheus_client``'s registry, over HTTP.

    Every worker has a server of its own, so workers of one host need different ports.

    Args:
        port: The port; 0 for one that is free.
        addr: The address to listen on. Whoever reaches it sees the names of functions: there is no password.
        most_functions: As for ``register``.

    Returns:
        The server: ``close`` ends it, ``port`` is its port.

    Raises:
        UsageError: The port can't be listened on.

    Example:
        ``farprop.telemetry.prometheus.start(9400 + rank)``
    """
    remove = register(REGISTRY, most_functions)
    try:
        server, thread = start_http_server(port, addr)
    except OSError as error:
        remove()
        raise UsageError(f"Can't serve metrics on {addr}, port {port}: {error}.") from error
    return MetricsServer(server, thread, remove)
