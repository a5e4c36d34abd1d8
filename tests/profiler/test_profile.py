"""``farprop.profile``: one timeline of all workers, of real jobs."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from farprop.errors import UsageError
from farprop.protocol.events import UNFINISHED
from tests.profiler import pipeline as p
from tests.profiler.chrome_format import Event, Trace, checked, end_of
from tests.references.looking import wait_until
from tests.support import clocks
from tests.support.workers import Cluster, cluster

pytestmark = pytest.mark.one_transport

_ROUNDING = 0.002  # microseconds


def _covered(intervals: list[tuple[float, float]]) -> float:
    """How long one of them at least lasted."""
    total = at = 0.0
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(at, began))
        at = max(at, ended)
    return total


def _calls(trace: Trace) -> dict[str, Event]:
    """By id, the slices of calls at their callers. One that nobody waits for is a slice in a lane."""
    return {
        event["args"]["call"]: event
        for event in trace.slices
        if event["cat"] == "in flight" or (event["cat"] == "call" and "bytes received" in event["args"])
    }


def _served(trace: Trace) -> dict[str, Event]:
    return {event["args"]["call"]: event for event in trace.slices if event["cat"] == "served"}


def _check_order(trace: Trace, error: float) -> int:
    """Every run lies within its call, up to the error of the clocks; returns how many were looked at."""
    calls, served = _calls(trace), _served(trace)
    both = calls.keys() & served.keys()
    for identity in both:
        call, run = calls[identity], served[identity]
        assert call["ts"] - error - _ROUNDING <= run["ts"], identity
        if call["args"].get("outcome") == UNFINISHED:
            # Its slice ends with the recording of the caller, and that of the callee may end later. A pass may be
            # over before the last of its gradients is answered: credit goes to the origin on a way of its own.
            continue
        # The callee's thread may note only later that it has sent the answer. Its function had returned before.
        returned = max(
            (end_of(one) for one in trace.named("run") if _is_part(one, run)),
            default=run["ts"],
        )
        assert returned <= end_of(call) + error + _ROUNDING, identity
    return len(both)


def _is_part(part: Event, whole: Event) -> bool:
    is_same_thread = (part["pid"], part["tid"]) == (whole["pid"], whole["tid"])
    return is_same_thread and whole["ts"] <= part["ts"] and end_of(part) <= end_of(whole) + _ROUNDING


def check_arrows(trace: Trace) -> None:
    """Every call has an arrow to its run, and one back if both have ended."""
    calls, served = _calls(trace), _served(trace)
    both = calls.keys() & served.keys()
    ended = [call for call in both if "unfinished" not in (_outcome(calls[call]), _outcome(served[call]))]
    for name, expected in (("call", both), ("answer", ended)):
        assert sum(arrow.name == name for arrow in trace.arrows) == len(expected), name
    for arrow in trace.arrows:
        assert arrow.start is not arrow.end
        if arrow.name == "gradients":
            assert arrow.start["name"] == "encode gradients"
            assert arrow.end["name"] == "backward"
            assert set(arrow.end["args"]["messages"]) & set(arrow.start["args"]["messages"])


def _outcome(event: Event) -> str:
    return str(event["args"]["outcome"])


def test_pipeline_of_three_stages(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with cluster(4) as job:
        found = job.run(0, p.train, str(path))
        worked = {f"worker{rank}": job.run(rank, p.worked) for rank in (1, 2, 3)}
        hooks = sum(job.run(rank, p.count_hooks) for rank in (1, 2, 3))
    trace = checked(p.read(path))
    assert sorted(trace.processes.values()) == ["worker0", *p.STAGES]
    assert found["missing"] == trace.facts["missing"] == {}
    # Each microbatch is a call to each stage.
    forwards = [call for call in found["slowest"] if "#forward(" in call.name]
    assert len(forwards) == 3 * p.MICROBATCHES
    assert {call.name for call in forwards} == {
        "rpc_async#forward(worker0 -> worker1)",
        "rpc_sync#forward(worker1 -> worker2)",
        "rpc_sync#forward(worker2 -> worker3)",
    }
    assert _check_order(trace, found["clock_error"] * 1e6) >= len(forwards)
    check_arrows(trace)
    # Backward: gradients go from stage to stage, and each stage runs its graph.
    gradients = [arrow for arrow in trace.arrows if arrow.name == "gradients"]
    assert {trace.worker_of(arrow.end) for arrow in gradients} >= set(p.STAGES)
    assert all(arrow.began <= arrow.ended for arrow in gradients)
    assert len(trace.named("hook Stage.__init__")) == 3 == hooks
    assert len(trace.named("backward pass")) == 1
    # Where the time went.
    for worker, summary in found["summary"].items():
        parts = summary.computing + summary.encoding + summary.waiting + summary.idle
        assert parts == pytest.approx(summary.wall)
        assert min(summary.computing, summary.encoding, summary.waiting, summary.idle) >= 0
        assert found["within"] * 0.95 <= parts <= found["around"] * 1.05, worker
        assert worker in found["text"]
    # What the stages have measured themselves. The first call was before the profile.
    for worker, intervals in worked.items():
        assert found["summary"][worker].computing >= _covered(intervals[1:]) - 1e-6
        assert found["summary"][worker].idle + found["summary"][worker].waiting <= found["around"] - _covered(
            intervals[1:]
        )
    assert found["summary"]["worker1"].waiting > 0  # for worker2
    assert found["summary"]["worker3"].waiting == 0  # it calls nobody
    assert found["summary"]["worker0"].idle == pytest.approx(0, abs=1e-6)  # its main thread is in the block
    assert 0 <= found["bubble"] < 1
    for call in forwards:
        assert call.encode + call.queue + call.run + call.wire == pytest.approx(call.seconds)


def test_worker_that_died_is_named_and_the_rest_is_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with cluster(3, check=False) as job:
        found = job.run(0, p.kill_in_profile, str(path), "worker2")
        job.wait(2)
    trace = checked(p.read(path))
    assert found["missing"] == trace.facts["missing"] == {"worker2": "did not answer: it has ended"}
    assert "missing: worker2: did not answer: it has ended" in found["text"]
    assert sorted(trace.processes.values()) == ["worker0", "worker1"]
    assert len(trace.named("rpc_sync#double(worker0 -> worker1)")) == 3
    check_arrows(trace)
    # The call that failed is there, without a run.
    (failed,) = trace.named("rpc_sync#double(worker0 -> worker2)")
    assert failed["args"]["outcome"] == "ConnectionLostError"


def test_recording_that_is_too_large_says_how_much_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with cluster(2) as job:
        found = job.run(0, p.call_in_profile, str(path), 20, max_events=5)
    assert found["missing"].keys() == {"worker0", "worker1"}
    for reason in found["missing"].values():
        count, _, rest = reason.partition(" events after the first 5")
        assert int(count) >= 15
        assert rest == ""
    trace = checked(p.read(path))
    assert trace.facts["missing"] == found["missing"]
    assert 1 <= len(trace.named("rpc_sync#double")) <= 5


def test_one_recording_at_a_time() -> None:
    with cluster(2) as job:
        first = job.start(0, p.wait_in_profile)
        wait_until(lambda: job.run(1, p.is_recording))
        with pytest.raises(UsageError, match=r"worker\d is recorded already: worker0 records the job since"):
            job.run(1, p.call_in_profile, None, 1)
        assert job.run(0, p.is_recording)  # the refusal has not ended the first
        job.run(0, p.go_on)
        first.result()
        assert not job.run(1, p.is_recording)
        assert job.run(1, p.call_in_profile, None, 1)["missing"] == {}


def test_interrupt_ends_the_recording_everywhere_and_keeps_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with cluster(2) as job:
        with pytest.raises(KeyboardInterrupt):
            job.run(0, p.interrupt_in_profile, str(path))
        assert not job.run(0, p.is_recording)
        assert not job.run(1, p.is_recording)
    assert len(checked(p.read(path)).named("rpc_sync#double")) == 3


def test_recording_ends_by_itself_when_who_records_has_died() -> None:
    with cluster(2, check=False) as job:
        job.run(1, p.set_lease, 0.5)
        recording = job.start(0, p.wait_in_profile)
        wait_until(lambda: job.run(1, p.is_recording))
        job.signal(0, signal.SIGKILL)
        job.wait(0)
        wait_until(lambda: not job.run(1, p.is_recording))
        with pytest.raises(Exception, match="SIGKILL|died|killed"):
            recording.result()


def test_workers_with_other_clocks_are_put_on_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ahead: list[dict[str, str]] = [{}, {clocks.MONOTONIC: "5000"}]
    try:
        with cluster(2, env=ahead) as job:
            found = job.run(0, p.call_in_profile, str(path), 20)
    except AssertionError as error:
        if "time namespace" in str(error):
            pytest.skip("this machine has no time namespaces")
        raise
    assert 0 < found["clock_error"] < 1
    trace = checked(p.read(path))
    assert trace.facts["clock_error_us"]["worker0"] == 0
    assert trace.facts["clock_error_us"]["worker1"] == pytest.approx(found["clock_error"] * 1e6, abs=0.001)
    assert _check_order(trace, found["clock_error"] * 1e6) == 20
    assert "clocks of other hosts are known to" in found["text"]


def test_operators_are_inside_of_the_runs_that_they_belong_to(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with cluster(2) as job:
        found = job.run(0, p.call_in_profile, str(path), 3, operators=True)
    trace = checked(p.read(path))
    assert found["missing"] == {}
    products = [event for event in trace.named("aten::mul") if trace.worker_of(event) == "worker1"]
    runs = [event for event in trace.named("run") if trace.worker_of(event) == "worker1"]
    assert len(products) >= 3
    assert all(any(_is_part(product, run) for run in runs) for product in products)


def test_hook_that_the_engine_runs_is_in_front_of_its_node(tmp_path: Path) -> None:
    """As docs/profiling.md says: it has no slice of its own. With operators, its node and what it does have."""
    path = tmp_path / "trace.json"
    with cluster(2) as job:
        job.run(0, p.backward_in_profile, str(path), operators=True)
    trace = checked(p.read(path))
    assert trace.named("hook") == []
    (run,) = [event for event in trace.named("backward") if event["cat"] == "backward" and _is_at(trace, event)]
    (whole,) = [event for event in trace.named("autograd::engine::evaluate_function: Mul") if _is_at(trace, event)]
    (node,) = [event for event in trace.named("MulBackward0") if _is_at(trace, event)]
    (hook,) = trace.named("aten::sinh")
    assert _is_part(whole, run)
    assert _is_part(node, whole)
    assert _is_part(hook, whole)
    assert end_of(hook) <= node["ts"] + _ROUNDING


def _is_at(trace: Trace, event: Event, worker: str = "worker1") -> bool:
    return trace.worker_of(event) == worker


def test_collectives(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with cluster(2) as job:
        found = job.run(0, p.reduce_in_profile, str(path), str(tmp_path / "store"))
    trace = checked(p.read(path))
    reduced = [event for event in trace.slices if event["cat"] == "collective"]
    assert [event["name"] for event in reduced].count("all_reduce") == 4
    assert {trace.worker_of(event) for event in reduced} == {"worker0", "worker1"}
    assert found["summary"]["worker1"].waiting > 0


def test_functions_that_return_futures_leave_their_thread(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with cluster(2) as job:
        job.run(0, p.call_later_in_profile, str(path))
    content = p.read(path)
    trace = checked(content)
    check_arrows(trace)
    # One of the function, and one of the fetch if that came before the value was there.
    unfinished = [event for event in content["traceEvents"] if event["ph"] == "b" and event["cat"] == "unfinished"]
    assert len(unfinished) in (1, 2)
    assert {trace.processes[event["pid"]] for event in unfinished} == {"worker1"}
    assert len(trace.named("rpc_remote#double(worker0 -> worker1)")) == 2  # on its thread, and in flight
    assert len(trace.named("to_here(worker0 -> worker1)")) == 1


def test_calls_that_have_not_ended_are_there_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with cluster(2) as job:
        found = job.run(0, p.leave_calls_open, str(path))
    content = p.read(path)
    trace = checked(content)
    assert found["missing"] == {}
    calls, served = _calls(trace), _served(trace)
    last = {worker: max(map(end_of, _of(trace, worker))) for worker in ("worker0", "worker1")}
    # The callers: one waits, two go on, and one has given up.
    open_calls = {event["name"]: event for event in calls.values() if event["args"]["outcome"] == "unfinished"}
    assert set(open_calls) == {
        "rpc_sync#hang(worker0 -> worker1)",
        "rpc_async#hang_in_a_future(worker0 -> worker1)",
        "rpc_remote#hang(worker0 -> worker1)",
    }
    for event in open_calls.values():
        assert end_of(event) == pytest.approx(last["worker0"], abs=_ROUNDING)
    (given_up,) = [event for event in calls.values() if event["args"]["outcome"] == "RpcTimeoutError"]
    # The callee runs what they have called, also for the one that has given up.
    runs = {identity: event for identity, event in served.items() if event["args"]["outcome"] == "unfinished"}
    hanging = [event for event in runs.values() if event["name"] == "hang for worker0"]
    assert len(hanging) == 3
    for event in hanging:
        assert end_of(event) == pytest.approx(last["worker1"], abs=_ROUNDING)
    assert given_up["args"]["call"] in runs
    (pair,) = [event for event in content["traceEvents"] if event["ph"] == "b" and event["cat"] == "unfinished"]
    assert pair["id"] == open_calls["rpc_async#hang_in_a_future(worker0 -> worker1)"]["args"]["call"]
    check_arrows(trace)
    # Where the time went.
    summary = found["summary"]
    assert summary["worker0"].idle == pytest.approx(0, abs=1e-6)
    longest = max(event["dur"] for event in trace.named("run") if trace.worker_of(event) == "worker1") / 1e6
    assert summary["worker1"].computing >= longest - 1e-6
    slowest = {call.name: call for call in found["slowest"] if call.outcome == "unfinished"}
    assert set(slowest) == set(open_calls)
    for call in found["slowest"]:
        assert call.encode + call.queue + call.run + call.wire == pytest.approx(call.seconds)
        assert min(call.encode, call.queue, call.run, call.wire) >= 0


def _of(trace: Trace, worker: str) -> list[Event]:
    return [event for event in trace.slices if trace.worker_of(event) == worker]


def test_restricted_workers_tell_functions_and_times_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with cluster(2, env={"FARPROP_RESTRICTED": "1"}) as job:
        for rank in (0, 1):
            job.run(rank, _expose)
        found = job.run(0, _train_restricted, str(path))
    trace = checked(p.read(path))
    assert "torch's operators: workers of a restricted job don't tell" in found["missing"]["worker1"]
    assert found["contexts"] == [None]
    assert len(trace.named("rpc_sync#double(worker0 -> worker1)")) == 1
    runs = [event for event in trace.named("backward") if trace.worker_of(event) == "worker1"]
    assert runs
    assert not any("args" in event for event in runs)


def _expose() -> None:
    import farprop.rpc as rpc

    rpc.expose(p.double)


def _train_restricted(path: str) -> dict[str, Any]:
    import torch

    import farprop
    import farprop.autograd as dist_autograd
    import farprop.rpc as rpc

    with farprop.profile(path, operators=True) as profile, dist_autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        y = rpc.rpc_sync("worker1", p.double, args=(x,))
        dist_autograd.backward(context_id, [y.sum()])
    other = next(worker for worker in profile._recorded() if worker.name == "worker1")
    contexts = {call.context for call in other.served_calls if not call.system}
    return {**p.result_of(profile), "contexts": list(contexts)}


def test_wrong_use() -> None:
    import farprop

    with pytest.raises(UsageError, match="max_events is 0"):
        farprop.profile(max_events=0)
    with pytest.raises(UsageError, match="not a worker|init_rpc"), farprop.profile():
        pass
    with pytest.raises(UsageError, match="leave its with block first"):
        farprop.profile().summary()
    with cluster(2) as job:
        for path, problem in (("/nowhere/trace.json", FileNotFoundError), ("/tmp", IsADirectoryError)):
            with pytest.raises(problem):
                job.run(0, p.call_in_profile, path, 0)
        assert not _is_on(job)


def _is_on(job: Cluster) -> bool:
    return bool(job.run(0, p.is_recording))
