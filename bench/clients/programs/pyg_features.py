"""PyG's feature stores: two workers with a part of a graph each look up the features of nodes in both parts."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.multiprocessing as mp
from torch_geometric.distributed import LocalFeatureStore
from torch_geometric.distributed import rpc as pyg
from torch_geometric.distributed.dist_context import DistContext

from bench.clients.programs import job

PARTS = 2


def run_worker(rank: int, port: int, results: Any, nodes: int, width: int, rounds: int) -> None:
    torch.set_num_threads(1)
    context = DistContext(rank=rank, global_rank=rank, world_size=PARTS, global_world_size=PARTS, group_name="features")
    pyg.init_rpc(context, "127.0.0.1", port)
    store = LocalFeatureStore()
    own = torch.arange(nodes) + rank * nodes
    features = torch.randn(nodes, width, generator=torch.Generator().manual_seed(rank))
    store.put_global_id(own, group_name=None)
    store.put_tensor(features, group_name=None, attr_name="x")
    store.num_partitions, store.partition_idx, store.local_only = PARTS, rank, False
    store.node_feat_pb = torch.arange(PARTS).repeat_interleave(nodes)
    store.payload = {"edge_types": None, "node_types": None, "is_hetero": False, "num_parts": PARTS}
    router = pyg.RPCRouter(pyg.rpc_partition_to_workers(context, PARTS, rank))
    store.set_rpc_router(router)
    pyg.global_barrier()  # or the other worker may ask for features before this one can answer
    pick = torch.Generator().manual_seed(60 + rank)
    sums = []
    clock = job.Clock()
    for _ in range(rounds):
        wanted = torch.randint(PARTS * nodes, (1024,), generator=pick)
        sums.append(float(store.lookup_features(wanted).wait().sum()))
    seconds = clock.read()
    pyg.shutdown_rpc()
    if rank == 0:
        results.put((seconds, {"sums": sums}))


if __name__ == "__main__":
    size = (16, 8, 2) if job.tiny() else (4096, 256, 300)
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port = job.free_port()
    workers = [context.Process(target=run_worker, args=(rank, port, results, *size)) for rank in range(PARTS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit(f"exit codes {[worker.exitcode for worker in workers]}")
    job.report(*results.get())
