"""Collectives composed of ``send`` and ``recv``.

Each total is formed on one rank, in an order that only depends on the number of ranks, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from farprop.distributed.reduction import Reduction
from farprop.errors import CollectiveError


class P2P(Protocol):
    """The part of a group that these collectives use. Calls return when they are done."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def send(self, tensor: torch.Tensor, to: int) -> None: ...
    def receive(self, tensor: torch.Tensor, source: int) -> None: ...
    def exchange(self, tensor: torch.Tensor, into: torch.Tensor, partner: int) -> None:
        """Send to a rank and receive from it."""


def binomial_tree(rank: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """The place of a rank in a binomial tree.

    Returns:
        Its parent, None for the root; and its children, those with the largest subtrees first.
    """
    position = (rank - root) % size
    bit = 1
    while bit < size and not position & bit:
        bit <<= 1
    parent = (position - bit + root) % size if position else None
    children = []
    while bit > 1:
        bit >>= 1
        if position + bit < size:
            children.append((position + bit + root) % size)
    return parent, children


def broadcast(group: P2P, tensor: torch.Tensor, root: int) -> None:
    """Broadcast down a binomial tree."""
    parent, children = binomial_tree(group.rank, group.size, root)
    if parent is not None:
        group.receive(tensor, parent)
    for child in children:
        group.send(tensor, child)


def reduce(group: P2P, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
    """Reduce up the tree of ``broadcast``. Only the root's tensor changes."""
    position = (group.rank - root) % group.size
    total = tensor.clone(memory_format=torch.contiguous_format)
    reduction.prescale(total)
    received = torch.empty_like(total)
    bit = 1
    while bit < group.size:
        if position & bit:
            group.send(total, (position - bit + root) % group.size)
            return
        if position + bit < group.size:
            group.receive(received, (position + bit + root) % group.size)
            reduction.accumulate(total, received)
        bit <<= 1
    reduction.postscale(total)
    tensor.copy_(total)


def allreduce(group: P2P, tensor: torch.Tensor, reduction: Reduction) -> None:
    """Reduce to rank 0, then broadcast."""
    reduce(group, tensor, 0, reduction)
    broadcast(group, tensor, 0)


def all_to_all(group: P2P, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """In each round, ranks exchange tensors in pairs."""
    for number in range(group.size):
        partner = (number - group.rank) % group.size
        if partner == group.rank:
            outputs[partner].copy_(inputs[partner])
        else:
            group.exchange(inputs[partner], outputs[partner], partner)


def allgather(group: P2P, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """An all-to-all in which each rank sends the same tensor to all."""
    all_to_all(group, outputs, [tensor] * group.size)


def gather(group: P2P, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
    """Every rank sends to the root; only the root has ``outputs``."""
    if group.rank != root:
        group.send(tensor, root)
        return
    for rank, output in enumerate(outputs):
        if rank == root:
            output.copy_(tensor)
        else:
            group.receive(output, rank)


def scatter(group: P2P, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
    """The root sends to every rank; only the root has ``inputs``."""
    if group.rank != root:
        group.receive(output, root)
        return
    for rank, tensor in enumerate(inputs):
        if rank == root:
            output.copy_(tensor)
        else:
            group.send(tensor, rank)


def reduce_scatter(group: P2P, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction) -> None:
    """All-to-all, then each rank reduces its part in the order of ranks."""
    parts = [torch.empty_like(output, memory_format=torch.contiguous_format) for _ in range(group.size)]
    all_to_all(group, parts, inputs)
    for part in parts:
        reduction.prescale(part)
    for part in parts[1:]:
        reduction.accumulate(parts[0], part)
    reduction.postscale(parts[0])
    output.copy_(parts[0])


def monitored_barrier(group: P2P, wait_all_ranks: bool) -> None:
    """Rank 0 waits for the others, so it can name those that have not come. Errors contain the words of Gloo's."""
    if group.rank != 0:
        group.send(torch.zeros(1), 0)
        try:
            group.receive(torch.zeros(1), 0)
        except CollectiveError as error:
            raise type(error)(
                f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: {error}"
            ) from error
        return
    failures: dict[int, CollectiveError] = {}
    for rank in range(1, group.size):
        try:
            group.receive(torch.zeros(1), rank)
        except CollectiveError as error:
            failures[rank] = error
            if not wait_all_ranks:
                break
    if failures:
        first = failures[min(failures)]
        who = f"Rank{'s' if len(failures) > 1 else ''} {', '.join(map(str, failures))}"
        raise type(first)(f"{who} failed to pass monitoredBarrier. {first}") from first
    for rank in range(1, group.size):
        group.send(torch.zeros(1), rank)
