"""Metrics of real workers, read over HTTP and parsed as Prometheus would."""

from __future__ import annotations

import socket

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from farprop.errors import UsageError
from farprop.protocol.events import ClientCall
from farprop.runtime.recorder import recorder
from farprop.telemetry import prometheus
from tests.references.looking import wait_until
from tests.support.workers import cluster
from tests.telemetry import functions as f

pytestmark = pytest.mark.one_transport


_LABELS = ("side", "function", "outcome", "error", "le", "kind", "worker", "rank", "job")


def _parsed(text: str) -> dict[tuple[str, ...], float]:
    """Samples by name and labels."""
    return {
        (sample.name, *(sample.labels[label] for label in _LABELS if label in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_of_both_ends() -> None:
    add, fail = f"{f.__name__}:add", f"{f.__name__}:fail"
    with cluster(2) as job:
        ports = [job.run(rank, f.serve_metrics) for rank in (0, 1)]
        job.run(0, f.call_many, "worker1")
        # A call is counted after its answer was sent, or its future was set.
        for port, side in zip(ports, ("client", "server"), strict=True):
            counts = (add, "ok", 4.0), (fail, "error", 2.0)
            done = {("farprop_calls_total", side, function, outcome): count for function, outcome, count in counts}
            wait_until(lambda port=port, done=done: done.items() <= _parsed(f.scrape(port)).items())
        client, server = (_parsed(f.scrape(port)) for port in ports)
        for side, found in (("client", client), ("server", server)):
            assert found["farprop_calls_total", side, add, "ok"] == 4
            assert found["farprop_calls_total", side, add, "error"] == 0
            assert found["farprop_calls_total", side, fail, "error"] == 2
            assert found["farprop_call_errors_total", side, "KeyError"] == 2
            assert found["farprop_call_seconds_count", side, add] == 4
            assert found["farprop_call_seconds_bucket", side, add, "+Inf"] == 4
            assert 0 < found["farprop_call_seconds_sum", side, add] < 120
            for name in ("farprop_sent_bytes_total", "farprop_received_bytes_total"):
                assert 4 * 4000 <= found[name, side, add] < 4 * 5000
        assert client["farprop_calls_in_flight", "client"] == 0
        assert client["farprop_backward_passes",] == 0
        assert ("farprop_references", "values") in server
        assert [key[1:3] for key in server if key[0] == "farprop_worker"] == [("worker1", "1")]
        assert not [key for key in client if "_all_gather" in str(key) or "inspect" in str(key)]
        for rank in (0, 1):
            job.run(rank, f.stop)


def test_functions_beyond_the_limit_are_one() -> None:
    with cluster(2) as job:
        port = job.run(0, f.serve_metrics, 2)
        job.run(0, f.call_others, "worker1")
        found = _parsed(f.scrape(port))
        calls = [key for key in found if key[0] == "farprop_calls_total" and key[3] == "ok"]
        functions = {key[2]: found[key] for key in calls}
        assert len(functions) == 3
        assert functions["other"] == 2
        before = found
        job.run(0, f.call_others, "worker1")
        after = _parsed(f.scrape(port))
        assert all(after[key] >= value for key, value in before.items() if key[0].endswith(("_total", "_bucket")))
        job.run(0, f.stop)


class _Ended:
    """A call of ``g`` that took so long."""

    def __init__(self, seconds: float, outcome: str, system: bool) -> None:
        self._call = ClientCall(
            "w1", 1, "g", "rpc_sync", 1, None, None, 0.0, 0.0, 0.0, seconds, seconds, 10, 20, outcome, system
        )

    def event(self) -> ClientCall:
        return self._call


def test_without_a_worker_and_twice() -> None:
    registry = CollectorRegistry()
    remove = prometheus.register(registry)
    recorder.record(_Ended(0.004, "ValueError", system=False))
    recorder.record(_Ended(99.0, "ok", system=True))
    labels = {"side": "client", "function": "g"}
    assert registry.get_sample_value("farprop_calls_total", {**labels, "outcome": "error"}) == 1
    buckets = [
        (float(sample.labels["le"]), sample.value)
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "farprop_call_seconds_bucket"
    ]
    assert all((count == 1) == (bound >= 0.004) for bound, count in buckets)
    assert registry.get_sample_value("farprop_worker", {}) is None
    remove()
    remove()
    assert not recorder.is_on
    assert not list(registry.collect())


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="Can't serve metrics on 127.0.0.1"):
            prometheus.start(taken.getsockname()[1])
    assert not recorder.is_on
    server = prometheus.start(0)
    assert "farprop_call_errors" in f.scrape(server.port)
    server.close()
    server.close()
    assert not recorder.is_on
