"""What all collectives of several hosts know: which ranks are on which host, and who carries what between hosts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farprop.distributed.native.group_state import CollectiveCall
from farprop.distributed.native.host_messages import HostMessages
from farprop.distributed.native.intra_node import IntraNode
from farprop.distributed.native.mesh import Mesh
from farprop.distributed.native.splits import Lane, Split, even_split, single_split

# From this size on, all ranks of a host carry a share of what goes to another host. For less, one message is faster.
SHARED_BYTES = 64 * 1024


class HostCollectives:
    """The base of ``HostReductions`` and ``HostMoves``.

    Args:
        mesh: the connections of this rank.
        hosts: the ranks of each host.
        local: the collectives of this host; None if it has one rank.
    """

    def __init__(self, mesh: Mesh, hosts: Sequence[Sequence[int]], local: IntraNode | None) -> None:
        self._mesh = mesh
        self._rank = mesh.rank
        self._hosts = hosts
        self._host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        self._host = self._host_of[mesh.rank]
        self._neighbours = hosts[self._host]  # the ranks of this host
        self._local_rank = self._neighbours.index(mesh.rank)
        self._is_leader = self._local_rank == 0
        self._other_hosts = [host for host in range(len(hosts)) if host != self._host]
        self._local = local

    def _messages(self, call: CollectiveCall) -> HostMessages:
        return HostMessages(self._mesh, call)

    def _even_splits(self, tensor: torch.Tensor, root: int | None = None) -> list[Split]:
        """How the ranks of each host share a tensor. If it is small, the leader has all of it, or the root."""
        splits = []
        for ranks in self._hosts:
            if tensor.nbytes >= SHARED_BYTES:
                splits.append(even_split(tensor.numel(), len(ranks)))
            else:
                splits.append(single_split(tensor.numel(), len(ranks), ranks.index(root) if root in ranks else 0))
        return splits

    def _put_together(self, call: CollectiveCall, tensor: torch.Tensor, split: Split) -> None:
        """Give all ranks of this host the shares of a tensor that its carriers have."""
        if self._local is None:
            return
        if tensor.nbytes < SHARED_BYTES:
            self._local.broadcast(call, tensor, 0)
        else:
            self._local.share(call, [[tensor[start:end]] for start, end in split])

    def _carrier(self, lane: Lane, host: int) -> int:
        """The rank that carries a lane; the lane's carriers are those of all hosts."""
        return self._hosts[host][lane.carriers[host]]

    def _own_lanes(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Those that this rank carries."""
        return [lane for lane in lanes if lane.carriers[self._host] == self._local_rank]
