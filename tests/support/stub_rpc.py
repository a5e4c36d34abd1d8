"""A stub of ``farprop.rpc``: the part that ``cluster`` uses, with faults that the harness must find."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tests.support import leaks

_options: TensorPipeRpcBackendOptions | None = None
_leaked = threading.Event()


@dataclass
class TensorPipeRpcBackendOptions:
    """The fault to simulate, and its rank."""

    faulty_rank: int = -1
    fault: str = ""


def init_rpc(name: str, rank: int, world_size: int, rpc_backend_options: TensorPipeRpcBackendOptions) -> None:
    """Initialise, or fail if that is the fault."""
    global _options
    _options = rpc_backend_options
    if rank != _options.faulty_rank:
        _options.fault = ""
    if _options.fault == "init raises":
        raise RuntimeError(f"{name} can't start")


def get_worker_info() -> None:
    """Raise if not initialised."""
    if _options is None:
        raise RuntimeError("not initialised")


def shutdown(graceful: bool) -> None:
    """Shut down, or show the fault."""
    global _options
    get_worker_info()
    fault = _options.fault if _options else ""
    _options = None
    print("shutdown", "graceful" if graceful else "at once")
    if fault == "shutdown hangs":
        threading.Event().wait()
    if fault == "shutdown leaks":
        leaks.GRACE = 0.05
        threading.Thread(target=_leaked.wait, name="leaked-by-stub", daemon=True).start()
