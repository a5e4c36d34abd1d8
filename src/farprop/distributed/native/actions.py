"""Each collective as a statement, which all ranks have to agree on, and as what is then done.

Bad arguments raise here, before anything is stated: the group is as good as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from farprop.distributed import sparse
from farprop.distributed.arguments import pieces, split
from farprop.distributed.native.calls import Call
from farprop.distributed.native.kernels import check_reduction
from farprop.distributed.native.tensors import check, check_parts, dtype_name, flat, flats, in_words, put_back
from farprop.distributed.reduction import Reduction
from farprop.errors import UsageError

Tensors = Sequence[torch.Tensor]


class Action(NamedTuple):
    statement: str
    act: Callable[[Call], None]


class Way(Protocol):
    """How the ranks of a group reach each other. Tensors are flat."""

    def barrier(self, call: Call) -> None: ...
    def allreduce(self, call: Call, tensor: torch.Tensor, reduction: Reduction) -> None: ...
    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> None: ...
    def reduce(self, call: Call, tensor: torch.Tensor, root: int, reduction: Reduction) -> None: ...
    def gather(self, call: Call, outputs: Tensors, tensor: torch.Tensor, root: int) -> None: ...
    def scatter(self, call: Call, output: torch.Tensor, inputs: Tensors, root: int) -> None: ...
    def allgather(self, call: Call, outputs: Tensors, tensor: torch.Tensor) -> None: ...
    def reduce_scatter(self, call: Call, output: torch.Tensor, inputs: Tensors, reduction: Reduction) -> None: ...
    def all_to_all(self, call: Call, outputs: Tensors, inputs: Tensors) -> None: ...


class Actions:
    def __init__(self, way: Way, rank: int, size: int) -> None:
        self._way, self._rank, self._size = way, rank, size

    def barrier(self) -> Action:
        return Action("barrier", self._way.barrier)

    def allreduce(self, tensor: torch.Tensor, reduction: Reduction) -> Action:
        check(tensor)
        check_reduction(reduction, tensor.dtype)

        def act(call: Call) -> None:
            if tensor.is_sparse:
                sparse.allreduce(_Gathering(self._way, call, self._size), tensor, reduction)  # type: ignore[arg-type]
                return
            total = flat(tensor)
            self._way.allreduce(call, total, reduction)
            put_back(tensor, total)

        return Action(f"allreduce of {in_words(tensor)} with {reduction.kind.name}", act)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Action:
        check(tensor)
        self._check_member(root)

        def act(call: Call) -> None:
            moved = flat(tensor)
            self._way.broadcast(call, moved, root)
            if self._rank != root:
                put_back(tensor, moved)

        return Action(f"broadcast of {in_words(tensor)} from rank {root}", act)

    def reduce(self, tensor: torch.Tensor, root: int, reduction: Reduction) -> Action:
        check(tensor)
        check_reduction(reduction, tensor.dtype)
        self._check_member(root)

        def act(call: Call) -> None:
            total = flat(tensor)
            self._way.reduce(call, total, root, reduction)
            if self._rank == root:
                put_back(tensor, total)

        return Action(f"reduce of {in_words(tensor)} with {reduction.kind.name} to rank {root}", act)

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> Action:
        check(tensor)
        self._check_member(root)
        if self._rank == root:
            check_parts("gather", outputs, self._size, tensor.dtype)
            self._check_sizes("gather", outputs, tensor)

        def act(call: Call) -> None:
            moved = flats(outputs) if self._rank == root else []
            self._way.gather(call, moved, flat(tensor), root)
            for output, written in zip(outputs, moved, strict=bool(moved)):
                put_back(output, written)

        return Action(f"gather of {in_words(tensor)} to rank {root}", act)

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int) -> Action:
        check(output)
        self._check_member(root)
        if self._rank == root:
            check_parts("scatter", inputs, self._size, output.dtype)
            self._check_sizes("scatter", inputs, output)

        def act(call: Call) -> None:
            moved = flat(output)
            self._way.scatter(call, moved, flats(inputs) if self._rank == root else [], root)
            put_back(output, moved)

        return Action(f"scatter of {in_words(output)} from rank {root}", act)

    def allgather(self, outputs: Tensors, tensor: torch.Tensor) -> Action:
        check(tensor)
        check_parts("allgather", outputs, self._size, tensor.dtype)
        own = outputs[self._rank]
        if own.numel() != tensor.numel():
            raise UsageError(
                f"allgather got {in_words(tensor)}, but the output for rank {self._rank}, which this is, is "
                f"{in_words(own)}."
            )

        def act(call: Call) -> None:
            moved = flats(outputs)
            self._way.allgather(call, moved, flat(tensor))
            for output, written in zip(outputs, moved, strict=True):
                put_back(output, written)

        sizes = sorted({output.numel() for output in outputs})
        words = in_words(tensor) if len(sizes) == 1 else f"{dtype_name(tensor)} {[list(o.shape) for o in outputs]}"
        return Action(f"allgather of {words}", act)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Action:
        check(tensor)
        check_parts("all_gather_single", [output], 1, tensor.dtype)
        if output.numel() != self._size * tensor.numel():
            pieces(output, tensor, self._size)

        def act(call: Call) -> None:
            whole, own = flat(output), flat(tensor)
            self._way.allgather(call, pieces(whole, own, self._size), own)
            put_back(output, whole)

        return Action(f"all_gather_single of {in_words(tensor)}", act)

    def reduce_scatter(self, output: torch.Tensor, inputs: Tensors, reduction: Reduction) -> Action:
        check(output)
        check_reduction(reduction, output.dtype)
        check_parts("reduce_scatter", inputs, self._size, output.dtype)
        if inputs[self._rank].numel() != output.numel():
            raise UsageError(
                f"reduce_scatter got {in_words(output)} to write to, but the input for rank {self._rank}, which this "
                f"is, is {in_words(inputs[self._rank])}."
            )

        def act(call: Call) -> None:
            total = flat(output)
            self._way.reduce_scatter(call, total, flats(inputs), reduction)
            put_back(output, total)

        shapes = [list(part.shape) for part in inputs]
        return Action(f"reduce_scatter of {dtype_name(output)} {shapes} with {reduction.kind.name}", act)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, reduction: Reduction) -> Action:
        own = flat(output)
        return self.reduce_scatter(output, pieces(flat(tensor), own, self._size), reduction)

    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> Action:
        check_parts("alltoall", outputs, self._size, outputs[0].dtype if outputs else torch.float32)
        check_parts("alltoall", inputs, self._size, outputs[0].dtype)

        def act(call: Call) -> None:
            moved = flats(outputs)
            self._way.all_to_all(call, moved, flats(inputs))
            for output, written in zip(outputs, moved, strict=True):
                put_back(output, written)

        return Action(f"alltoall of {dtype_name(outputs[0])}", act)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: list[int], input_sizes: list[int]
    ) -> Action:
        return self.all_to_all(split(output, output_sizes, self._size), split(tensor, input_sizes, self._size))

    def _check_member(self, root: int) -> None:
        if not 0 <= root < self._size:
            raise UsageError(f"A group of {self._size} ranks has no rank {root}.")

    def _check_sizes(self, name: str, parts: Tensors, tensor: torch.Tensor) -> None:
        for rank, part in enumerate(parts):
            if part.numel() != tensor.numel():
                raise UsageError(
                    f"{name} moves {in_words(tensor)}, but the tensor for rank {rank} is {in_words(part)}."
                )


class _Gathering:
    """What the sum of sparse tensors is made of."""

    def __init__(self, way: Way, call: Call, size: int) -> None:
        self._way, self._call = way, call
        self.size = size

    def allgather(self, outputs: Tensors, tensor: torch.Tensor) -> None:
        self._way.allgather(self._call, flats(outputs), flat(tensor))
