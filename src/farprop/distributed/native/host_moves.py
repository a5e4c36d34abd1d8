"""Collectives of ranks on several hosts that move data and don't compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farprop.distributed.native.group_state import CollectiveCall
from farprop.distributed.native.host_collectives import SHARED_BYTES, HostCollectives
from farprop.distributed.native.splits import Joined, Lane, even_split, lanes, single_split
from farprop.distributed.p2p_collectives import binomial_tree


class HostMoves(HostCollectives):
    """Broadcast, gather, scatter and all-gather."""

    def broadcast(self, call: CollectiveCall, tensor: torch.Tensor, root: int) -> None:
        """The ranks of the root's host send shares down a binomial tree of hosts, and each host puts them together."""
        root_host = self._host_of[root]
        splits = self._even_splits(tensor, root)
        # First on its own host, also if the root alone sends: a mismatch there is found before other hosts have data.
        if self._host == root_host and self._local is not None:
            self._local.broadcast(call, tensor, self._neighbours.index(root))
        parent, children = binomial_tree(self._host, len(self._hosts), root_host)
        messages = self._messages(call)
        own_lanes = self._own_lanes(lanes(splits))
        if parent is not None:
            for lane in own_lanes:
                messages.expect(self._carrier(lane, parent), [tensor[lane.start : lane.end]])
            messages.wait()
        for child in children:
            for lane in own_lanes:
                messages.send(self._carrier(lane, child), [tensor[lane.start : lane.end]])
        if self._host != root_host:
            self._put_together(call, tensor, splits[self._host])

    def gather(self, call: CollectiveCall, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        """Each host sends one block to the root, or each rank a large tensor."""
        messages = self._messages(call)
        if self._host != self._host_of[root]:
            if self._is_shared(tensor, self._host):
                messages.send(root, [tensor])
                return
            parts = [tensor]
            if self._local is not None:
                parts = [torch.empty_like(tensor) for _ in self._neighbours] if self._is_leader else []
                self._local.gather(call, parts, tensor, 0)
            if self._is_leader:
                messages.send(root, parts)
            return
        if self._rank == root:
            for host in self._other_hosts:
                for carrier, ranks in self._blocks_of(tensor, host):
                    messages.expect(carrier, [outputs[rank] for rank in ranks])
        if self._local is not None:
            near = [outputs[rank] for rank in self._neighbours] if self._rank == root else []
            self._local.gather(call, near, tensor, self._neighbours.index(root))
        else:
            outputs[root].copy_(tensor)
        messages.wait()

    def scatter(self, call: CollectiveCall, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
        """The root sends one block to each host, or a large tensor to each rank."""
        messages = self._messages(call)
        if self._host != self._host_of[root]:
            if self._is_shared(output, self._host) or self._local is None:
                messages.expect(root, [output])
                messages.wait()
                return
            parts = []
            if self._is_leader:
                parts = [torch.empty_like(output) for _ in self._neighbours]
                messages.expect(root, parts)
                messages.wait()
            self._local.scatter(call, output, parts, 0)
            return
        if self._local is not None:
            near = [inputs[rank] for rank in self._neighbours] if self._rank == root else []
            self._local.scatter(call, output, near, self._neighbours.index(root))
        else:
            output.copy_(inputs[root])
        if self._rank == root:
            for host in self._other_hosts:
                for carrier, ranks in self._blocks_of(output, host):
                    messages.send(carrier, [inputs[rank] for rank in ranks])

    def _is_shared(self, tensor: torch.Tensor, host: int) -> bool:
        """Whether each rank of a host carries its own tensor, of this size, between the root and the host."""
        return tensor.nbytes * len(self._hosts[host]) >= SHARED_BYTES

    def _blocks_of(self, tensor: torch.Tensor, host: int) -> list[tuple[int, Sequence[int]]]:
        """Who carries tensors of this size between the root and a host, and for which ranks."""
        ranks = self._hosts[host]
        return [(rank, [rank]) for rank in ranks] if self._is_shared(tensor, host) else [(ranks[0], ranks)]

    def allgather(self, call: CollectiveCall, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Each host's block goes to each other host. There, its carriers publish what they have received."""
        outputs[self._rank].copy_(tensor)
        blocks = [Joined([outputs[rank] for rank in ranks]) for ranks in self._hosts]
        own_block = blocks[self._host]
        is_shared = own_block.nbytes >= SHARED_BYTES
        messages = self._messages(call)
        # What each rank of this host receives: views of this rank's own outputs.
        received: list[list[torch.Tensor]] = [[] for _ in self._neighbours]
        for host in self._other_hosts:
            for lane in self._lanes_of_block(blocks[host], host, self._host):
                sender, receiver = lane.carriers
                parts = blocks[host].cut(lane.start, lane.end)
                received[receiver] += parts
                if receiver == self._local_rank:
                    messages.expect(self._hosts[host][sender], parts)
        if not is_shared:
            self._allgather_on_host(call, outputs)  # the leader sends all of it
        for host in self._other_hosts:
            for lane in self._lanes_of_block(own_block, self._host, host):
                sender, receiver = lane.carriers
                if sender == self._local_rank:
                    messages.send(self._hosts[host][receiver], own_block.cut(lane.start, lane.end))
        if is_shared:
            self._allgather_on_host(call, outputs)
        messages.wait()
        if self._local is not None:
            self._local.share(call, received)

    def _allgather_on_host(self, call: CollectiveCall, outputs: Sequence[torch.Tensor]) -> None:
        if self._local is not None:
            self._local.share(call, [[outputs[rank]] for rank in self._neighbours])

    def _lanes_of_block(self, block: Joined, source: int, target: int) -> list[Lane]:
        """Who carries a host's block to another host: each rank its own tensor, unless the block is small."""
        senders, receivers = len(self._hosts[source]), len(self._hosts[target])
        if block.nbytes < SHARED_BYTES:
            return lanes([single_split(block.length, senders), single_split(block.length, receivers)])
        return lanes([block.split, even_split(block.length, receivers)])
