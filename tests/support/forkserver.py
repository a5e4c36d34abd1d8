"""A process that has torch imported and forks workers from itself: they start in milliseconds, not seconds.

Why not multiprocessing's own: its children always leave through ``os._exit``, so what runs at the end of a
real process (``atexit``, joining threads, C++ destructors) would never be tested. Here a child unwinds to the
bottom of the stack and can end like any Python process.

For each fork the caller passes the name of the test's module and three descriptors: the child's end of a connection,
a file for its output, and a pipe on which the server writes how the child ended. The answer is the child's pid and a
pidfd for it, so that a signal can't hit another process that got the same pid later.

The server imports that module before it forks: a child that runs a function of it would have to, each time anew. If
what the test runs imports much more, the module names that in ``IMPORTED_IN_WORKERS``.

If the caller dies, the server sees its control socket close and kills all its children; if the server dies, the
kernel kills them.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support import leaks, lock_order

# Farprop reads its settings when it is initialised, not when it is imported, so children need not import it anew.
# Pytest is here because test modules import it, and torch's DTensor because ``torch.testing.assert_close`` imports it,
# with sympy, which takes a second.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "cloudpickle",
    "encodings.idna",  # the first look-up of a host's name imports it
    "pytest",
    "tests.support.child",
    "tests.support.workers",
)
_FARPROP = ("farprop.rpc", "farprop.nn.parallel")
# In a worker's environment: it has not imported farprop yet.
WITHOUT_FARPROP = "TESTS_WITHOUT_FARPROP"

START_TIMEOUT = 120.0
_ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_THREADS_SECONDS = 5.0


@dataclass
class Forked:
    """A forked process as its caller sees it. The caller closes all of it."""

    pid: int
    pidfd: int
    conn: Connection
    ended: int  # readable when the process has ended: its exit code as text, or nothing if the server died
    output: int  # what the process writes to its standard output and error


class ForkServer:
    """The caller's side. Safe to use from several threads.

    Args:
        preload: the modules that children find imported.
        checks_locks: whether locks that are made during the import check their order.
        imports_tests: whether children find the module of the test imported, too.
    """

    def __init__(self, preload: Sequence[str], checks_locks: bool, imports_tests: bool) -> None:
        self._lock = threading.Lock()
        self._imports_tests = imports_tests
        self._log = os.memfd_create("fork-server-log")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forkserver", str(theirs.fileno()), *preload],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                cwd=_ROOT,
                # Threads of a maths library would not survive the fork.
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    lock_order.VARIABLE: str(int(checks_locks)),
                },
            )
        leaks.exempt(pid=self._process.pid)
        leaks.exempt(fd=self._control.fileno())
        leaks.exempt(fd=self._log)
        self._control.settimeout(START_TIMEOUT)

    def fork(self) -> Forked:
        """A new process; it waits for its set-up on the connection (see ``child``)."""
        ours, theirs = socket.socketpair()
        ended, ended_theirs = os.pipe()
        output = os.memfd_create("worker-output")
        module = test_module.encode() if self._imports_tests else b""
        try:
            with self._lock, theirs:
                socket.send_fds(self._control, [b"fork " + module], [theirs.fileno(), output, ended_theirs])
                answer, fds, _, _ = socket.recv_fds(self._control, 64, 1)
            if not answer:
                raise ConnectionResetError
        except OSError as error:
            os.close(ended)
            os.close(output)
            ours.close()
            raise AssertionError(f"the fork server is gone; it wrote:\n{self._read_log()}") from error
        finally:
            os.close(ended_theirs)
        return Forked(int(answer), fds[0], Connection(ours.detach()), ended, output)

    def alive(self) -> bool:
        """Whether the server process runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the server and all that it forked."""
        for fd in (self._control.fileno(), self._log):
            leaks.count_again(fd=fd)
        self._control.close()
        self._process.wait()
        os.close(self._log)
        leaks.count_again(pid=self._process.pid)

    def _read_log(self) -> str:
        return os.pread(self._log, 1 << 20, 0).decode(errors="replace")


test_module = ""  # of the test that runs; conftest.py keeps it

_servers: dict[tuple[bool, bool], ForkServer] = {}  # by the arguments of ``server``
_servers_lock = threading.Lock()


def server(checks_locks: bool = False, with_farprop: bool = True) -> ForkServer:
    """A fork server of this process, started at first use.

    Args:
        checks_locks: whether the locks of its children check their order.
        with_farprop: whether its children find farprop imported.
    """
    key = checks_locks, with_farprop
    with _servers_lock:
        found = _servers.get(key)
        if found is not None and not found.alive():
            _servers.pop(key).stop()
            found = None
        if found is None:
            preload = PRELOAD + _FARPROP if with_farprop else PRELOAD
            # Without farprop, not either what may import it.
            found = _servers[key] = ForkServer(preload, checks_locks, imports_tests=with_farprop)
        return found


@atexit.register
def stop_servers() -> None:
    """End this process's servers, if it has any."""
    with _servers_lock:
        while _servers:
            _servers.popitem()[1].stop()


