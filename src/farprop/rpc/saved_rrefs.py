"""References in files: a compiled TorchScript module is saved together with its references.

A reference in a file can't be counted, because nobody knows whether and how often the file will be read. So the worker
that saves a reference keeps it until it leaves the job. The file contains the name of that worker and a number. Loading
the file calls that worker for the reference with this number, which is counted like any other reference in an answer.
"""

from __future__ import annotations

import itertools
import json
import threading
from typing import Any

from farprop.errors import ConnectionLostError, ReferenceLostError, UsageError
from farprop.rpc.rref import RRef
from farprop.runtime.agent_registry import current_agent, is_agent_set

_numbers = itertools.count()
_saved: dict[int, RRef[Any]] = {}


class _ThreadState(threading.local):
    """Whether this thread may save references."""

    may_save = False


_thread = _ThreadState()


def _enable_jit_rref_pickle() -> None:
    """Let this thread save compiled modules with references. This worker keeps those until it leaves the job."""
    _thread.may_save = True


def _disable_jit_rref_pickle() -> None:
    """Undo ``_enable_jit_rref_pickle``."""
    _thread.may_save = False


def save(rref: RRef[Any]) -> str:
    """Keep a reference, and return the text that stands for it in a file."""
    if not _thread.may_save:
        raise UsageError(
            f"RRef jit pickling is only allowed inside RPC calls: {rref} can't be saved. Save its value, which "
            "to_here() returns. If the file is only for workers of this job, call "
            "farprop.rpc._enable_jit_rref_pickle() first."
        )
    rref._source("save it")  # raises if it can't be passed on
    agent = current_agent()
    number = next(_numbers)
    _saved[number] = rref
    name = agent.get_worker_info().name
    return json.dumps(
        {"worker": name, "instance": agent.membership.instance_of(name), "number": number, "rref": str(rref)}
    )


def load(text: str) -> RRef[Any]:
    """Get the reference that a text in a file stands for."""
    found = json.loads(text)
    worker = found["worker"]
    lost = f"{found['rref']}, which {worker} has saved, can't be loaded"
    if not is_agent_set():
        raise ReferenceLostError(
            f"{lost} here: this process is not a worker. A file with references can only be loaded by workers of the "
            "job that it was saved in."
        )
    agent = current_agent()
    if agent.membership.instance_of(worker) != found["instance"]:
        raise ReferenceLostError(f"{lost}: the job that it was saved in has ended, or {worker} has left it.")
    if worker == agent.get_worker_info().name:
        return _kept(found["number"])
    try:
        loaded: RRef[Any] = agent.call_sync(worker, _kept, (found["number"],), {}, agent.rpc_timeout)
        return loaded
    except ReferenceLostError:
        raise
    except ConnectionLostError as error:
        raise ReferenceLostError(f"{lost}: {worker} kept it, and is gone.") from error


def _kept(number: int) -> RRef[Any]:
    """The reference that this worker has saved under a number. Others call this."""
    found = _saved.get(number)
    if found is None:
        raise ReferenceLostError(
            f"The reference {number} of {current_agent().get_worker_info().name} was saved in a job that has ended."
        )
    return found


def release_all() -> None:
    """Release all saved references, because this worker leaves the job. Files of the job can't be loaded any more."""
    _saved.clear()
    _thread.may_save = False
