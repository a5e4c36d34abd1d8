"""Checks the arguments of the backend's collectives, and prepares them for the algorithms.

Bad arguments raise here, before any other rank knows of the call. So the group can be used afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from farprop.distributed.arguments import (
    check_device,
    check_parts,
    copy_back,
    describe,
    dtype_name,
    flat,
    flats,
    pieces,
    split,
)
from farprop.distributed.composed_collectives import sparse_allreduce
from farprop.distributed.native.group_state import CollectiveCall
from farprop.distributed.native.intra_node import IntraNode
from farprop.distributed.reduction import Reduction
from farprop.errors import UsageError

Tensors = Sequence[torch.Tensor]


class CollectiveOp(NamedTuple):
    """A collective with checked arguments.

    Attributes:
        fingerprint: a text that has to be the same on every rank.
        run: runs it.
    """

    fingerprint: str
    run: Callable[[CollectiveCall], None]


class Algorithms(Protocol):
    """The algorithms of a group: ``IntraNode`` or ``Hierarchical``. Tensors are flat."""

    def barrier(self, call: CollectiveCall) -> None: ...
    def allreduce(self, call: CollectiveCall, tensor: torch.Tensor, reduction: Reduction) -> None: ...
    def broadcast(self, call: CollectiveCall, tensor: torch.Tensor, root: int) -> None: ...
    def reduce(self, call: CollectiveCall, tensor: torch.Tensor, root: int, reduction: Reduction) -> None: ...
    def gather(self, call: CollectiveCall, outputs: Tensors, tensor: torch.Tensor, root: int) -> None: ...
    def scatter(self, call: CollectiveCall, output: torch.Tensor, inputs: Tensors, root: int) -> None: ...
    def allgather(self, call: CollectiveCall, outputs: Tensors, tensor: torch.Tensor) -> None: ...
    def reduce_scatter(
        self, call: CollectiveCall, output: torch.Tensor, inputs: Tensors, reduction: Reduction
    ) -> None: ...
    def all_to_all(self, call: CollectiveCall, outputs: Tensors, inputs: Tensors) -> None: ...


class CollectiveOps:
    """Checks the arguments of collectives, and makes a ``CollectiveOp`` of each.

    Args:
        algorithms: run the collectives.
        rank: this rank.
        size: the number of ranks.
    """

    def __init__(self, algorithms: Algorithms, rank: int, size: int) -> None:
        self._algorithms, self._rank, self._size = algorithms, rank, size

    def barrier(self) -> CollectiveOp:
        return CollectiveOp("barrier", self._algorithms.barrier)

    def allreduce(self, tensor: torch.Tensor, reduction: Reduction) -> CollectiveOp:
        check_device(tensor)
        reduction.check_dtype(tensor.dtype)

        def run(call: CollectiveCall) -> None:
            if tensor.is_sparse:
                sparse_allreduce(_CallGather(self._algorithms, call, self._size), tensor, reduction)
                return
            total = flat(tensor)
            self._algorithms.allreduce(call, total, reduction)
            copy_back(tensor, total)

        return CollectiveOp(f"allreduce of {describe(tensor)} with {reduction.kind.name}", run)

    def allreduce_together(self, tensors: Tensors, reduction: Reduction, algorithms: IntraNode) -> CollectiveOp:
        """Flat, contiguous tensors of one dtype, reduced in place as if they were one."""
        sizes = [tensor.numel() for tensor in tensors]
        return CollectiveOp(
            f"allreduce of {dtype_name(tensors[0])} tensors with {sizes} elements",
            lambda call: algorithms.allreduce_together(call, tensors, reduction),
        )

    def broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveOp:
        check_device(tensor)
        self._check_root(root)

        def run(call: CollectiveCall) -> None:
            moved = flat(tensor)
            self._algorithms.broadcast(call, moved, root)
            if self._rank != root:
                copy_back(tensor, moved)

        return CollectiveOp(f"broadcast of {describe(tensor)} from rank {root}", run)

    def reduce(self, tensor: torch.Tensor, root: int, reduction: Reduction) -> CollectiveOp:
        check_device(tensor)
        reduction.check_dtype(tensor.dtype)
        self._check_root(root)

        def run(call: CollectiveCall) -> None:
            total = flat(tensor)
            self._algorithms.reduce(call, total, root, reduction)
            if self._rank == root:
                copy_back(tensor, total)

        return CollectiveOp(f"reduce of {describe(tensor)} with {reduction.kind.name} to rank {root}", run)

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> CollectiveOp:
        check_device(tensor)
        self._check_root(root)
        if self._rank == root:
            check_parts("gather", outputs, self._size, tensor.dtype)
            self._check_sizes("gather", outputs, tensor)

        def run(call: CollectiveCall) -> None:
            moved = flats(outputs) if self._rank == root else []
            self._algorithms.gather(call, moved, flat(tensor), root)
            for output, written in zip(outputs, moved, strict=bool(moved)):
                copy_back(output, written)

        return CollectiveOp(f"gather of {describe(tensor)} to rank {root}", run)

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int) -> CollectiveOp:
        check_device(output)
        self._check_root(root)
        if self._rank == root:
            check_parts("scatter", inputs, self._size, output.dtype)
            self._check_sizes("scatter", inputs, output)

        def run(call: CollectiveCall) -> None:
            moved = flat(output)
            self._algorithms.scatter(call, moved, flats(inputs) if self._rank == root else [], root)
            copy_back(output, moved)

        return CollectiveOp(f"scatter of {describe(output)} from rank {root}", run)

    def allgather(self, outputs: Tensors, tensor: torch.Tensor) -> CollectiveOp:
        check_device(tensor)
        check_parts("allgather", outputs, self._size, tensor.dtype)
        own = outputs[self._rank]
        if own.numel() != tensor.numel():
            raise UsageError(
                f"allgather got {describe(tensor)}, but the output for rank {self._rank} (this rank) is "
                f"{describe(own)}."
            )

        def run(call: CollectiveCall) -> None:
            moved = flats(outputs)
            self._algorithms.allgather(call, moved, flat(tensor))
            for output, written in zip(outputs, moved, strict=True):
                copy_back(output, written)

        sizes = sorted({output.numel() for output in outputs})
        description = (
            describe(tensor) if len(sizes) == 1 else f"{dtype_name(tensor)} {[list(o.shape) for o in outputs]}"
        )
        return CollectiveOp(f"allgather of {description}", run)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> CollectiveOp:
        check_device(tensor)
        check_parts("all_gather_single", [output], 1, tensor.dtype)
        if output.numel() != self._size * tensor.numel():
            pieces(output, tensor, self._size)

        def run(call: CollectiveCall) -> None:
            whole, own = flat(output), flat(tensor)
            self._algorithms.allgather(call, pieces(whole, own, self._size), own)
            copy_back(output, whole)

        return CollectiveOp(f"all_gather_single of {describe(tensor)}", run)

    def reduce_scatter(self, output: torch.Tensor, inputs: Tensors, reduction: Reduction) -> CollectiveOp:
        check_device(output)
        reduction.check_dtype(output.dtype)
        check_parts("reduce_scatter", inputs, self._size, output.dtype)
        if inputs[self._rank].numel() != output.numel():
            raise UsageError(
                f"reduce_scatter got {describe(output)} to write to, but the input for rank {self._rank} (this rank) "
                f"is {describe(inputs[self._rank])}."
            )

        def run(call: CollectiveCall) -> None:
            total = flat(output)
            self._algorithms.reduce_scatter(call, total, flats(inputs), reduction)
            copy_back(output, total)

        shapes = [list(part.shape) for part in inputs]
        return CollectiveOp(f"reduce_scatter of {dtype_name(output)} {shapes} with {reduction.kind.name}", run)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, reduction: Reduction) -> CollectiveOp:
        own = flat(output)
        return self.reduce_scatter(output, pieces(flat(tensor), own, self._size), reduction)

    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> CollectiveOp:
        check_parts("alltoall", outputs, self._size, outputs[0].dtype if outputs else torch.float32)
        check_parts("alltoall", inputs, self._size, outputs[0].dtype)

        def run(call: CollectiveCall) -> None:
            moved = flats(outputs)
            self._algorithms.all_to_all(call, moved, flats(inputs))
            for output, written in zip(outputs, moved, strict=True):
                copy_back(output, written)

        return CollectiveOp(f"alltoall of {dtype_name(outputs[0])}", run)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: list[int], input_sizes: list[int]
    ) -> CollectiveOp:
        return self.all_to_all(split(output, output_sizes, self._size), split(tensor, input_sizes, self._size))

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self._size:
            raise UsageError(f"A group of {self._size} ranks has no rank {root}.")

    def _check_sizes(self, name: str, parts: Tensors, tensor: torch.Tensor) -> None:
        for rank, part in enumerate(parts):
            if part.numel() != tensor.numel():
                raise UsageError(
                    f"{name} moves {describe(tensor)}, but the tensor for rank {rank} is {describe(part)}."
                )


class _CallGather:
    """``allgather`` within one collective, for the sum of sparse tensors."""

    def __init__(self, algorithms: Algorithms, call: CollectiveCall, size: int) -> None:
        self._algorithms, self._call = algorithms, call
        self.size = size

    def allgather(self, outputs: Tensors, tensor: torch.Tensor) -> None:
        self._algorithms.allgather(self._call, flats(outputs), flat(tensor))