# The server's side.

_imported: list[str] = []


def main() -> None:
    """Import what children need, then fork one for each request until the caller goes away."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    lock_order.install_if_wanted()
    _imported.extend(sys.argv[2:])
    for name in _imported:
        importlib.import_module(name)
    leaks.warm_up()
    leaks.mark_semaphores()
    # Orphaned grandchildren become our children, so the leak check sees them.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prepare_to_fork()
    connection = _serve(control)
    if connection is not None:  # then this is a child
        from tests.support import child

        child.main(connection)


def _prepare_to_fork() -> None:
    """Leave children nothing to do about what has been imported."""
    # A thread that has been joined may still be listed for a moment.
    deadline = time.monotonic() + _THREADS_SECONDS
    while len(threads := os.listdir("/proc/self/task")) != 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    if len(threads) != 1:
        sys.exit(f"{len(threads)} threads run after importing {_imported}: forking would lose them")
    from tests.support import child  # not above: it imports torch

    child.spare_finalisers()
    # Children share these pages; a collection in one of them must not touch them.
    gc.collect()
    gc.freeze()


def _import_for_children(name: str) -> None:
    if name in _imported:
        return
    _imported.append(name)
    try:
        for more in getattr(importlib.import_module(name), "IMPORTED_IN_WORKERS", ()):
            importlib.import_module(more)
    except Exception:
        traceback.print_exc()  # as it will in the children that need it, for which the test fails
    _prepare_to_fork()


def _serve(control: socket.socket) -> Connection | None:
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    server_pid = os.getpid()
    status_pipes: dict[int, int] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if woken in ready:
            os.read(woken, 4096)
            _reap(status_pipes)
        if control.fileno() not in ready:
            continue
        request, fds, _, _ = socket.recv_fds(control, 1024, 3)
        if not request:
            _kill_all()
            return None
        _, _, module = request.decode().partition(" ")
        if module:
            _import_for_children(module)
        theirs, output, status = fds
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _become_child(server_pid, output)
            for fd in (control.detach(), woken, waker, output, status, *status_pipes.values()):
                os.close(fd)
            return Connection(theirs)
        status_pipes[pid] = status
        # No child is reaped between the fork and here, so the pid is still that of this child.
        pidfd = os.pidfd_open(pid)
        rights = array.array("i", [pidfd])
        with contextlib.suppress(BrokenPipeError):  # the caller is gone: the next poll notices
            control.sendmsg([b"%d" % pid], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        for fd in (pidfd, theirs, output):
            os.close(fd)


def _become_child(server_pid: int, output: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server_pid:  # it died before the line above took effect
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A child may have no room to write files in, and Python does not notice that it wrote half of one.
    sys.dont_write_bytecode = True
    os.dup2(output, 1)
    os.dup2(output, 2)


def _reap(status_pipes: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        pipe = status_pipes.pop(pid, None)
        if pipe is None:
            continue  # an orphan of a child
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(pipe)


def _kill_all() -> None:
    # In a loop: killing a child can make its children ours.
    while pids := leaks._children("self"):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(-1, 0)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main()
