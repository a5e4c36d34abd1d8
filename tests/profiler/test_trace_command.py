"""``farprop trace``: a running job is recorded from outside of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import farprop.rpc as rpc
from farprop.cli.main import INCOMPLETE, OK, USAGE, main
from tests.profiler import pipeline as p
from tests.profiler.chrome_format import checked
from tests.profiler.test_profile import check_arrows
from tests.references.looking import wait_until
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport


def test_job_is_recorded_from_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    command = ["trace", "train", "--seconds", "0.5", "-o", str(path)]
    with cluster(2, env={"FARPROP_JOB_NAME": "train"}) as job:
        calls = job.start(0, p.call_until_told, "worker1")
        wait_until(lambda: job.run(0, p.has_called))
        assert main(command) == OK
        text = capsys.readouterr().out
        assert "rpc_sync#double(worker0 -> worker1)" in text
        assert f"{path}: open it at" in text
        trace = checked(p.read(path))
        assert trace.named("rpc_sync#double(worker0 -> worker1)")
        assert any(arrow.name == "call" for arrow in trace.arrows)
        check_arrows(trace)  # the workers don't begin and end at the same moment: some calls have no run, or no caller
        assert main([*command, "--json"]) == OK
        found = json.loads(capsys.readouterr().out)
        by_name = {worker["worker"]: worker for worker in found["summary"]["workers"]}
        assert by_name["worker0"]["waiting"] > 0
        assert by_name["worker1"]["computing"] > 0
        job.run(0, p.go_on)
        assert calls.result() > 0
        assert not job.run(1, p.is_recording)


def test_job_that_hangs_since_before_it_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of its calls were made before: they are there nevertheless, from the beginning to the end."""
    path = tmp_path / "trace.json"
    with cluster(3, env={"FARPROP_JOB_NAME": "train"}) as job:
        calls = [
            job.start(0, rpc.rpc_sync, "worker1", p.hang_by_way_of, ("worker2",), timeout=0),
            job.start(0, p.wait_for_future, "worker2"),
        ]
        wait_until(lambda: job.run(2, p.is_hanging) and job.run(2, p.has_future))
        assert main(["trace", "train", "--seconds", "0.1", "-o", str(path)]) == OK
        text = capsys.readouterr().out
        job.run(2, p.end_future)
        job.run(2, p.go_on)
        for call in calls:
            call.result()
    trace = checked(p.read(path))
    assert all(event["ts"] >= 0 for event in trace.slices)
    assert "rpc_sync#hang(worker1 -> worker2)" in text
    assert "unfinished" in text
    for name in ("rpc_sync#hang_by_way_of(worker0 -> worker1)", "rpc_sync#hang(worker1 -> worker2)"):
        (call,) = trace.named(name)
        assert call["args"]["outcome"] == "unfinished"
        assert call["args"]["began before the recording (s)"] > 0
    (inner,) = trace.named("rpc_sync#hang(worker1 -> worker2)")
    (outer,) = trace.named("hang_by_way_of for worker0")
    assert inner["args"]["part of"] == outer["args"]["call"]
    assert inner["tid"] == outer["tid"]
    (wait,) = trace.named("wait for a future")
    assert wait["args"] == {"outcome": "unfinished"}
    assert trace.worker_of(wait) == "worker0"
    assert len(trace.named("rpc_async#hang_in_a_future(worker0 -> worker2)")) == 1
    assert sum(arrow.name == "call" for arrow in trace.arrows) == 2
    assert main(["trace", "train"]) == USAGE  # it has ended


def test_errors_are_a_line_and_a_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "no-such-job"]) == USAGE
    with cluster(2, env={"FARPROP_JOB_NAME": "train"}, check=False) as job:
        assert main(["trace", "train", "-o", str(tmp_path)]) == USAGE
        assert "is a directory" in capsys.readouterr().err
        recording = job.start(0, p.wait_in_profile)
        wait_until(lambda: job.run(1, p.is_recording))
        assert main(["trace", "train", "--seconds", "0", "-o", str(tmp_path / "t.json")]) == USAGE
        assert "is recorded already: worker0 records the job" in capsys.readouterr().err
        job.run(0, p.go_on)
        recording.result()
        job.kill(1)
        assert main(["trace", "train", "--seconds", "0.1", "-o", str(tmp_path / "t.json")]) == INCOMPLETE
        assert "missing: worker1: did not answer: it has ended" in capsys.readouterr().out
