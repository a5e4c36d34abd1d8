"""Collectives of ranks that share memory. Ranks are local ranks; tensors are flat and contiguous.

Tensors that are longer than a slot go through it in chunks: while one chunk is written the one before is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from farprop.distributed.native.group_state import CollectiveCall
from farprop.distributed.native.shm_arena import SLOT_BYTES, SLOTS, ShmArena, Stage
from farprop.distributed.reduction import Reduction
from farprop.errors import UsageError

# From this size per rank on, the chain is the fastest.
_CHAIN_BYTES = 512 * 1024
# Below it, up to this size or with two ranks, one-shot is the fastest: every rank reduces the whole tensor.
_ONE_SHOT_BYTES = 32 * 1024
_MAX_VIEWS = 1024


class Read(NamedTuple):
    """What to read of the bytes that a rank publishes.

    Attributes:
        source: the rank.
        start: the first byte.
        into: a flat tensor of as many bytes as are read.
    """

    source: int
    start: int
    into: torch.Tensor


class IntraNode:
    """The collectives of one host, in its shared memory.

    Args:
        arena: the shared memory.
    """

    def __init__(self, arena: ShmArena) -> None:
        self._arena = arena
        self.rank = arena.local_rank
        self.size = arena.size
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def barrier(self, call: CollectiveCall) -> None:
        self._arena.barrier(call)

    def allreduce(self, call: CollectiveCall, tensor: torch.Tensor, reduction: Reduction) -> None:
        self.allreduce_together(call, [tensor], reduction)

    def allreduce_together(self, call: CollectiveCall, tensors: Sequence[torch.Tensor], reduction: Reduction) -> None:
        """Reduce tensors as if they were one. The chunks are cut within each."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        bytes_a_rank = nbytes // self.size // 64 * 64
        is_chain = bytes_a_rank >= _CHAIN_BYTES
        block = min(bytes_a_rank, SLOT_BYTES) if is_chain else SLOT_BYTES
        chunks = [chunk for tensor in tensors for chunk in _chunks(tensor, block)]
        if is_chain:
            self._chain(call, chunks, reduction)
        elif nbytes <= _ONE_SHOT_BYTES or self.size == 2:
            self._one_shot(call, chunks, reduction, is_reader=True)
        else:
            self._reduce_scatter_allgather(call, chunks, reduction)

    def reduce(self, call: CollectiveCall, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
        self._one_shot(call, _chunks(tensor, SLOT_BYTES), reduction, is_reader=self.rank == root)

    def _one_shot(
        self, call: CollectiveCall, chunks: Sequence[torch.Tensor], reduction: Reduction, is_reader: bool
    ) -> None:
        """Each rank writes its chunk, and each reader reduces all of them by itself."""

        def write(number: int, slots: list[torch.Tensor]) -> None:
            reduction.copy_prescaled(chunks[number], self._slot_view(slots[self.rank], chunks[number]))

        def read(number: int, slots: list[torch.Tensor]) -> None:
            if is_reader:
                chunk = chunks[number]
                reduction.combine([self._slot_view(slot, chunk) for slot in slots], chunk)

        self._arena.run(call, len(chunks), write, read)

    def _reduce_scatter_allgather(
        self, call: CollectiveCall, chunks: Sequence[torch.Tensor], reduction: Reduction
    ) -> None:
        """Each rank reduces one share of a chunk into its own slot, and all ranks read the shares from there.

        Nobody reads a rank's own share from its slot before it is reduced, so the total can replace it.
        """

        def write(number: int, slots: list[torch.Tensor]) -> None:
            chunk, own = chunks[number], self._slot_view(slots[self.rank], chunks[number])
            reduction.prescale(chunk)
            start, end = self._bounds(chunk, self.rank)
            own[:start].copy_(chunk[:start])
            own[end:].copy_(chunk[end:])

        def work(number: int, slots: list[torch.Tensor]) -> None:
            chunk = chunks[number]
            start, end = self._bounds(chunk, self.rank)
            if start < end:
                sources = [self._slot_view(slot, chunk)[start:end] for slot in slots]
                total = sources[self.rank]
                sources[self.rank] = chunk[start:end]
                reduction.combine(sources, total)

        def read(number: int, slots: list[torch.Tensor]) -> None:
            chunk = chunks[number]
            for rank, slot in enumerate(slots):
                start, end = self._bounds(chunk, rank)
                chunk[start:end].copy_(self._slot_view(slot, chunk)[start:end])

        self._arena.run(call, len(chunks), write, work, read)

    def _chain(self, call: CollectiveCall, chunks: Sequence[torch.Tensor], reduction: Reduction) -> None:
        """A total goes along the chain of ranks: in one slot, each rank adds its chunk to it. At the end all read it.

        That touches the least memory. But the first chunk takes as many steps as there are ranks, so the tensor is cut
        into at least as many chunks.
        """

        last = self.size - 1

        def slot_of(number: int, slots: list[torch.Tensor]) -> torch.Tensor:
            # The chunk that was there before has been read by all ranks by then.
            return self._slot_view(slots[number // SLOTS % self.size], chunks[number])

        def add(number: int, slots: list[torch.Tensor]) -> None:
            chunk, total = chunks[number], slot_of(number, slots)
            if self.rank == 0:
                reduction.copy_prescaled(chunk, total)
            elif self.rank < last:
                reduction.accumulate_prescaled(total, chunk, out=total)
            else:
                # The last rank has the total first. It doesn't wait a step to read it, while both are in its cache.
                reduction.accumulate_prescaled(total, chunk, out=chunk)
                reduction.postscale(chunk)
                total.copy_(chunk)

        def read(number: int, slots: list[torch.Tensor]) -> None:
            if self.rank < last:
                chunks[number].copy_(slot_of(number, slots))

        others_turns: list[Stage | None] = [None] * (self.size - 1)
        self._arena.run(call, len(chunks), *others_turns[: self.rank], add, *others_turns[self.rank :], read)

    def _bounds(self, chunk: torch.Tensor, rank: int) -> tuple[int, int]:
        length = -(-chunk.numel() // self.size)
        # Whole cache lines, so that two ranks don't write to one.
        length = -(-length // 64) * 64
        return min(rank * length, chunk.numel()), min((rank + 1) * length, chunk.numel())

    def broadcast(self, call: CollectiveCall, tensor: torch.Tensor, root: int) -> None:
        self.scatter(call, tensor, [tensor] * self.size, root, same=True)

    def scatter(
        self, call: CollectiveCall, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, same: bool = False
    ) -> None:
        """With ``same``, all inputs are one tensor, which is written once."""
        block = SLOT_BYTES if same else self._block_bytes
        targets = _chunks(output, block)
        sources = [_chunks(tensor, block) for tensor in inputs]

        def write(number: int, slots: list[torch.Tensor]) -> None:
            if self.rank == root:
                for rank in [0] if same else range(self.size):
                    _typed_view(slots[root][rank * block :], sources[rank][number]).copy_(sources[rank][number])

        def read(number: int, slots: list[torch.Tensor]) -> None:
            if not (same and self.rank == root):
                rank = 0 if same else self.rank
                targets[number].copy_(_typed_view(slots[root][rank * block :], targets[number]))

        self._arena.run(call, len(targets), write, read)

    def gather(self, call: CollectiveCall, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        self._gather(call, outputs, tensor, is_reader=self.rank == root)

    def allgather(self, call: CollectiveCall, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        self._gather(call, outputs, tensor, is_reader=True)

    def _gather(
        self, call: CollectiveCall, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, is_reader: bool
    ) -> None:
        sources = _chunks(tensor, SLOT_BYTES)
        targets = [_chunks(output, SLOT_BYTES) for output in outputs]
        # Without outputs this is a gather to another rank, in which all tensors have the same size.
        count = max(len(sources), *map(len, targets)) if targets else len(sources)

        def write(number: int, slots: list[torch.Tensor]) -> None:
            if number < len(sources):
                self._slot_view(slots[self.rank], sources[number]).copy_(sources[number])

        def read(number: int, slots: list[torch.Tensor]) -> None:
            if is_reader:
                for target, slot in zip(targets, slots, strict=True):
                    if number < len(target):
                        target[number].copy_(self._slot_view(slot, target[number]))

        self._arena.run(call, count, write, read)

    def publish(self, call: CollectiveCall, own: Sequence[torch.Tensor], reads: Sequence[Read], longest: int) -> None:
        """Each rank publishes bytes, and reads what it needs of the others' bytes.

        Args:
            call: the collective.
            own: what this rank publishes: flat tensors, one after the other.
            reads: what it reads.
            longest: the most bytes that any rank publishes; the same on all ranks.
        """
        writes: dict[int, list[tuple[int, torch.Tensor]]] = {}
        targets: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
        start = 0
        for tensor in own:
            for number, offset, piece in _pieces_by_slot(start, tensor):
                writes.setdefault(number, []).append((offset, piece))
            start += tensor.nbytes
        for source, start, into in reads:
            for number, offset, piece in _pieces_by_slot(start, into):
                targets.setdefault(number, []).append((source, offset, piece))

        def write(number: int, slots: list[torch.Tensor]) -> None:
            for offset, piece in writes.get(number, ()):
                slots[self.rank][offset : offset + piece.nbytes].copy_(piece)

        def read(number: int, slots: list[torch.Tensor]) -> None:
            for source, offset, piece in targets.get(number, ()):
                piece.copy_(slots[source][offset : offset + piece.nbytes])

        self._arena.run(call, max(1, -(-longest // SLOT_BYTES)), write, read)

    def share(self, call: CollectiveCall, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """An all-gather in place, of several tensors of each rank: ``parts[rank]`` are those that the rank has."""
        reads = []
        for rank, tensors in enumerate(parts):
            start = 0
            for tensor in tensors if rank != self.rank else ():
                reads.append(Read(rank, start, tensor))
                start += tensor.nbytes
        longest = max(sum(tensor.nbytes for tensor in tensors) for tensors in parts)
        self.publish(call, parts[self.rank], reads, longest)

    def reduce_scatter(
        self, call: CollectiveCall, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction
    ) -> None:
        block = self._block_bytes
        targets = _chunks(output, block)
        sources = [_chunks(tensor, block) for tensor in inputs]
        count = max(map(len, sources))

        def write(number: int, slots: list[torch.Tensor]) -> None:
            for rank, source in enumerate(sources):
                if number < len(source):
                    own = _typed_view(slots[self.rank][rank * block :], source[number])
                    own.copy_(source[number])
                    reduction.prescale(own)

        def read(number: int, slots: list[torch.Tensor]) -> None:
            if number < len(targets):
                target = targets[number]
                reduction.combine([_typed_view(slot[self.rank * block :], target) for slot in slots], target)

        self._arena.run(call, count, write, read)

    def all_to_all(self, call: CollectiveCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Ranks may send different amounts, so they exchange the counts first."""
        counts = [torch.empty(self.size, dtype=torch.int64) for _ in range(self.size)]
        self.allgather(call, counts, torch.tensor([tensor.numel() for tensor in inputs]))
        for sender, output in enumerate(outputs):
            if int(counts[sender][self.rank]) != output.numel():
                raise UsageError(
                    f"Rank {sender} sends {int(counts[sender][self.rank])} elements to rank {self.rank}, which "
                    f"expects {output.numel()}."
                )
        block = self._block_bytes
        sources = [_chunks(tensor, block) for tensor in inputs]
        targets = [_chunks(tensor, block) for tensor in outputs]
        item = inputs[0].element_size()
        longest = max(int(row.max()) for row in counts)

        def write(number: int, slots: list[torch.Tensor]) -> None:
            for rank, source in enumerate(sources):
                if number < len(source):
                    _typed_view(slots[self.rank][rank * block :], source[number]).copy_(source[number])

        def read(number: int, slots: list[torch.Tensor]) -> None:
            for target, slot in zip(targets, slots, strict=True):
                if number < len(target):
                    target[number].copy_(_typed_view(slot[self.rank * block :], target[number]))

        self._arena.run(call, max(1, -(-longest // (block // item))), write, read)

    def _slot_view(self, slot: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
        """As much of a slot as a chunk needs. Views are cached: most programs use few sizes, and a view costs time."""
        key = id(slot), chunk.nbytes, chunk.dtype
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            view = self._views[key] = _typed_view(slot, chunk)
        return view

    @property
    def _block_bytes(self) -> int:
        """The bytes of a slot that each rank gets if a slot holds a block for each; every dtype fits evenly."""
        return SLOT_BYTES // self.size // 64 * 64


def _pieces_by_slot(start: int, tensor: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Cut a tensor, which begins at byte ``start`` of what a rank publishes, where a slot ends.

    Yields:
        The number of the chunk, the position in the slot, and the piece's bytes.
    """
    memory = tensor.view(torch.uint8)
    done = 0
    while done < tensor.nbytes:
        number, offset = divmod(start + done, SLOT_BYTES)
        length = min(SLOT_BYTES - offset, tensor.nbytes - done)
        yield number, offset, memory[done : done + length]
        done += length


def _typed_view(memory: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
    """The first bytes of some memory, as a tensor of a chunk's size and dtype."""
    return memory[: chunk.nbytes].view(chunk.dtype)


def _chunks(tensor: torch.Tensor, block: int) -> list[torch.Tensor]:
    """The tensor in chunks of at most ``block`` bytes; at least one, so that every rank takes part."""
    if tensor.nbytes <= block:
        return [tensor]
    return list(tensor.split(block // tensor.element_size()))
