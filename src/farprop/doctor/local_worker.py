"""A worker of the doctor's trial on one host: ``python -m farprop.doctor.local_worker RANK DIRECTORY TRANSPORT...``.

Rank 0 calls itself and the other one, once for each transport, and prints what it found as JSON.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

import msgspec

import farprop.rpc as rpc
from farprop.doctor.speed import measure, transport_to
from farprop.errors import FarpropError

_SECONDS = 30.0  # to find each other
_SET_PARENT_DEATH_SIGNAL = 1


def main(rank: int, directory: str, transports: list[str]) -> None:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    speeds: list[dict[str, Any]] = []
    problem = ""
    try:
        for transport in transports:
            os.environ["FARPROP_TRANSPORT"] = transport
            options = rpc.TensorPipeRpcBackendOptions(
                rpc_timeout=_SECONDS, init_method=f"file://{directory}/{transport}"
            )
            rpc.init_rpc(f"doctor{rank}", rank=rank, world_size=2, rpc_backend_options=options)
            if rank == 0:
                others = ("doctor0", "doctor1") if transport == transports[0] else ("doctor1",)
                speeds += [asdict(measure(to, transport_to(to))) for to in others]
            rpc.shutdown(timeout=_SECONDS)
    except FarpropError as error:
        problem = str(error)
    if rank == 0:
        print(msgspec.json.encode({"speeds": speeds, "problem": problem}).decode(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
