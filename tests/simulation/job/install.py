"""Puts simulated time, threads and sockets in the places of the real ones, in this real process for good."""

from __future__ import annotations

import gc
import itertools
import logging
import socket
import sys
import time
import types
from typing import Any

import torch

from farprop import ids
from farprop.distributed.native import host_messages, mesh
from farprop.runtime import (
    accepted_connections,
    agent,
    answer_reader,
    client_connection,
    futures,
    gather,
    liveness,
    membership,
    peers,
    room,
    server,
)
from farprop.runtime.autograd import abort, driver
from farprop.runtime.references import owned_values
from farprop.transport import connection
from tests.simulation.job import checks, group, process
from tests.simulation.job.network import Select
from tests.simulation.job.scheduler import Signal, Time, Waker, scheduler

_is_installed = False


class ErrorLog(logging.Handler):
    """Farprop logs an error only if something is wrong with farprop, or with a peer."""

    def emit(self, record: logging.LogRecord) -> None:
        if scheduler.failure is None and scheduler.current is not None:
            found = scheduler.current.process
            if found is None or not found.is_dead:
                scheduler.failure = AssertionError(f"an error was logged: {record.getMessage()}")


def _wait_on_pool(future: Any) -> Any:
    if not future.done():
        done = Signal()
        torch.futures.Future.add_done_callback(future, done.on_done)
        done.wait()
    return futures.wait(future)


_cancel = server.Server._cancel


def _note_and_cancel(self: Any, connection: Any, call_id: int) -> None:
    assert scheduler.current is not None
    found = scheduler.current.process
    assert found is not None
    _cancel(self, connection, call_id)
    checks.cancel_read(found, connection.peer, call_id)


class Secrets:
    """Takes the place of the module ``secrets`` where ids begin at a random number."""

    numbers = itertools.count(1)

    @classmethod
    def randbits(cls, bits: int) -> int:
        return next(cls.numbers) << 20


def install() -> None:
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    for name, module in list(sys.modules.items()):
        if name.startswith("farprop."):
            for attribute, value in list(vars(module).items()):
                if value is time:
                    setattr(module, attribute, Time)
                elif value is time.monotonic:
                    setattr(module, attribute, scheduler.monotonic)
    events = types.SimpleNamespace(Event=Signal)
    replaced: list[tuple[Any, str, Any]] = [
        (agent, "EventLoop", process.Loop),
        (agent, "ThreadPool", process.Pool),
        (agent, "Endpoint", process.Endpoint),
        (agent, "Observers", process.Observers),
        (accepted_connections, "make_ready", lambda _: None),
        (client_connection, "select", Select),
        (answer_reader, "select", Select),
        (answer_reader, "Waker", Waker),
        (room, "Waker", Waker),
        (owned_values, "OneShot", Signal),
        (driver, "Waker", Waker),
        (abort, "threading", events),
        (gather, "threading", events),
        (membership, "threading", events),
        (futures, "wait_on_pool", _wait_on_pool),
        (server.Server, "_cancel", _note_and_cancel),
        (connection, "tcp_facts", lambda stream: stream.facts()),
        (connection, "seconds_since_data", lambda stream: scheduler.now - stream.arrived_at),
        (ids, "secrets", Secrets),
        (mesh, "threading", group.threading),
        (mesh, "selectors", group.selectors),
        (mesh, "sockets", group.mesh_sockets),
        (mesh, "socket", types.SimpleNamespace(**{**vars(socket), **group.SOCKET_NAMES})),
        (host_messages, "threading", events),
        # Long waits are shortened: nothing happens in them but looks at the time.
        (liveness, "PATIENCE", 3.0),
        (agent, "_fill_caches_of_loggers", lambda: None),  # no interrupts come, and it takes long
        (peers, "_DIAL_SECONDS", 2.0),
    ]
    for module, attribute, value in replaced:
        assert hasattr(module, attribute), (module, attribute)
        setattr(module, attribute, value)
    log = logging.getLogger("farprop")
    log.setLevel(logging.ERROR)
    log.addHandler(ErrorLog())
    log.propagate = False
    logging.getLogger("farprop.rpc").setLevel(logging.CRITICAL)  # it logs errors that it raises
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.disable()  # when it runs would not follow from the seed
