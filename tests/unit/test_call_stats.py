"""Sums of calls: histograms, differences and limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farprop.protocol.call_stats import CLIENT, OTHER, SERVER, CallStats, bucket_of, quantile, total, upper_bound
from farprop.protocol.events import ClientCall, ServedCall, Span

SECONDS = st.floats(min_value=0.0, max_value=1e6, allow_nan=False)


def client(function: str = "f", callee: str = "w1", seconds: float = 0.001, outcome: str = "ok") -> ClientCall:
    return ClientCall(
        callee, 1, function, "rpc_sync", 1, None, None, 0.0, 0.0, 0.0, seconds, seconds, 10, 20, outcome, False
    )


@given(SECONDS)
def test_time_is_within_its_bucket(seconds: float) -> None:
    bucket = bucket_of(seconds)
    assert seconds <= upper_bound(bucket) * (1 + 1e-9)
    assert bucket == 0 or seconds > upper_bound(bucket - 1) * (1 - 1e-9)


@given(st.lists(st.floats(min_value=2e-6, max_value=1e4), min_size=1), st.floats(min_value=0.0, max_value=1.0))
def test_quantile_is_right_to_an_eighth(times: list[float], share: float) -> None:
    buckets: dict[int, int] = {}
    for seconds in times:
        buckets[bucket_of(seconds)] = buckets.get(bucket_of(seconds), 0) + 1
    found = quantile(buckets, share)
    assert found is not None
    assert any(abs(found / seconds - 1) < 0.13 for seconds in times)
    below = sum(seconds <= found * 1.13 for seconds in times)
    assert below >= share * len(times) * (1 - 1e-9)


def test_quantile_of_nothing_is_none() -> None:
    assert quantile({}, 0.5) is None


def test_calls_are_summed_up_by_side_peer_and_function() -> None:
    stats = CallStats()
    stats.add(client())
    stats.add(client(outcome="ValueError", seconds=0.002))
    stats.add(client(callee="w2"))
    stats.add(ServedCall("w3", 1, "g", 1, None, 1.0, 1.1, 1.2, 1.3, 1.5, 7, 8, "ok"))
    stats.add(ServedCall("w3", 2, "own", 1, None, 1.0, 1.1, 1.2, 1.3, 1.5, 7, 8, "ok", system=True))
    stats.add(Span("hook", "h", 1, 0.0, 1.0))
    rows = {(row.side, row.peer, row.function): row for row in stats.rows()}
    assert set(rows) == {(CLIENT, "w1", "f"), (CLIENT, "w2", "f"), (SERVER, "w3", "g")}
    both = rows[CLIENT, "w1", "f"]
    assert (both.calls, both.errors, both.sent_bytes, both.received_bytes) == (2, 1, 20, 40)
    assert abs(both.seconds - 0.003) < 1e-12
    assert abs(rows[SERVER, "w3", "g"].seconds - 0.5) < 1e-12
    assert total(stats.rows(), CLIENT).calls == 3


@given(st.lists(SECONDS), st.lists(SECONDS))
def test_difference_of_two_moments_is_what_came_between(first: list[float], second: list[float]) -> None:
    stats = CallStats()
    for seconds in first:
        stats.add(client(seconds=seconds))
    before = {row.function: row.copy() for row in stats.rows()}
    between = CallStats()
    for seconds in second:
        stats.add(client(seconds=seconds))
        between.add(client(seconds=seconds))
    for row in stats.rows():
        grown = row.since(before.get(row.function))
        (expected,) = between.rows() or [row.since(row)]
        assert (grown.calls, grown.buckets) == (expected.calls, expected.buckets)


def test_worker_that_began_anew_counts_from_nothing() -> None:
    (before,) = _after(3).rows()
    (now,) = _after(2).rows()
    assert now.since(before).calls == 2


def test_further_functions_are_summed_up_as_other() -> None:
    stats = CallStats(most_rows=2)
    for function in "abcd":
        stats.add(client(function))
    assert {row.function: row.calls for row in stats.rows()} == {"a": 1, "b": 1, OTHER: 2}


def _after(calls: int) -> CallStats:
    stats = CallStats()
    for _ in range(calls):
        stats.add(client())
    return stats
