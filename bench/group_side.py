"""One rank of a process group: `python -m bench.group_side PACKAGE RANK SIZE ADDRESS PORT CASES`."""

from __future__ import annotations

import importlib
import sys
import warnings

from bench.channel import Sample, die_with_parent, serve, take_stdout


def main(package: str, rank: int, size: int, address: str, port: str, cases: str) -> None:
    die_with_parent()
    reply_fd = take_stdout()
    import torch
    import torch.distributed as dist

    from bench.cases import Api

    torch.set_num_threads(1)
    # torch's hints about its threads and devices would clutter the table
    warnings.filterwarnings("ignore", category=UserWarning)
    api = Api(package)
    # Gloo on both sides: farprop's DistributedDataParallel is measured on it too.
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=size)

    known = importlib.import_module(cases).CASES

    def prepare(name: str) -> Sample:
        sample: Sample = known[name].prepare(api, "")
        return sample

    serve(prepare, reply_fd)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
