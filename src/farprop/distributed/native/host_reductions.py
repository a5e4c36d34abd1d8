"""Reductions of ranks on several hosts.

The ranks of each host are reduced in their order, then the totals of the hosts in the order of hosts, for every size
and every collective. So all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from farprop.distributed.native.group_state import CollectiveCall
from farprop.distributed.native.host_collectives import SHARED_BYTES, HostCollectives
from farprop.distributed.native.host_messages import HostMessages
from farprop.distributed.native.intra_node import Read
from farprop.distributed.native.splits import Joined, Lane, Split, even_split, lanes, single_split
from farprop.distributed.reduction import Reduction

# Up to this many bytes, counted once for each host, each host reduces all of a tensor: one message in place of two.
_ONE_SHOT_BYTES = 128 * 1024


class HostReductions(HostCollectives):
    """All-reduce, reduce and reduce-scatter in three phases: on each host, between hosts, on each host."""

    def barrier(self, call: CollectiveCall) -> None:
        self.allreduce(call, torch.zeros(1), Reduction(dist.ReduceOp.SUM))

    def allreduce(self, call: CollectiveCall, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Each carrier reduces its share on its host, then with those of other hosts. Then all get all shares."""
        first_stage, second_stage = reduction.in_two_stages()
        splits = self._even_splits(tensor)
        if self._local is not None and tensor.nbytes < SHARED_BYTES:
            self._local.reduce(call, tensor, 0, first_stage)
        else:
            self._reduce_on_host(call, [tensor[start:end] for start, end in splits[self._host]], first_stage)
        self._allreduce_lanes(call, tensor, self._own_lanes(lanes(splits)), second_stage)
        self._put_together(call, tensor, splits[self._host])

    def _allreduce_lanes(
        self, call: CollectiveCall, tensor: torch.Tensor, own_lanes: Sequence[Lane], second_stage: Reduction
    ) -> None:
        """Reduce-scatter and all-gather among the carriers of each lane, or in one shot: each reduces all of the lane.

        With two hosts, one shot takes as many bytes.
        """
        count = len(self._hosts)
        is_one_shot = count <= 2 or tensor.nbytes * count <= _ONE_SHOT_BYTES
        # What each host reduces of each lane.
        parts: list[Sequence[torch.Tensor]] = []
        for lane in own_lanes:
            whole = tensor[lane.start : lane.end]
            parts.append([whole] * count if is_one_shot else whole.tensor_split(count))
        messages = self._messages(call)
        totals = [
            self._expect_totals(messages, lane, part[self._host]) for lane, part in zip(own_lanes, parts, strict=True)
        ]
        for lane, part in zip(own_lanes, parts, strict=True):
            for host in self._other_hosts:
                messages.send(self._carrier(lane, host), [part[host]])
        messages.wait()
        for sources in totals:
            self._combine(sources, second_stage)
        if is_one_shot:
            return
        for lane, part in zip(own_lanes, parts, strict=True):
            for host in self._other_hosts:
                messages.expect(self._carrier(lane, host), [part[host]])
        for lane, part in zip(own_lanes, parts, strict=True):
            for host in self._other_hosts:
                messages.send(self._carrier(lane, host), [part[self._host]])
        messages.wait()

    def reduce(self, call: CollectiveCall, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
        """As in ``allreduce``, but only the root's host gets and reduces the totals, and only the root the shares."""
        first_stage, second_stage = reduction.in_two_stages()
        splits = self._even_splits(tensor, root)
        # Only the root's tensor may change.
        shares = [tensor[start:end] for start, end in splits[self._host]]
        inputs = [*shares]
        total = inputs[self._local_rank] = shares[self._local_rank].clone()
        self._reduce_on_host(call, inputs, first_stage)
        own_lanes, first = self._own_lanes(lanes(splits)), splits[self._host][self._local_rank][0]
        parts = [total[lane.start - first : lane.end - first] for lane in own_lanes]
        messages = self._messages(call)
        root_host = self._host_of[root]
        if self._host != root_host:
            for lane, part in zip(own_lanes, parts, strict=True):
                messages.send(self._carrier(lane, root_host), [part])
            return
        totals = [self._expect_totals(messages, lane, part) for lane, part in zip(own_lanes, parts, strict=True)]
        messages.wait()
        for sources in totals:
            self._combine(sources, second_stage)
        is_root = self._rank == root
        if is_root:
            shares[self._local_rank].copy_(total)
        if self._local is not None and tensor.nbytes >= SHARED_BYTES:
            reads = [Read(rank, 0, share) for rank, share in enumerate(shares) if is_root and rank != self._local_rank]
            self._local.publish(call, [total], reads, max(share.nbytes for share in shares))

    def reduce_scatter(
        self, call: CollectiveCall, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction
    ) -> None:
        """Each carrier reduces its share of each host's block, and that host reduces the totals of all hosts."""
        first_stage, second_stage = reduction.in_two_stages()
        blocks = [Joined([inputs[rank] for rank in ranks]) for ranks in self._hosts]
        splits = [self._block_split(block, host, self._host) for host, block in enumerate(blocks)]
        packed = [
            torch.cat(
                [
                    output[:0],
                    *(part for block, split in zip(blocks, splits, strict=True) for part in block.cut(*split[rank])),
                ]
            )
            for rank in range(len(self._neighbours))
        ]
        self._reduce_on_host(call, packed, first_stage)
        own_ranges = [split[self._local_rank] for split in splits]
        totals = packed[self._local_rank].split([end - start for start, end in own_ranges])

        messages = self._messages(call)
        own_block, own_split = blocks[self._host], splits[self._host]
        total = totals[self._host]
        sources = [total if host == self._host else torch.empty_like(total) for host in range(len(self._hosts))]
        first = own_ranges[self._host][0]
        for host in self._other_hosts:
            for lane in lanes([self._block_split(own_block, self._host, host), own_split]):
                sender, receiver = lane.carriers
                if receiver == self._local_rank:
                    into = sources[host][lane.start - first : lane.end - first]
                    messages.expect(self._hosts[host][sender], [into])
        for host in self._other_hosts:
            first = own_ranges[host][0]
            for lane in lanes([splits[host], self._block_split(blocks[host], host, host)]):
                sender, receiver = lane.carriers
                if sender == self._local_rank:
                    part = totals[host][lane.start - first : lane.end - first]
                    messages.send(self._hosts[host][receiver], [part])
        messages.wait()
        self._combine(sources, second_stage)
        self._scatter_total(call, output, total, own_block)

    def _block_split(self, block: Joined, block_host: int, host: int) -> Split:
        """Which part of the block of ``block_host`` each rank of ``host`` reduces."""
        ranks = len(self._hosts[host])
        if self._is_small(block):
            return single_split(block.length, ranks)
        return block.split if host == block_host else even_split(block.length, ranks)

    def _scatter_total(self, call: CollectiveCall, output: torch.Tensor, total: torch.Tensor, block: Joined) -> None:
        """Give each rank of this host its part of the host's block, if it does not have it already."""
        if self._local is None or not self._is_small(block):
            output.copy_(total)
            return
        start, end = block.split[self._local_rank]
        reads = []
        if self._is_leader:
            output.copy_(total[start:end])
        else:
            reads.append(Read(0, start * output.element_size(), output))
        self._local.publish(call, [total], reads, block.nbytes)

    @staticmethod
    def _is_small(block: Joined) -> bool:
        return block.nbytes < SHARED_BYTES

    # The two stages

    def _reduce_on_host(self, call: CollectiveCall, shares: Sequence[torch.Tensor], first_stage: Reduction) -> None:
        """Replace this rank's share by the total of the ranks of this host."""
        total = shares[self._local_rank]
        if self._local is not None:
            self._local.reduce_scatter(call, total, shares, first_stage)
        else:
            first_stage.prescale(total)

    def _expect_totals(self, messages: HostMessages, lane: Lane, own: torch.Tensor) -> list[torch.Tensor]:
        """Post receives for the totals of the other hosts, of a lane or a part of it.

        Returns:
            The totals of all hosts, in their order. ``own`` is that of this host.
        """
        totals = [own if host == self._host else torch.empty_like(own) for host in range(len(self._hosts))]
        for host in self._other_hosts:
            messages.expect(self._carrier(lane, host), [totals[host]])
        return totals

    def _combine(self, totals: Sequence[torch.Tensor], second_stage: Reduction) -> None:
        """Reduce the totals of all hosts into this host's one."""
        own = totals[self._host]
        out = own if self._host < 2 else totals[0]
        second_stage.combine(totals, out)
        if out is not own:
            own.copy_(out)
