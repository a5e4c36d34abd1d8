"""A worker process: it runs the functions that the test sends it, checks itself for leaks at the end, and exits.

The test sends, as pickles, the ``Setup``, then any number of ``("call", number, payload)``, and ``("finish", Check)``
once. The worker sends ``("value", number, payload)`` or ``("error", number, Failure)`` for each call, and
``("finished", complaints)``.

A call runs in the main thread if that is free, as most programs' calls do, else in a thread of its own.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import itertools
import os
import pickle
import queue
import reprlib
import resource
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import cloudpickle
import torch

from tests.support import clocks, disks, hosts, leaks


class Check(Enum):
    """When a child checks for leaks and for exceptions that nobody saw."""

    ALWAYS = "always"
    UNLESS_RAISED = "unless raised"  # a function that raised had no chance to clean up
    NEVER = "never"


@dataclass
class Setup:
    """The state that a process started by the test itself would have."""

    name: str
    environ: Mapping[str, str]
    cwd: str
    path: Sequence[str]
    full_exit: bool


@dataclass
class Failure:
    """An exception on its way to the test."""

    summary: str
    traceback: str
    chain: bytes | None  # the exception and its causes; None if they can't be pickled

    def rebuild(self, where: str) -> BaseException | None:
        """The exception, with the child's traceback as a note; None if it can't be made here."""
        if self.chain is None:
            return None
        try:
            chain = pickle.loads(self.chain)
        except Exception:
            return None
        for error, cause in itertools.pairwise(chain):
            error.__cause__ = cause
        chain[0].add_note(f"{where}:\n{self.traceback}")
        return chain[0]  # type: ignore[no-any-return]


def main(conn: Connection) -> None:
    """Live as a worker until told to finish."""
    setup = pickle.loads(conn.recv_bytes())
    _set_up(setup)
    Child(conn).serve()
    if setup.full_exit:
        gc.unfreeze()  # the collector has to see what the server imported, or most of it is never destroyed
        for finaliser in _spared:
            finaliser.atexit = True
    else:
        _leave()


_spared: list[weakref.finalize[..., Any]] = []


def spare_finalisers() -> None:
    """In the fork server: have no child run at its exit the finalisers that exist by now, unless it exits in full.

    They are torch's, and take its operators apart one by one: half of what a worker that does nothing would cost.
    """
    for finaliser in weakref.finalize._registry:  # type: ignore[attr-defined]
        if finaliser.atexit:  # not yet spared
            finaliser.atexit = False
            _spared.append(finaliser)


def _leave() -> None:
    """Exit as Python does, but without the destruction of modules: that takes a quarter of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _set_up(setup: Setup) -> None:
    os.environ.clear()
    os.environ.update(setup.environ)
    if hosts.NAMESPACE in setup.environ:
        hosts.enter(setup.environ[hosts.NAMESPACE])
    if disks.NAMESPACE in setup.environ:
        disks.enter(setup.environ[disks.NAMESPACE])
    if clocks.MONOTONIC in setup.environ:
        clocks.enter_time_namespace(int(setup.environ[clocks.MONOTONIC]))
    if clocks.WALL in setup.environ:
        clocks.use_wall_clock(setup.environ[clocks.WALL])
    os.chdir(setup.cwd)
    sys.path[:] = setup.path
    sys.argv[:] = [setup.name]
    tempfile.tempdir = None  # depends on the environment, and the server may have cached it
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # The harness ends a stuck worker with SIGABRT; faulthandler then prints its stacks.
    faulthandler.enable(all_threads=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Pytest makes warnings errors in its own process only.
    warnings.filterwarnings("error", module=r"farprop(\.|$)")
    torch.set_num_threads(1)


class Child:
    """The state of a worker process."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._sending = threading.Lock()
        self._main_jobs: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._main_busy = False
        self._lock = threading.Lock()
        self._more_threads: list[threading.Thread] = []
        self._before: leaks.Snapshot | None = None
        self._check = Check.NEVER
        self._raised = False
        self._unseen: list[str] = []

    def serve(self) -> None:
        """Run calls until told to finish, then report leaks."""
        threading.excepthook = self._thread_died
        sys.unraisablehook = self._unraisable
        reader = threading.Thread(target=self._read, name="harness-reader", daemon=True)
        reader.start()
        while (job := self._main_jobs.get()) is not None:
            self._run(*job)
        for thread in self._more_threads:
            thread.join()
        reader.join()
        self._send("finished", self._complaints())

    def _read(self) -> None:
        while True:
            try:
                kind, *rest = pickle.loads(self._conn.recv_bytes())
            except (EOFError, ConnectionResetError):
                os._exit(1)  # the test is gone
            if kind == "finish":
                (self._check,) = rest
                self._main_jobs.put(None)
                return
            number, payload = rest
            with self._lock:
                main_is_free, self._main_busy = not self._main_busy, True
            if main_is_free:
                self._main_jobs.put((number, payload))
            else:
                thread = threading.Thread(target=self._run, args=(number, payload), name=f"harness-call-{number}")
                self._more_threads.append(thread)
                thread.start()

    def _run(self, number: int, payload: bytes) -> None:
        kind: str
        answer: object
        try:
            function, args, kwargs = pickle.loads(payload)
            # Not earlier: to unpickle a function imports its module.
            if self._before is None:
                self._before = leaks.snapshot()
            kind, answer = "value", cloudpickle.dumps(function(*args, **kwargs))
        except BaseException as error:
            kind, answer = "error", _failure(error)
            self._raised = True
        if threading.current_thread() is threading.main_thread():
            # Before the answer is sent, so that the test's next call finds the main thread free.
            with self._lock:
                self._main_busy = False
        self._send(kind, number, answer)

    def _send(self, *message: object) -> None:
        with self._sending:
            self._conn.send_bytes(pickle.dumps(message))

    def _complaints(self) -> list[str]:
        if self._check is Check.NEVER or (self._check is Check.UNLESS_RAISED and self._raised):
            return []
        left = [] if self._before is None else leaks.left_behind(self._before)
        return [f"left behind: {text}" for text in left] + self._unseen

    def _thread_died(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            name = args.thread.name if args.thread else "?"
            self._unseen.append(f"thread {name!r} died of {args.exc_type.__name__}: {args.exc_value}")
            threading.__excepthook__(args)

    def _unraisable(self, args: Any) -> None:
        self._unseen.append(f"nobody could catch {args.exc_type.__name__}: {args.exc_value} (in {args.object!r})")
        sys.__unraisablehook__(args)


def _failure(error: BaseException) -> Failure:
    # The first frame is our own.
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, trace)) + _locals(error, trace)
    summary = "".join(traceback.format_exception_only(error)).strip()
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and all(link is not other for other in chain):
        chain.append(link)
        link = link.__cause__
    try:
        pickled = cloudpickle.dumps(chain)
        pickle.loads(pickled)  # some exceptions can be pickled but not unpickled
    except Exception:
        return Failure(summary, text, None)
    return Failure(summary, text, pickled)


def _locals(error: BaseException, trace: TracebackType | None) -> str:
    """The variables beside a bare ``assert``: pytest explains asserts in its own process only."""
    if not isinstance(error, AssertionError) or error.args or trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    short = reprlib.Repr()
    short.maxstring = short.maxother = 200
    lines = [f"  {name} = {short.repr(value)}\n" for name, value in trace.tb_frame.f_locals.items()]
    return "where\n" + "".join(lines) if lines else ""
