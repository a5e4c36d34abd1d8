"""What workers say they have done of late, from one of them and from outside of the job."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import farprop.inspect
import farprop.rpc as rpc
from farprop.inspect import Recent, Silence
from farprop.inspect.outside import recent
from farprop.protocol.call_stats import CLIENT, SERVER, quantile
from farprop.protocol.events import ClientCall, Span
from farprop.runtime import recent_work
from farprop.runtime.recorder import recorder
from tests.inspection import functions as f
from tests.references.looking import wait_until
from tests.support.workers import Cluster, cluster

pytestmark = pytest.mark.one_transport


def _call(count: int) -> None:
    for _ in range(count):
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(10), 1))


def _fail() -> None:
    with pytest.raises(ValueError, match="no such thing"):
        rpc.rpc_sync("worker1", f.raise_value_error)


def _calls_of(answer: Recent | Silence, side: str) -> dict[str, tuple[int, int]]:
    assert isinstance(answer, Recent)
    return {row.function: (row.calls, row.errors) for row in answer.stats if row.side == side}


def _named(job: Cluster) -> str:
    return job.run(0, lambda: farprop.inspect.job().id)


def _check(first: dict[str, Recent | Silence], second: dict[str, Recent | Silence]) -> None:
    """``first`` is of before ten calls and one that failed, ``second`` of after them, with the cursors of ``first``."""
    assert set(first) == set(second) == {"worker0", "worker1"}
    assert _calls_of(first["worker0"], CLIENT) == {}
    failed = next(name for name in _calls_of(second["worker0"], CLIENT) if name.endswith("raise_value_error"))
    assert _calls_of(second["worker0"], CLIENT) == {"torch:add": (10, 0), failed: (1, 1)}
    assert _calls_of(second["worker1"], SERVER) == {"torch:add": (10, 0), failed: (1, 1)}
    answer = second["worker0"]
    assert isinstance(answer, Recent)
    events = [event for event in answer.events if isinstance(event, ClientCall)]
    assert len(events) == 11
    assert answer.missing == 0
    row = next(row for row in answer.stats if row.function == "torch:add")
    median = quantile(row.buckets, 0.5)
    assert median is not None
    assert min(event.ended - event.began for event in events) < median * 1.13
    assert answer.since <= events[0].began <= events[-1].ended <= answer.now


def _cursors(answers: dict[str, Recent | Silence]) -> dict[str, int]:
    return {name: answer.cursor for name, answer in answers.items() if isinstance(answer, Recent)}


def _when_served(ask: Callable[[], dict[str, Recent | Silence]], count: int) -> dict[str, Recent | Silence]:
    """Ask until worker 1 has told of so many requests: its callers have their answers before."""
    answers: dict[str, Recent | Silence] = {}

    def is_told() -> bool:
        answers.update(ask())
        return sum(calls for calls, _ in _calls_of(answers["worker1"], SERVER).values()) == count

    wait_until(is_told)
    return answers


def test_recent_work_from_a_worker() -> None:
    with cluster(2) as job:
        first = job.run(1, farprop.inspect.recent)
        job.run(0, _call, 10)
        job.run(0, _fail)
        second = _when_served(lambda: job.run(1, farprop.inspect.recent, _cursors(first)), 11)
        third = job.run(1, farprop.inspect.recent, _cursors(second))
    _check(first, second)
    assert third["worker0"].events == []  # nothing was called since


def test_recent_work_from_outside_of_the_job() -> None:
    with cluster(2) as job:
        name = _named(job)
        first = recent(name, {})
        job.run(0, _call, 10)
        job.run(0, _fail)
        second = _when_served(lambda: recent(name, _cursors(first)), 11)
        job.kill(1)
        last = recent(name, _cursors(second))
    _check(first, second)
    assert isinstance(last["worker0"], Recent)
    assert "worker1" not in last or isinstance(last["worker1"], Silence)


def test_only_the_newest_events_are_kept_and_the_rest_is_counted() -> None:
    with cluster(2) as job:
        first = job.run(0, farprop.inspect.recent)
        job.run(0, _call, 2500)
        answer = job.run(0, farprop.inspect.recent, _cursors(first))["worker0"]
    assert isinstance(answer, Recent)
    assert (len(answer.events), answer.missing) == (2000, 500)
    assert _calls_of(answer, CLIENT) == {"torch:add": (2500, 0)}


@rpc.expose(name="fail")
def fail() -> None:
    raise ValueError("a secret of worker1")


def _fail_restricted() -> None:
    with pytest.raises(ValueError, match="a secret of worker1"):  # its caller gets the text
        rpc.rpc_sync("worker1", "fail")


def _messages(answers: dict[str, Recent | Silence]) -> dict[str, str]:
    """By worker, what it says of the call that failed."""
    return {
        name: event.message
        for name, answer in answers.items()
        if isinstance(answer, Recent)
        for event in answer.events
        if not isinstance(event, Span) and event.outcome == "ValueError"
    }


def test_restricted_workers_tell_each_other_no_messages_of_errors() -> None:
    with cluster(3, env={"FARPROP_RESTRICTED": "1", "FARPROP_JOB_NAME": "ours"}) as job:
        for rank in range(3):
            job.run(rank, _named_restricted)  # imports this module, and with it what it exposes
        first = job.run(2, farprop.inspect.recent)
        job.run(0, _fail_restricted)
        # Another worker learns that it failed. Who may look from outside of the job learns why.
        told = _when_served(lambda: job.run(2, farprop.inspect.recent, _cursors(first)), 1)
        assert _messages(told) == {"worker0": "", "worker1": ""}
        assert _messages(recent("ours", _cursors(first))) == dict.fromkeys(
            ("worker0", "worker1"), "a secret of worker1"
        )


def _named_restricted() -> str:
    return rpc.get_worker_info().name


def _shorter_lease() -> None:
    recent_work.LEASE_SECONDS = 0.2


def _wait_until_off() -> None:
    wait_until(lambda: not recorder.is_on)


def test_nobody_listens_after_a_while_without_questions() -> None:
    with cluster(2) as job:
        for rank in (0, 1):
            job.run(rank, _shorter_lease)
        first = job.run(0, farprop.inspect.recent)
        for rank in (0, 1):
            job.run(rank, _wait_until_off)
        job.run(0, _call, 3)
        again = job.run(0, farprop.inspect.recent, _cursors(first))["worker0"]  # it begins anew
        assert isinstance(again, Recent)
        assert again.stats == []
