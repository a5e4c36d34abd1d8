"""How the ranks of hosts divide what the hosts exchange. Lengths and positions are elements or bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import torch

Split: TypeAlias = Sequence[tuple[int, int]]
"""The share of each rank of a host, from its start to its end. Together, the shares are the whole."""

_ALIGNMENT = 64  # a multiple of the items in a cache line, so that two ranks don't write to one


class Lane(NamedTuple):
    """A part of what hosts exchange, and who carries it.

    Attributes:
        start: its first position.
        end: the position after its last.
        carriers: for each host, the local rank that has this part in its share.
    """

    start: int
    end: int
    carriers: tuple[int, ...]


def even_split(length: int, ranks: int) -> Split:
    """All ranks get about the same."""
    cuts = [length * rank // ranks // _ALIGNMENT * _ALIGNMENT for rank in range(ranks)]
    return list(pairwise([*cuts, length]))


def split_by_lengths(lengths: Sequence[int]) -> Split:
    """Each rank gets a given length."""
    return list(pairwise(accumulate(lengths, initial=0)))


def single_split(length: int, ranks: int, carrier: int = 0) -> Split:
    """One rank gets all of it."""
    return split_by_lengths([length if rank == carrier else 0 for rank in range(ranks)])


def lanes(splits: Sequence[Split]) -> list[Lane]:
    """Cut the whole wherever a share of any host ends. So each lane has one carrier on each host.

    Of nothing there is one empty lane, between the first ranks.
    """
    length = splits[0][-1][1]
    if not length:
        return [Lane(0, 0, (0,) * len(splits))]
    ends = [[end for _, end in split] for split in splits]
    cuts = sorted({0}.union(*ends))
    return [
        Lane(start, end, tuple(bisect_right(ends_of_host, start) for ends_of_host in ends))
        for start, end in pairwise(cuts)
    ]


class Joined:
    """Flat tensors end to end, as one sequence.

    Args:
        tensors: all of one dtype.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.split = split_by_lengths([tensor.numel() for tensor in tensors])
        self.length = self.split[-1][1]
        self.nbytes = sum(tensor.nbytes for tensor in tensors)

    def cut(self, start: int, end: int) -> list[torch.Tensor]:
        """Views of the part between two positions, without empty ones."""
        return [
            tensor[max(start, first) - first : min(end, last) - first]
            for tensor, (first, last) in zip(self._tensors, self.split, strict=True)
            if max(start, first) < min(end, last)
        ]
