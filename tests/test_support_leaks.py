"""The leak check finds each kind of resource, and nothing else."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tests.support import leaks
from tests.support.workers import WorkersFailed, run_workers

pytest_plugins = ["pytester"]

SHORT = 0.02
ROOT = Path(__file__).parents[1]


@contextmanager
def leaked_thread() -> Iterator[str]:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="forgotten")
    thread.start()
    yield "thread 'forgotten'"
    release.set()
    thread.join()


@contextmanager
def leaked_descriptor() -> Iterator[str]:
    fd = os.open(os.devnull, os.O_RDONLY)
    yield f"file descriptor {fd}: /dev/null"
    os.close(fd)


@contextmanager
def leaked_socket() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"AF_INET at {server.getsockname()!r}"


@contextmanager
def leaked_process() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    # Only the process is of interest here; its pipe is a leak of another kind.
    leaks.exempt(fd=process.stdin.fileno())
    yield f"process {process.pid}: {sys.executable}"
    leaks.count_again(fd=process.stdin.fileno())
    process.communicate(b"\n")


@contextmanager
def leaked_zombie() -> Iterator[str]:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield f"process {pid}: ended, but nobody has waited for it"
    os.waitpid(pid, 0)


@contextmanager
def leaked_shared_memory() -> Iterator[str]:
    path = Path("/dev/shm", f"test-of-leaks-{os.getpid()}")
    path.touch()
    yield f"shared memory {path}"
    path.unlink()


@contextmanager
def leaked_semaphore() -> Iterator[str]:
    lock = multiprocessing.get_context("spawn").Lock()
    yield f"shared memory /dev/shm/sem.{lock._semlock.name.lstrip('/')}"  # type: ignore[attr-defined]
    del lock  # its finaliser removes it


@contextmanager
def leaked_mapping() -> Iterator[str]:
    fd = os.memfd_create("farprop")
    os.ftruncate(fd, mmap.PAGESIZE)
    mapping = mmap.mmap(fd, mmap.PAGESIZE)
    os.close(fd)
    # Python's mmap keeps a descriptor of its own; a tensor made from foreign memory does not.
    for number, target in leaks._descriptors():
        if target.startswith("/memfd:farprop"):
            leaks.exempt(fd=number)
            yield "of /memfd:farprop"
            leaks.count_again(fd=number)
    mapping.close()


@contextmanager
def leaked_file() -> Iterator[str]:
    path = Path(tempfile.mkdtemp(prefix="farprop-"), "job.secret")
    path.touch()
    yield f"file {path}"
    path.unlink()


@pytest.mark.parametrize(
    "leak",
    [
        leaked_thread,
        leaked_descriptor,
        leaked_socket,
        leaked_process,
        leaked_zombie,
        leaked_shared_memory,
        leaked_semaphore,
        leaked_mapping,
        leaked_file,
    ],
)
def test_each_kind_is_found_and_named(leak):
    before = leaks.snapshot()
    assert leaks.left_behind(before, SHORT) == []
    with leak() as name:
        left = leaks.left_behind(before, SHORT)
    assert len(left) == 1, left
    assert name in left[0]
    assert leaks.left_behind(before) == []


def test_leaked_thread_is_shown_with_its_stack():
    before = leaks.snapshot()
    with leaked_thread():
        (text,) = leaks.left_behind(before, SHORT)
    assert "in wait" in text


def test_existing_resources_do_not_count():
    with leaked_thread(), leaked_descriptor(), leaked_shared_memory():
        assert leaks.left_behind(leaks.snapshot(), SHORT) == []


def test_resources_that_go_away_in_time_do_not_count():
    before = leaks.snapshot()
    threading.Timer(0.1, lambda: None).start()
    assert leaks.snapshot().since(before)
    assert leaks.left_behind(before) == []


def test_resources_held_only_by_a_cycle_do_not_count():
    class Holder:
        def __init__(self) -> None:
            self.me = self
            self.fds = os.pipe()

        def __del__(self) -> None:
            for fd in self.fds:
                os.close(fd)

    before = leaks.snapshot()
    gc.disable()
    try:
        Holder()
        assert leaks.snapshot().since(before)
        assert leaks.left_behind(before) == []
    finally:
        gc.enable()


def test_ended_foreign_thread_does_not_count():
    import _thread

    before = leaks.snapshot()
    done = _thread.allocate_lock()
    done.acquire()

    def foreign() -> None:
        threading.current_thread()  # this makes the object that stays
        done.release()

    _thread.start_new_thread(foreign, ())
    done.acquire()
    assert leaks.left_behind(before) == []


def test_helpers_of_multiprocessing_do_not_count():
    before = leaks.snapshot()
    resource_tracker.ensure_running()
    assert leaks.left_behind(before, SHORT) == []


def test_shared_memory_of_unrelated_processes_does_not_count(monkeypatch):
    code = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 1); print(); input()"
    path = Path("/dev/shm", f"test-of-strangers-{os.getpid()}")
    before = leaks.snapshot()
    path.write_bytes(b"x")
    try:
        assert leaks.left_behind(before, SHORT) == [f"shared memory {path}"]
        command = [sys.executable, "-u", "-c", code, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            with_it = leaks.snapshot()
            named = leaks._without_strangers(with_it.since(before)).shared_memory
            monkeypatch.setattr(leaks, "_descendants", lambda pid: {os.getpid()})
            unnamed = leaks._without_strangers(with_it.since(before)).shared_memory
            process.communicate(b"\n")
    finally:
        path.unlink()
    assert named == {path.name}, "a child of ours is no stranger"
    assert unnamed == set()


def test_semaphores_of_other_programs_do_not_count():
    """Of one that runs, and of one that was killed and left its semaphore behind."""
    code = """if True:
        import _multiprocessing, sys
        held = _multiprocessing.SemLock(1, 1, 1, sys.argv[1], False)
        print(flush=True)
        input()
    """
    name = f"mp-test-{os.getpid()}"
    before = leaks.snapshot()
    try:
        command = [sys.executable, "-c", code, f"/{name}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert Path(f"/dev/shm/sem.{name}").exists()
            assert not leaks.snapshot().since(before).shared_memory
            process.kill()
        assert Path(f"/dev/shm/sem.{name}").exists()
        assert leaks.left_behind(before, SHORT) == []
    finally:
        Path(f"/dev/shm/sem.{name}").unlink(missing_ok=True)


def _make_semaphore(_: int) -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    resource_tracker.unregister(lock._semlock.name, "semaphore")  # type: ignore[attr-defined]
    os.kill(os.getpid(), signal.SIGKILL)


def test_semaphore_of_a_killed_worker_counts():
    before = leaks.snapshot()
    with pytest.raises(WorkersFailed):
        run_workers(_make_semaphore, 1)
    (left,) = leaks.left_behind(before, SHORT)
    assert left.startswith("shared memory /dev/shm/sem.")
    Path(left.removeprefix("shared memory ")).unlink()


def test_fixture_fails_a_test_that_leaks(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(
        """
        from tests.conftest import nothing_left_behind, pytest_runtest_makereport
        from tests.support import leaks
        leaks.GRACE = 0.05
        """
    )
    pytester.makepyfile(
        """
        import os, threading
        def leak():
            threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()
        def test_leaks():
            leak()
        def test_is_clean():
            pass
        def test_fails_and_leaks():
            leak()
            assert False
        def test_leaks_a_pipe():
            os.pipe()
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, failed=1, errors=2)
    result.stdout.fnmatch_lines(["left behind:", "- thread 'forgotten' (daemon)*"])
    result.stdout.fnmatch_lines(["left behind:", "- file descriptor *: pipe:*"])
