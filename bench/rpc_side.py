"""An RPC worker: `python -m bench.rpc_side PACKAGE RANK SIZE ADDRESS PORT CASES`."""

from __future__ import annotations

import importlib
import sys
import warnings

from bench.channel import Sample, die_with_parent, serve, take_stdout
from bench.driver import HERE

NUM_WORKER_THREADS = 16


def main(package: str, rank: int, size: int, address: str, port: str, cases: str) -> None:
    die_with_parent()
    reply_fd = take_stdout()
    import torch

    from bench.side import Api, side

    # Before the cases are imported: the programs' functions get the decorators of this side.
    api = side.api = Api(package)
    from bench.cases.calls import add, noop

    torch.set_num_threads(1)
    # torch's own shutdown warns about itself
    warnings.filterwarnings("ignore", message="You are using a Backend")
    # Between hosts TensorPipe has nothing but these. Hosts that are namespaces share memory, which it would find.
    between_hosts = {"_transports": ["uv"], "_channels": ["mpt_uv", "basic"]}
    options = api.rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=NUM_WORKER_THREADS,
        init_method=f"tcp://{address}:{port}",
        **(between_hosts if package != "farprop" and address != HERE.address else {}),
    )
    if package == "farprop":
        api.rpc.expose(noop)
        api.rpc.expose(add)
    api.rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)

    known = importlib.import_module(cases).CASES

    def prepare(name: str) -> Sample:
        sample: Sample = known[name].prepare(api, "w1")
        return sample

    serve(prepare, reply_fd)
    api.rpc.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
