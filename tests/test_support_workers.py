"""The harness for worker processes works as documented, and fails when it should."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path

import pytest
import torch

from tests.support import child, leaks, workers
from tests.support.workers import WorkerDied, WorkersFailed, cluster, run_workers

ROOT = Path(__file__).parents[1]

# In a worker: what `block` waits for. Each worker has its own.
released = threading.Event()


class Custom(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self):
        return _make_custom, (self.code,)


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("with a lock")
        self.lock = threading.Lock()


def _make_custom(code):
    return Custom(code=code)


def block(rank=0):
    print("blocked", rank)
    released.wait()


def release():
    released.set()


def rank_and_more(rank, *more):
    return rank, *more


def raise_at_rank_1(rank):
    print("words before the end", file=sys.stderr)
    if rank == 1:
        raise ValueError("boom")


def wait_for_main_thread_in(name):
    main = threading.main_thread().ident
    while name not in (frame.name for frame in traceback.extract_stack(sys._current_frames()[main])):
        time.sleep(0.001)


def in_main_thread():
    return threading.current_thread() is threading.main_thread()


def raise_with_cause():
    try:
        raise KeyError("first")
    except KeyError as error:
        raise Custom(code=7) from error


def raise_unpicklable():
    raise Unpicklable


# run_workers


def test_results_are_ordered_by_rank():
    assert run_workers(rank_and_more, 3, args=("a", 1)) == [(0, "a", 1), (1, "a", 1), (2, "a", 1)]


def test_local_functions_and_tensors_can_be_sent():
    tensor = torch.arange(3)
    results = run_workers(lambda rank: tensor + rank)
    assert torch.equal(results[1], torch.tensor([1, 2, 3]))


def test_worker_has_its_environment(monkeypatch):
    monkeypatch.setenv("FROM_THE_TEST", "yes")
    monkeypatch.setenv("NOT_WANTED", "no")
    names = ("MASTER_ADDR", "MASTER_PORT", "FROM_THE_TEST", "NOT_WANTED", "MINE")
    first, second = run_workers(
        lambda rank: ([os.environ.get(n) for n in names], torch.get_num_threads()),
        env=[{"MINE": "0", "NOT_WANTED": None}, {"MINE": "1", "NOT_WANTED": None}],
    )
    port = first[0][1]
    assert first == (["127.0.0.1", port, "yes", None, "0"], 1)
    assert second == (["127.0.0.1", port, "yes", None, "1"], 1)
    assert int(port) > 0


def test_exception_is_shown_with_traceback_and_output():
    with pytest.raises(AssertionError) as caught:
        run_workers(raise_at_rank_1)
    text = str(caught.value)
    assert "worker1 (pid " in text
    assert "raised ValueError: boom" in text
    assert "in raise_at_rank_1" in text
    assert text.count("words before the end") == 2
    assert "worker0 (pid" in text  # it wrote something
    assert "worker0 raised" not in text


def wrong_assert(rank):
    found = [1, 2, rank]
    assert found == []


def test_bare_assert_is_shown_with_its_variables():
    with pytest.raises(WorkersFailed, match=r"found = \[1, 2, 0\]"):
        run_workers(wrong_assert, 1)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os._exit(3), "ended with exit code 3 before it answered"),
        (lambda: os._exit(0), "ended with exit code 0 before it answered"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL before it answered"),
        (lambda: sys.exit(4), "raised SystemExit: 4"),
    ],
)
def test_early_exit_is_reported(end, words):
    with pytest.raises(WorkersFailed, match=words):
        run_workers(lambda rank: end() if rank == 1 else None)


@pytest.mark.parametrize("full_exit", [False, True])
def test_exit_code_after_the_result_is_reported(full_exit):
    with pytest.raises(WorkersFailed, match="did its work, but then ended with exit code 7"):
        run_workers(lambda rank: atexit.register(os._exit, 7) and None, 1, full_exit=full_exit)


def test_timeout_shows_stacks_and_leaves_no_worker():
    with pytest.raises(WorkersFailed) as caught:
        run_workers(block, timeout=3)
    text = str(caught.value)
    assert text.count("did not end within 3 s") == 2
    assert text.count("in block") == 2, "the stack of each"
    assert text.count("blocked") == 2, "the output of each"


def test_worker_that_does_not_exit_after_its_result_times_out():
    def leave_a_thread(rank):
        threading.Thread(target=block).start()

    with pytest.raises(WorkersFailed, match="did not end within 1 s"):
        run_workers(leave_a_thread, 1, timeout=1, check=False)


def test_stopped_worker_is_killed(monkeypatch):
    monkeypatch.setattr("tests.support.worker_group._ABORT_TIMEOUT", 0.1)
    with pytest.raises(WorkersFailed, match=r"did not end within 0\.5 s"):
        run_workers(lambda rank: os.kill(os.getpid(), signal.SIGSTOP), 1, timeout=0.5)


def test_failure_does_not_wait_for_other_workers(monkeypatch):
    monkeypatch.setattr(workers, "_AFTER_FAILURE", 0.1)

    def fail_or_block(rank):
        if rank == 0:
            raise ValueError("boom")
        block()

    started = time.monotonic()
    with pytest.raises(WorkersFailed) as caught:
        run_workers(fail_or_block, timeout=100)
    assert time.monotonic() - started < 50
    assert "raised ValueError: boom" in str(caught.value)
    assert "still ran after that" in str(caught.value)


def leave_a_pipe(rank):
    leaks.GRACE = 0.05
    os.pipe()


def leave_a_dead_thread(rank):
    thread = threading.Thread(target=lambda: 1 / 0, name="doomed")
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (leave_a_pipe, "left behind: file descriptor .*pipe"),
        (leave_a_dead_thread, "thread 'doomed' died of ZeroDivisionError"),
    ],
)
def test_leaks_and_dead_threads_in_a_worker_fail_the_test(fn, words):
    with pytest.raises(WorkersFailed, match=words):
        run_workers(fn, 1)
    assert run_workers(fn, 1, check=False) == [None]


class MakesDirectoryOnDel:
    """Makes a directory when it is destroyed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __del__(self, mkdir=os.mkdir) -> None:
        mkdir(self.path)


