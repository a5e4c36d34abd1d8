"""Collectives of ranks that share memory. Ranks are those of the host, by place; tensors are flat and contiguous.

Tensors that are longer than a slot go through it in chunks; while one chunk is written the one before is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farprop.distributed.native.calls import Call
from farprop.distributed.native.commons import SLOT_BYTES, SLOTS, Commons, Stage
from farprop.distributed.native.kernels import combine
from farprop.distributed.reduction import Reduction
from farprop.errors import UsageError

# Up to so many bytes, or if there are two ranks, it is faster if everybody reduces all of it than in turns.
_SMALL = 32 * 1024
# From so many bytes a rank on, a chunk goes along the ranks.
_LARGE = 512 * 1024
_MOST_VIEWS = 1024


class OneHost:
    def __init__(self, commons: Commons) -> None:
        self._commons = commons
        self.rank = commons.place
        self.size = commons.size
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def barrier(self, call: Call) -> None:
        self._commons.meet(call)

    def allreduce(self, call: Call, tensor: torch.Tensor, reduction: Reduction) -> None:
        a_rank = tensor.nbytes // self.size // 64 * 64
        if a_rank >= _LARGE:
            self._reduce_along(call, _chunks(tensor, min(a_rank, SLOT_BYTES)), reduction)
        elif tensor.nbytes <= _SMALL or self.size == 2:
            self._reduce_alone(call, _chunks(tensor, SLOT_BYTES), reduction, is_mine=True)
        else:
            self._reduce_in_shares(call, _chunks(tensor, SLOT_BYTES), reduction)

    def reduce(self, call: Call, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
        self._reduce_alone(call, _chunks(tensor, SLOT_BYTES), reduction, is_mine=self.rank == root)

    def _reduce_alone(self, call: Call, chunks: Sequence[torch.Tensor], reduction: Reduction, is_mine: bool) -> None:
        def write(number: int, slots: list[torch.Tensor]) -> None:
            own = self._share(slots[self.rank], chunks[number])
            own.copy_(chunks[number])
            reduction.begin(own)

        def read(number: int, slots: list[torch.Tensor]) -> None:
            if is_mine:
                chunk = chunks[number]
                combine(reduction, [self._share(slot, chunk) for slot in slots], chunk)

        self._commons.run(call, len(chunks), write, read)

    def _reduce_in_shares(self, call: Call, chunks: Sequence[torch.Tensor], reduction: Reduction) -> None:
        """Each rank reduces its share of a chunk into its own slot, where the others get it. Nobody reads it before."""

        def write(number: int, slots: list[torch.Tensor]) -> None:
            chunk, own = chunks[number], self._share(slots[self.rank], chunks[number])
            reduction.begin(chunk)
            start, end = self._bounds(chunk, self.rank)
            own[:start].copy_(chunk[:start])
            own[end:].copy_(chunk[end:])

        def work(number: int, slots: list[torch.Tensor]) -> None:
            chunk = chunks[number]
            start, end = self._bounds(chunk, self.rank)
            if start < end:
                sources = [self._share(slot, chunk)[start:end] for slot in slots]
                total = sources[self.rank]
                sources[self.rank] = chunk[start:end]
                combine(reduction, sources, total)

        def read(number: int, slots: list[torch.Tensor]) -> None:
            chunk = chunks[number]
            for place, slot in enumerate(slots):
                start, end = self._bounds(chunk, place)
                chunk[start:end].copy_(self._share(slot, chunk)[start:end])

        self._commons.run(call, len(chunks), write, work, read)

    def _reduce_along(self, call: Call, chunks: Sequence[torch.Tensor], reduction: Reduction) -> None:
        """A chunk goes along the ranks: each adds its own to it in one slot. At the end all read it.

        That touches the least memory. But the first chunk takes as many steps as there are ranks, so there are at least
        as many chunks.
        """

        def place_of(number: int, slots: list[torch.Tensor]) -> torch.Tensor:
            # Those whose slots are at the same place have long been read by then.
            return self._share(slots[number // SLOTS % self.size], chunks[number])

        def add(number: int, slots: list[torch.Tensor]) -> None:
            chunk, total = chunks[number], place_of(number, slots)
            reduction.begin(chunk)
            if self.rank == 0:
                total.copy_(chunk)
            else:
                reduction.add(total, chunk)
            if self.rank == self.size - 1:
                reduction.end(total)

        def read(number: int, slots: list[torch.Tensor]) -> None:
            chunks[number].copy_(place_of(number, slots))

        others_turns: list[Stage | None] = [None] * (self.size - 1)
        self._commons.run(call, len(chunks), *others_turns[: self.rank], add, *others_turns[self.rank :], read)

    def _bounds(self, chunk: torch.Tensor, place: int) -> tuple[int, int]:
        length = -(-chunk.numel() // self.size)
        # Whole cache lines, so that two ranks don't write to one.
        length = -(-length // 64) * 64
        return min(place * length, chunk.numel()), min((place + 1) * length, chunk.numel())

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> None:
        self.scatter(call, tensor, [tensor] * self.size, root, same=True)

    def scatter(
        self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, same: bool = False
    ) -> None:
        """``same``: all inputs are one, so one copy of it is enough."""
        room = SLOT_BYTES if same else self._room
        targets = _chunks(output, room)
        sources = [_chunks(tensor, room) for tensor in inputs]

        def write(number: int, slots: list[torch.Tensor]) -> None:
            if self.rank == root:
                for place in [0] if same else range(self.size):
                    _part(slots[root][place * room :], sources[place][number]).copy_(sources[place][number])

        def read(number: int, slots: list[torch.Tensor]) -> None:
            if not (same and self.rank == root):
                place = 0 if same else self.rank
                targets[number].copy_(_part(slots[root][place * room :], targets[number]))

        self._commons.run(call, len(targets), write, read)

    def gather(self, call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        self._gather(call, outputs, tensor, is_mine=self.rank == root)

    def allgather(self, call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        self._gather(call, outputs, tensor, is_mine=True)

    def _gather(self, call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, is_mine: bool) -> None:
        sources = _chunks(tensor, SLOT_BYTES)
        targets = [_chunks(output, SLOT_BYTES) for output in outputs]
        # The root alone has outputs, and then all tensors are of one size.
        count = max(len(sources), *map(len, targets)) if targets else len(sources)

        def write(number: int, slots: list[torch.Tensor]) -> None:
            if number < len(sources):
                self._share(slots[self.rank], sources[number]).copy_(sources[number])

        def read(number: int, slots: list[torch.Tensor]) -> None:
            if is_mine:
                for target, slot in zip(targets, slots, strict=True):
                    if number < len(target):
                        target[number].copy_(self._share(slot, target[number]))

        self._commons.run(call, count, write, read)

    def reduce_scatter(
        self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction
    ) -> None:
        room = self._room
        targets = _chunks(output, room)
        sources = [_chunks(tensor, room) for tensor in inputs]
        count = max(map(len, sources))

        def write(number: int, slots: list[torch.Tensor]) -> None:
            for place, source in enumerate(sources):
                if number < len(source):
                    own = _part(slots[self.rank][place * room :], source[number])
                    own.copy_(source[number])
                    reduction.begin(own)

        def read(number: int, slots: list[torch.Tensor]) -> None:
            if number < len(targets):
                target = targets[number]
                combine(reduction, [_part(slot[self.rank * room :], target) for slot in slots], target)

        self._commons.run(call, count, write, read)

    def all_to_all(self, call: Call, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Nobody knows what the others send to each other, so all say so first."""
        counts = [torch.empty(self.size, dtype=torch.int64) for _ in range(self.size)]
        self.allgather(call, counts, torch.tensor([tensor.numel() for tensor in inputs]))
        for sender, output in enumerate(outputs):
            if int(counts[sender][self.rank]) != output.numel():
                raise UsageError(
                    f"Rank {sender} sends {int(counts[sender][self.rank])} elements to rank {self.rank}, which "
                    f"expects {output.numel()}."
                )
        room = self._room
        sources = [_chunks(tensor, room) for tensor in inputs]
        targets = [_chunks(tensor, room) for tensor in outputs]
        item = inputs[0].element_size()
        longest = max(int(row.max()) for row in counts)

        def write(number: int, slots: list[torch.Tensor]) -> None:
            for place, source in enumerate(sources):
                if number < len(source):
                    _part(slots[self.rank][place * room :], source[number]).copy_(source[number])

        def read(number: int, slots: list[torch.Tensor]) -> None:
            for target, slot in zip(targets, slots, strict=True):
                if number < len(target):
                    target[number].copy_(_part(slot[self.rank * room :], target[number]))

        self._commons.run(call, max(1, -(-longest // (room // item))), write, read)

    def _share(self, slot: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
        """As much of a slot as a chunk needs. Most programs use few sizes, and to make a view takes a while."""
        key = id(slot), chunk.nbytes, chunk.dtype
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            view = self._views[key] = _part(slot, chunk)
        return view

    @property
    def _room(self) -> int:
        """What each rank has of a slot if there is something for each; every type fits evenly."""
        return SLOT_BYTES // self.size // 64 * 64


def _part(memory: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
    """The first bytes, as many as a chunk has, of its type."""
    return memory[: chunk.nbytes].view(chunk.dtype)


def _chunks(tensor: torch.Tensor, room: int) -> list[torch.Tensor]:
    """At least one, so that everybody takes part in every collective."""
    if tensor.nbytes <= room:
        return [tensor]
    return list(tensor.split(room // tensor.element_size()))
