"""References in files: modules that TorchScript has compiled are saved with the references in them.

A file can't be counted: nobody knows who reads it, how often, or never. So the worker that saves a reference keeps it
until it leaves the job. The file has the name of that worker and a number; to load it is a call that asks for the
reference with this number. It comes in the answer, and is counted as any other.
"""

from __future__ import annotations

import itertools
import json
import threading
from typing import Any

from farprop.errors import ConnectionLostError, ReferenceLostError, UsageError
from farprop.rpc.constants import UNSET_RPC_TIMEOUT
from farprop.rpc.rref import RRef
from farprop.runtime.current import current_agent, is_agent_set

_numbers = itertools.count()
_saved: dict[int, RRef[Any]] = {}


class _Allowed(threading.local):
    """Whether this thread may save references."""

    now = False


_allowed = _Allowed()


def _enable_jit_rref_pickle() -> None:
    """Let this thread save compiled modules that have references. Each worker that does keeps them until it leaves."""
    _allowed.now = True


def _disable_jit_rref_pickle() -> None:
    """End what ``_enable_jit_rref_pickle`` began."""
    _allowed.now = False


def save(rref: RRef[Any]) -> str:
    """What a file has for the reference, which is kept from now on."""
    if not _allowed.now:
        raise UsageError(
            f"RRef jit pickling is only allowed inside RPC calls: {rref} can't be saved. Save its value, which "
            "to_here() gives; or call farprop.rpc._enable_jit_rref_pickle() first, if the file is for workers of this "
            "job, and for as long as it runs."
        )
    rref._source("save it")  # raises if it can't be passed on
    agent = current_agent()
    number = next(_numbers)
    _saved[number] = rref
    name = agent.get_worker_info().name
    return json.dumps({"worker": name, "instance": agent.instance_of(name), "number": number, "rref": str(rref)})


def load(text: str) -> RRef[Any]:
    """The reference that a file has."""
    found = json.loads(text)
    worker = found["worker"]
    lost = f"{found['rref']}, which {worker} has saved, can't be loaded"
    if not is_agent_set():
        raise ReferenceLostError(
            f"{lost} here: this process is not a worker. A file with references is for workers of the job that it was "
            "saved in, and for as long as that runs."
        )
    agent = current_agent()
    if agent.instance_of(worker) != found["instance"]:
        raise ReferenceLostError(f"{lost}: the job that it was saved in has ended, or {worker} has left it.")
    if worker == agent.get_worker_info().name:
        return _kept(found["number"])
    try:
        loaded: RRef[Any] = agent.call_sync(worker, _kept, (found["number"],), {}, UNSET_RPC_TIMEOUT)
        return loaded
    except ReferenceLostError:
        raise
    except ConnectionLostError as error:
        raise ReferenceLostError(f"{lost}: {worker} kept it, and is gone.") from error


def _kept(number: int) -> RRef[Any]:
    """The reference that was saved here under this number. Others call this."""
    found = _saved.get(number)
    if found is None:
        raise ReferenceLostError(
            f"The reference {number} of {current_agent().get_worker_info().name} was saved in a job that has ended."
        )
    return found


def forget() -> None:
    """The job ends here: files that were saved in it are of no use any more."""
    _saved.clear()
    _allowed.now = False