def keep_until_exit(rank, path):
    globals()["kept"] = MakesDirectoryOnDel(path)


@pytest.mark.parametrize("full_exit", [False, True])
def test_only_a_full_exit_destroys_modules(tmp_path, full_exit):
    path = tmp_path / "made"
    run_workers(keep_until_exit, 1, args=(str(path),), full_exit=full_exit)
    assert path.exists() == full_exit


def finalise_at_exit(rank, own, torchs):
    weakref.finalize(finalise_at_exit, os.mkdir, own)
    # One that was there before the fork, in place of what torch has it do.
    spared = weakref.finalize._registry[child._spared[0]]
    spared.func, spared.args, spared.kwargs = os.mkdir, (torchs,), {}


@pytest.mark.parametrize("full_exit", [False, True])
def test_only_a_full_exit_runs_the_finalisers_of_torch(tmp_path, full_exit):
    own, torchs = tmp_path / "own", tmp_path / "torchs"
    run_workers(finalise_at_exit, 1, args=(str(own), str(torchs)), full_exit=full_exit)
    assert own.exists()
    assert torchs.exists() == full_exit


def connect_and_block(rank, address):
    with socket.socket(socket.AF_UNIX) as mine:
        mine.connect(address)
        block()


def test_workers_die_with_the_test():
    address = f"\0test-of-workers-{os.getpid()}"
    code = (
        "from tests.support.workers import run_workers\n"
        "from tests.test_support_workers import connect_and_block\n"
        f"run_workers(connect_and_block, 2, args=({address!r},), timeout=100)\n"
    )
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        server.settimeout(60)
        with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
            connections = [server.accept()[0] for _ in range(2)]
            process.kill()
        for connection in connections:
            with connection:
                connection.settimeout(60)
                assert connection.recv(1) == b"", "the end of the worker closes it"


# cluster, on a stub


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(workers, "RPC_MODULE", "tests.support.stub_rpc")


def test_harness_uses_farprop_by_default():
    assert workers.RPC_MODULE == "farprop.rpc"


