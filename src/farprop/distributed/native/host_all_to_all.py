"""The all-to-all of ranks on several hosts.

Ranks may send different amounts, and each rank knows only its own. So the ranks of a host publish their counts to each
other first, and the block for another host begins with the counts of its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from farprop.distributed.native.group_state import CollectiveCall
from farprop.distributed.native.host_collectives import SHARED_BYTES, HostCollectives
from farprop.distributed.native.intra_node import Read
from farprop.errors import UsageError

Tensors = Sequence[torch.Tensor]


class _Counts(NamedTuple):
    """The elements that the ranks of this host send and expect: by local rank, and by the other rank."""

    sent: list[list[int]]
    expected: list[list[int]]


class _Incoming(NamedTuple):
    """The block that another host sends: the counts, and for each of its ranks what it sends to each rank here."""

    counts: torch.Tensor
    data: torch.Tensor


class HostAllToAll(HostCollectives):
    """Leaders exchange small blocks; of large ones, each rank sends its own part to the rank that it is for."""

    def all_to_all(self, call: CollectiveCall, outputs: Tensors, inputs: Tensors) -> None:
        item = inputs[0].element_size()
        counts = self._publish_counts(call, outputs, inputs)
        for sender, row in zip(self._neighbours, counts.sent, strict=True):
            self._check(sender, self._rank, row[self._rank], outputs[sender].numel())
        by_leaders_from = [host for host in self._other_hosts if self._is_for_leaders(host, counts.expected, item)]
        by_leaders_to = [host for host in self._other_hosts if self._is_for_leaders(host, counts.sent, item)]
        messages = self._messages(call)
        incoming: dict[int, _Incoming] = {}
        for host in self._other_hosts:
            if host not in by_leaders_from:
                for rank in self._hosts[host]:
                    messages.expect(rank, [outputs[rank]])
            elif self._is_leader:
                numbers = torch.empty(len(self._hosts[host]) * len(self._neighbours), dtype=torch.int64)
                length = sum(self._totals(host, counts.expected))
                incoming[host] = block = _Incoming(numbers, torch.empty(length, dtype=inputs[0].dtype))
                messages.expect(self._hosts[host][0], [_bytes(part) for part in block])
        outgoing = self._exchange_on_host(call, outputs, inputs, counts, by_leaders_to)
        for host in self._other_hosts:
            if host not in by_leaders_to:
                for rank in self._hosts[host]:
                    messages.send(rank, [inputs[rank]])
            elif self._is_leader:
                numbers = torch.tensor([row[rank] for row in counts.sent for rank in self._hosts[host]])
                messages.send(self._hosts[host][0], [_bytes(numbers), *map(_bytes, outgoing[host])])
        messages.wait()
        self._check_incoming(incoming, counts)
        self._scatter_incoming(call, outputs, incoming, counts, by_leaders_from)

    def _publish_counts(self, call: CollectiveCall, outputs: Tensors, inputs: Tensors) -> _Counts:
        own = torch.tensor([tensor.numel() for tensor in (*inputs, *outputs)])
        rows = [own]
        if self._local is not None:
            rows = [torch.empty_like(own) for _ in self._neighbours]
            self._local.allgather(call, rows, own)
        both = [row.tolist() for row in rows]
        return _Counts([row[: len(inputs)] for row in both], [row[len(inputs) :] for row in both])

    def _is_for_leaders(self, host: int, rows: Sequence[Sequence[int]], item: int) -> bool:
        """Whether leaders carry the block between this host and another. Between two single ranks there is no need."""
        if len(self._hosts[host]) == len(self._neighbours) == 1:
            return False
        return sum(self._totals(host, rows)) * item < SHARED_BYTES

    def _totals(self, host: int, rows: Iterable[Sequence[int]]) -> list[int]:
        """For each rank of this host, the elements that it exchanges with all ranks of another."""
        return [sum(row[rank] for rank in self._hosts[host]) for row in rows]

    def _check(self, sender: int, receiver: int, sent: int, expected: int) -> None:
        if sent != expected:
            raise UsageError(f"Rank {sender} sends {sent} elements to rank {receiver}, which expects {expected}.")

    def _exchange_on_host(
        self, call: CollectiveCall, outputs: Tensors, inputs: Tensors, counts: _Counts, by_leaders_to: Sequence[int]
    ) -> dict[int, list[torch.Tensor]]:
        """The ranks of this host exchange their parts, and the leader gets what it carries.

        Returns:
            On the leader, the block for each host that it sends one to.
        """
        outputs[self._rank].copy_(inputs[self._rank])
        outgoing = {host: [inputs[rank] for rank in self._hosts[host]] for host in by_leaders_to}
        if self._local is None:
            return outgoing
        # Each rank publishes what it sends to its neighbours, then what the leader carries.
        size, item = len(self._neighbours), inputs[0].element_size()
        reads = []
        longest = 0
        for sender, row in enumerate(counts.sent):
            start = 0
            for receiver in _round(sender, size):
                if sender != self._local_rank == receiver:
                    reads.append(Read(sender, start, outputs[self._neighbours[sender]]))
                start += row[self._neighbours[receiver]] * item
            for host in by_leaders_to:
                if sender != self._local_rank and self._is_leader:
                    part = torch.empty(sum(row[rank] for rank in self._hosts[host]), dtype=inputs[0].dtype)
                    outgoing[host].append(part)
                    reads.append(Read(sender, start, part))
                start += sum(row[rank] for rank in self._hosts[host]) * item
            longest = max(longest, start)
        own = [inputs[self._neighbours[receiver]] for receiver in _round(self._local_rank, size)]
        own += [inputs[rank] for host in by_leaders_to for rank in self._hosts[host]]
        self._local.publish(call, own, reads, longest)
        return outgoing

    def _check_incoming(self, incoming: dict[int, _Incoming], counts: _Counts) -> None:
        for host, block in incoming.items():
            sent = iter(block.counts.tolist())
            for sender in self._hosts[host]:
                for receiver, row in zip(self._neighbours, counts.expected, strict=True):
                    self._check(sender, receiver, next(sent), row[sender])

    def _scatter_incoming(
        self,
        call: CollectiveCall,
        outputs: Tensors,
        incoming: dict[int, _Incoming],
        counts: _Counts,
        by_leaders_from: Sequence[int],
    ) -> None:
        """The leader publishes the blocks that it has received; each rank takes its part."""
        if not by_leaders_from:
            return
        item = outputs[0].element_size()
        parts = []  # in the leader's blocks: who sent it, and where it begins
        start = 0
        for host in by_leaders_from:
            for sender in self._hosts[host]:
                for receiver, row in enumerate(counts.expected):
                    if receiver == self._local_rank:
                        parts.append((sender, start))
                    start += row[sender]
        blocks = [block.data for block in incoming.values()]
        reads = []
        if self._is_leader:
            data = torch.cat(blocks)
            for sender, first in parts:
                outputs[sender].copy_(data[first : first + outputs[sender].numel()])
        else:
            reads = [Read(0, first * item, outputs[sender]) for sender, first in parts]
        if self._local is not None:
            self._local.publish(call, blocks, reads, start * item)


def _round(rank: int, size: int) -> list[int]:
    """All other ranks, beginning with the next one: at each moment, ranks publish for different readers."""
    return [(rank + step) % size for step in range(1, size)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
