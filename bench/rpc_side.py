"""One of the RPC workers of a job: `python -m bench.rpc_side PACKAGE RANK PORT WORKERS`."""

from __future__ import annotations

import sys
import warnings

from bench.channel import Sample, die_with_parent, serve, take_stdout

NUM_WORKER_THREADS = 16


def main(package: str, rank: int, port: int, workers: int) -> None:
    die_with_parent()
    reply_fd = take_stdout()
    import torch

    from bench.side import Api, side

    # Before the cases are imported: the programs' functions get the decorators of this side.
    api = side.api = Api(package)
    from bench.cases import CASES
    from bench.cases.calls import add, noop

    torch.set_num_threads(1)
    # torch's own shutdown warns about itself
    warnings.filterwarnings("ignore", message="You are using a Backend")
    options = api.rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=NUM_WORKER_THREADS, init_method=f"tcp://127.0.0.1:{port}"
    )
    if package == "farprop":
        api.rpc.expose(noop)
        api.rpc.expose(add)
    api.rpc.init_rpc(f"w{rank}", rank=rank, world_size=workers, rpc_backend_options=options)

    def prepare(name: str) -> Sample:
        return CASES[name].prepare(api, "w1")

    serve(prepare, reply_fd)
    api.rpc.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
