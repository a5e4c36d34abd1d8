"""Collectives of ranks on several hosts: by messages, and in shared memory where a host has several ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from farprop.distributed import p2p_collectives
from farprop.distributed.arguments import bytes_of
from farprop.distributed.native.framing import FrameKind
from farprop.distributed.native.group_state import CollectiveCall
from farprop.distributed.native.intra_node import IntraNode
from farprop.distributed.native.matching import PostedRecv
from farprop.distributed.native.mesh import Mesh
from farprop.distributed.reduction import Reduction

# From this size on, each leader reduces a share. For smaller tensors, fewer messages are faster.
_SHARED_REDUCE_BYTES = 64 * 1024
_PATIENCE = 0.1  # seconds that a rank waits for a message before it sends its fingerprint to all


class _MeshRanks:
    """Some ranks of the group in one collective, numbered from 0: what ``p2p_collectives`` sends and receives with."""

    def __init__(self, mesh: Mesh, call: CollectiveCall, ranks: Sequence[int]) -> None:
        self._mesh, self._call, self._ranks = mesh, call, ranks
        self.rank = ranks.index(mesh.rank)
        self.size = len(ranks)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        call = self._call
        data = bytes_of(tensor.contiguous())
        self._mesh.send(self._ranks[to], FrameKind.COLLECTIVE, call.number, call.fingerprint, data, call.deadline)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        call, rank = self._call, self._ranks[source]
        arrival = _Arrival()
        buffer = bytes_of(tensor)
        self._mesh.post(PostedRecv(FrameKind.COLLECTIVE, rank, call.number, buffer, None, arrival.on_done))
        if not arrival.done.wait(_PATIENCE):
            # That rank may have called something else, and wait for us. And if the collective times out, the others
            # have to know that this rank has called it.
            self._mesh.notify_all(FrameKind.FINGERPRINT, call.fingerprint, _PATIENCE, call.number)
        while not arrival.done.wait(max(0.0, call.deadline - time.monotonic())):
            self._mesh.state.check_wait([rank], call)
        if arrival.error is not None:
            self._mesh.state.check_wait([rank], call)
            raise arrival.error

    def exchange(self, tensor: torch.Tensor, into: torch.Tensor, partner: int) -> None:
        """Both may send at once: every rank has a thread that always reads."""
        self.send(tensor, partner)
        self.receive(into, partner)


class _Arrival:
    """The end of a posted receive, to wait for."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None

    def on_done(self, _: PostedRecv, error: Exception | None) -> None:
        self.error = error
        self.done.set()


class Hierarchical:
    """Collectives in two levels: within each host, and between the *leaders*, the first ranks of the hosts.

    Args:
        mesh: the connections of this rank.
        hosts: the ranks of each host.
        local: the collectives of this host; None if it has one rank.
    """

    def __init__(self, mesh: Mesh, hosts: Sequence[Sequence[int]], local: IntraNode | None) -> None:
        self._mesh = mesh
        self._all_ranks = sorted(rank for host in hosts for rank in host)
        self._own_host = next(host for host in hosts if mesh.rank in host)
        self._leaders = [host[0] for host in hosts]
        self._is_leader = mesh.rank in self._leaders
        self._host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
        self._local = local

    def barrier(self, call: CollectiveCall) -> None:
        self.allreduce(call, torch.zeros(1), Reduction(dist.ReduceOp.SUM))

    def allreduce(self, call: CollectiveCall, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Reduce on each host, then among the leaders, then broadcast on each host."""
        first_stage, second_stage = reduction.in_two_stages()
        if self._local is not None:
            self._local.reduce(call, tensor, 0, first_stage)
        else:
            first_stage.prescale(tensor)
        if self._is_leader:
            leaders = _MeshRanks(self._mesh, call, self._leaders)
            if tensor.nbytes < _SHARED_REDUCE_BYTES:
                p2p_collectives.allreduce(leaders, tensor, second_stage)
            else:
                _reduce_scatter_allgather(leaders, tensor, second_stage)
        if self._local is not None:
            self._local.broadcast(call, tensor, 0)

    def broadcast(self, call: CollectiveCall, tensor: torch.Tensor, root: int) -> None:
        """Broadcast on the root's host, then among the leaders, then on the other hosts."""
        is_roots_host = root in self._own_host
        if is_roots_host and self._local is not None:
            self._local.broadcast(call, tensor, self._own_host.index(root))
        if self._is_leader:
            p2p_collectives.broadcast(_MeshRanks(self._mesh, call, self._leaders), tensor, self._host_of[root])
        if not is_roots_host and self._local is not None:
            self._local.broadcast(call, tensor, 0)

    def reduce(self, call: CollectiveCall, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
        p2p_collectives.reduce(self._everybody(call), tensor, root, reduction)

    def scatter(self, call: CollectiveCall, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
        p2p_collectives.scatter(self._everybody(call), output, inputs, root)

    def gather(self, call: CollectiveCall, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        p2p_collectives.gather(self._everybody(call), outputs, tensor, root)

    def allgather(self, call: CollectiveCall, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        p2p_collectives.allgather(self._everybody(call), outputs, tensor)

    def reduce_scatter(
        self, call: CollectiveCall, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction
    ) -> None:
        p2p_collectives.reduce_scatter(self._everybody(call), output, inputs, reduction)

    def all_to_all(self, call: CollectiveCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        p2p_collectives.all_to_all(self._everybody(call), outputs, inputs)

    def _everybody(self, call: CollectiveCall) -> _MeshRanks:
        return _MeshRanks(self._mesh, call, self._all_ranks)


def _reduce_scatter_allgather(ranks: _MeshRanks, tensor: torch.Tensor, reduction: Reduction) -> None:
    shares = list(tensor.tensor_split(ranks.size))
    total = torch.empty_like(shares[ranks.rank])
    p2p_collectives.reduce_scatter(ranks, total, shares, reduction)
    p2p_collectives.allgather(ranks, shares, total)
