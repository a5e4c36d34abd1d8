"""What the workers of these tests run: the ways to hang."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any

import torch

import farprop.rpc as rpc

released = threading.Event()
began = threading.Event()
held = threading.Lock()
never_set: list[torch.futures.Future[Any]] = []
references: dict[str, rpc.RRef[Any]] = {}


def release() -> None:
    """End whatever hangs on this worker."""
    released.set()
    if held.locked():
        held.release()
    for future in never_set:
        future.set_result(None)


def endless() -> None:
    """A loop that does not end by itself."""
    began.set()
    while not released.is_set():
        pass


def wait_here() -> None:
    """Block a thread."""
    began.set()
    released.wait()


@rpc.functions.async_execution
def future_that_nobody_sets() -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    never_set.append(future)
    return future


def hold_the_lock_of_the_interpreter(pipe: str) -> None:
    """Wait in C code that does not release the interpreter's lock, until somebody opens a named pipe for writing."""
    libc = ctypes.PyDLL(None)
    libc.close(libc.open(pipe.encode(), os.O_RDONLY))


def holding_a_lock(to: str) -> None:
    """Hold this worker's lock while another worker calls back."""
    held.acquire()  # until ``release``
    rpc.rpc_sync(to, call_back, (rpc.get_worker_info().name,), timeout=0)


def call_back(to: str) -> None:
    rpc.rpc_sync(to, take_the_lock, timeout=0)


def take_the_lock() -> None:
    with held:  # asleep all the time, as inspection says
        pass


def set_reference(name: str, rref: rpc.RRef[Any]) -> None:
    references[name] = rref
    began.set()


def fetch(name: str) -> Any:
    """Fetch a value that another worker may still be making. The reference to it arrives later."""
    began.wait()
    return references[name].to_here(timeout=10)


def has_begun() -> None:
    began.wait()


def raise_value_error() -> None:
    raise ValueError("no such thing")


def is_running(function: str) -> bool:
    """Wait until this worker runs a function."""
    import farprop.inspect

    while True:
        job = farprop.inspect.job()
        if any(row.function.endswith(function) and row.state != "queued" for row in job.calls):
            return True
        time.sleep(0.005)