@pytest.mark.usefixtures("stub")
class TestCluster:
    def test_functions_run_on_the_given_rank(self, capsys):
        with cluster(world_size=3) as c:
            assert [c.run(rank, os.getpid) for rank in range(3)] == [c.pid(rank) for rank in range(3)]
            assert c.run(2, rank_and_more, 5, "x") == (5, "x")
            assert c.run(0, lambda **kwargs: kwargs, a=1) == {"a": 1}
        assert capsys.readouterr().err.count("shutdown graceful") == 3

    def test_exception_keeps_type_fields_and_cause(self):
        with cluster() as c:
            with pytest.raises(Custom) as caught:
                c.run(1, raise_with_cause)
            assert caught.value.code == 7
            assert isinstance(caught.value.__cause__, KeyError)
            (note,) = caught.value.__notes__
            assert "in worker1" in note
            assert "in raise_with_cause" in note

    def test_unpicklable_exception_arrives_as_text(self):
        with (
            cluster() as c,
            pytest.raises(WorkersFailed, match=r"(?s)Unpicklable: with a lock.*in raise_unpick"),
        ):
            c.run(1, raise_unpicklable)

    def test_unpicklable_result_is_an_error(self):
        with cluster() as c, pytest.raises(TypeError, match="pickle"):
            c.run(1, threading.Lock)

    def test_call_runs_in_the_main_thread_if_it_is_free(self):
        with cluster(world_size=1) as c:
            assert c.run(0, in_main_thread)
            assert c.run(0, in_main_thread)
            blocked = c.start(0, block)
            assert not c.run(0, in_main_thread)
            assert not blocked.done()
            with pytest.raises(TimeoutError):
                blocked.result(timeout=0.05)
            c.run(0, release)
            assert blocked.result(timeout=10) is None
            assert c.run(0, in_main_thread)

    def test_call_that_takes_too_long_fails_with_stacks(self):
        words = r"(?s)waited 3 s for a call in worker1.*in block"
        with pytest.raises(WorkersFailed, match=words), cluster(timeout=3) as c:
            c.run(1, block)

    def test_killed_worker_does_not_fail_the_test(self, capsys):
        with cluster() as c:
            pending = c.start(1, block)
            c.kill(1)
            with pytest.raises(WorkerDied, match="SIGKILL"):
                pending.result(timeout=10)
            with pytest.raises(WorkerDied, match="SIGKILL"):
                c.run(1, os.getpid)
            assert c.run(0, os.getpid) == c.pid(0)
        assert "shutdown at once" in capsys.readouterr().err

    def test_observed_death_does_not_fail_the_test(self):
        with cluster() as c:
            with pytest.raises(WorkerDied, match="exit code 3"):
                c.run(1, os._exit, 3)
            assert c.wait(1) == 3

    def test_unobserved_death_fails_the_test(self):
        with pytest.raises(WorkersFailed, match="exit code 3"), cluster() as c:
            c.start(1, os._exit, 3)

    def test_unobserved_exception_fails_the_test(self):
        with pytest.raises(WorkersFailed, match=r"(?s)the test did not look: Custom: code 7"), cluster() as c:
            c.start(1, raise_with_cause)

    def test_exception_of_the_test_carries_the_output_of_workers(self):
        def body(c):
            c.run(1, print, "a word from the worker")
            c.start(0, block)
            c.run(0, wait_for_main_thread_in, "block")
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as caught, cluster() as c:
            body(c)
        notes = "\n".join(caught.value.__notes__)
        assert "a word from the worker" in notes
        assert "in block" in notes, "a busy worker shows its stack"

    @pytest.mark.parametrize(
        ("fault", "words"),
        [
            ("init raises", "raised RuntimeError: worker1 can't start"),
            ("shutdown hangs", "(?s)waited 3 s for shutdown.*stub_rpc.py.*in shutdown"),
            ("shutdown leaks", "(?s)worker1.*: left behind: thread 'leaked-by-stub'"),
        ],
    )
    def test_faults_in_init_and_shutdown_are_found(self, fault, words):
        options = {"faulty_rank": 1, "fault": fault}
        with pytest.raises(WorkersFailed, match=words), cluster(options=options, timeout=3):
            pass

    def test_check_can_be_switched_off(self):
        with cluster(options={"faulty_rank": 1, "fault": "shutdown leaks"}, check=False) as c:
            c.run(0, os.pipe)

    def test_calls_after_shutdown_raise(self):
        with cluster() as c:
            c.shutdown(graceful=False)
            c.shutdown()
            with pytest.raises(ValueError, match="shut down"):
                c.run(0, os.getpid)
