"""The memory of gradients: flat buffers, in which buckets are reduced, and where gradients are stored after that.

A gradient is accumulated in its storage (``.grad``, or a distributed autograd context), copied into the flat buffer of
its bucket, reduced there, and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from farprop._torch import foreach_copy, foreach_multiply, internal_overlap, post_accumulate_hooks
from farprop.errors import ReductionError, UsageError
from farprop.protocol.ddp_buckets import BucketIndices
from farprop.runtime.autograd.engine import LocalPass

_LARGE = 1 << 14  # elements; above it one pass over the memory saves more than one batched call
# Bytes. Each lent gradient is reduced in chunks of its own, which costs more than a copy of a smaller one.
_LENDABLE = 1 << 19


class GradStorage(Protocol):
    """The storage of one backward pass's gradients."""

    def get(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """The gradient that the pass has accumulated for a leaf."""

    def put(self, leaves: Sequence[torch.Tensor], reduced: Sequence[torch.Tensor]) -> None:
        """Store reduced gradients, which are views of a bucket's buffer."""


class GradAttribute:
    """Torch's own pass: gradients are in ``.grad``.

    Args:
        as_views: Whether ``.grad`` becomes a view of the bucket's buffer instead of a copy.
    """

    def __init__(self, as_views: bool) -> None:
        self.as_views = as_views

    def get(self, leaf: torch.Tensor) -> torch.Tensor | None:
        return leaf.grad

    def put(self, leaves: Sequence[torch.Tensor], reduced: Sequence[torch.Tensor]) -> None:
        if self.as_views or reduced[0].is_sparse:
            for leaf, gradient in zip(leaves, reduced, strict=True):
                if leaf.grad is not gradient:
                    leaf.grad = gradient
            return
        targets, sources = [], []
        for leaf, gradient in zip(leaves, reduced, strict=True):
            if leaf.grad is gradient:  # it was lent
                continue
            if leaf.grad is None:
                leaf.grad = torch.empty_like(leaf)
            targets.append(leaf.grad)
            sources.append(gradient)
        if targets:
            foreach_copy(targets, sources)


class ContextGradients:
    """A distributed pass: gradients are in its context. Its tensors are never written to, so copies are stored."""

    def __init__(self, running: LocalPass) -> None:
        self._pass = running

    def get(self, leaf: torch.Tensor) -> torch.Tensor | None:
        return self._pass.context.gradients.get(leaf)

    def put(self, leaves: Sequence[torch.Tensor], reduced: Sequence[torch.Tensor]) -> None:
        for leaf, gradient in zip(leaves, reduced, strict=True):
            self._pass.replace(leaf, gradient.clone())


EndReduction = Callable[[], torch.Tensor | None]
"""Waits until a bucket is reduced, and returns the reduced tensor; None if its memory was reduced in place."""


class FlatBuffer:
    """The memory of one bucket. A sparse gradient has a bucket of its own, whose buffer is the gradient itself."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], is_sparse: bool) -> None:
        self.parameters = list(parameters)
        self.is_sparse = is_sparse
        self.views: list[torch.Tensor] = []  # of each parameter's gradient in the flat tensor
        self.to_copy: list[tuple[torch.Tensor, torch.Tensor]] = []  # views, and gradients to copy there
        self.end_reduction: EndReduction | None = None
        if is_sparse:
            self.flat = _empty_sparse(self.parameters[0])
            return
        first = self.parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        offset = 0
        for parameter in parameters:
            self.views.append(_view(self.flat, offset, parameter))
            offset += parameter.numel()

    def wait(self) -> None:
        """Wait until the bucket is reduced.

        Raises:
            ReductionError: its reduction was not launched.
        """
        end_reduction, self.end_reduction = self.end_reduction, None
        if end_reduction is None:
            raise ReductionError("A bucket was to be waited for whose reduction was not launched.")
        reduced = end_reduction()
        if reduced is None:
            return
        if self.is_sparse:
            self.flat = reduced
        elif reduced.data_ptr() != self.flat.data_ptr() or reduced.dtype != self.flat.dtype:
            self.flat.copy_(reduced.view(-1))

    def zeros(self) -> torch.Tensor:
        """What a rank without gradients contributes to the reduction."""
        return _empty_sparse(self.parameters[0]) if self.is_sparse else torch.zeros_like(self.flat)


class GradBucket:
    """What a hook sees of a bucket, with the methods of torch's ``GradBucket``."""

    def __init__(self, bucket: FlatBuffer, index: int, is_last: bool, buffer: torch.Tensor) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        self._buffer = buffer

    def index(self) -> int:
        """The bucket's position in the order in which buckets are reduced."""
        return self._index

    def is_last(self) -> bool:
        """Whether this is the last bucket of the iteration."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket, as one flat tensor."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the buffer, for a hook that wraps another hook."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, in the shapes of the parameters."""
        if self._bucket.is_sparse:
            return [self._buffer]
        sizes = [parameter.numel() for parameter in self._bucket.parameters]
        parts = self._buffer.split(sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._bucket.parameters, strict=True)]

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, in the order of :meth:`gradients`."""
        return list(self._bucket.parameters)


class BucketBuffers:
    """The flat buffers of all buckets.

    Args:
        parameters: All parameters.
        names: Their names, for error messages.
        sparse: Which of them get sparse gradients.
        buckets: The parameters of each bucket.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        sparse: Sequence[bool],
        buckets: Sequence[BucketIndices],
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._members = buckets
        self.buffers = [FlatBuffer([parameters[i] for i in members], sparse[members[0]]) for members in buckets]
        self._buffer_of: dict[int, FlatBuffer] = {}
        self.large = {index for index, leaf in enumerate(parameters) if leaf.numel() > _LARGE}
        self._copied: set[int] = set()  # parameters whose gradients were added in this iteration
        self._lent: dict[int, torch.Tensor] = {}  # gradients that are reduced where they are, in this iteration
        self.views: dict[int, torch.Tensor] = {}
        for buffer, members in zip(self.buffers, buckets, strict=True):
            self._buffer_of.update(dict.fromkeys(members, buffer))
            if not buffer.is_sparse:
                self.views.update(zip(members, buffer.views, strict=True))

    def add(self, index: int, gradient: torch.Tensor | None, scale: float | None) -> None:
        """Put a gradient, multiplied by ``scale``, into its buffer. Small ones are only listed for :meth:`fill`."""
        self._copied.add(index)
        view = self.views.get(index)
        if view is None:
            self._add_sparse(index, gradient, scale)
        elif gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            raise UsageError(
                f"The gradient of {self._names[index]} is sparse. DistributedDataParallel expects sparse gradients "
                "only for nn.Embedding and nn.EmbeddingBag with sparse=True. Make it dense, for example in a hook."
            )
        elif gradient is view:
            if scale is not None:
                view.mul_(scale)
        elif index in self.large and gradient.dtype == view.dtype:
            if scale is None:
                view.copy_(gradient)
            else:
                torch.mul(gradient, scale, out=view)
        else:
            self._buffer_of[index].to_copy.append((view, gradient))

    def lend(self, index: int) -> bool:
        """Have the gradient in ``.grad`` reduced where it is, if nobody else looks at it before that is done.

        Returns:
            Whether it is. Otherwise it has to be added.
        """
        leaf, view = self._parameters[index], self.views.get(index)
        gradient = leaf.grad
        if (
            view is None
            or type(gradient) is not torch.Tensor
            or gradient.layout != torch.strided
            or (gradient.dtype, gradient.stride()) != (view.dtype, view.stride())
            or gradient.requires_grad  # it has a graph
            or view.nbytes < _LENDABLE
            # One is the reducer's own. Others see the gradient of this rank, and what they change has no effect.
            or len(post_accumulate_hooks(leaf) or ()) != 1
        ):
            return False
        self._copied.add(index)
        self._lent[index] = gradient
        return True

    def pieces(self, bucket: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """The memory that is reduced in place: parts of ``flat``, or lent gradients instead of them.

        The sizes of the pieces are the same on all ranks, whatever they have lent.
        """
        pieces = []
        start = end = 0
        for index in self._members[bucket]:
            size = self._parameters[index].numel()
            if self.views[index].nbytes >= _LENDABLE:
                if start < end:
                    pieces.append(flat[start:end])
                lent = self._lent.get(index)
                pieces.append(flat[end : end + size] if lent is None else lent.as_strided((size,), (1,)))
                start = end + size
            end += size
        if start < end:
            pieces.append(flat[start:end])
        return pieces

    def take_back(self) -> None:
        """After an error: give parameters copies of what they lent. A reduction under way may still write to it."""
        for index, lent in self._lent.items():
            if self._parameters[index].grad is lent:
                self._parameters[index].grad = lent.clone()

    def fill(self, bucket: int, storage: GradStorage, scale: float | None) -> None:
        """Put all gradients of a bucket that are not there yet into its buffer.

        They are copied in one call, because a call costs more than a small copy.
        """
        for index in self._members[bucket]:
            if index not in self._copied:
                self.add(index, storage.get(self._parameters[index]), scale)
        buffer = self.buffers[bucket]
        to_copy, buffer.to_copy = buffer.to_copy, []
        if to_copy:
            views = [view for view, _ in to_copy]
            foreach_copy(views, [gradient for _, gradient in to_copy])
            if scale is not None:
                if len(to_copy) == len(self._members[bucket]):
                    buffer.flat.mul_(scale)
                else:
                    foreach_multiply(views, scale)

    def _add_sparse(self, index: int, gradient: torch.Tensor | None, scale: float | None) -> None:
        buffer = self._buffer_of[index]
        if gradient is None:
            buffer.flat = buffer.zeros()
        elif not gradient.is_sparse:
            raise UsageError(
                f"The gradient of {self._names[index]} is dense, but the other ranks expect a sparse one, because it "
                "belongs to an embedding with sparse=True."
            )
        else:
            buffer.flat = gradient.clone() if scale is None else gradient * scale

    def store(self, bucket: int, storage: GradStorage, unused: set[int]) -> None:
        """Write the reduced gradients of a bucket to ``storage``, except those of ``unused`` parameters."""
        buffer, members = self.buffers[bucket], self._members[bucket]
        self._copied.difference_update(members)
        views = [buffer.flat] if buffer.is_sparse else buffer.views
        reduced = [self._lent.pop(index, view) for index, view in zip(members, views, strict=True)]
        used = [(self._parameters[i], tensor) for i, tensor in zip(members, reduced, strict=True) if i not in unused]
        if used:
            storage.put([leaf for leaf, _ in used], [tensor for _, tensor in used])

    def adopt(self, old: BucketBuffers) -> None:
        """Make gradients that are views of older buffers views of these."""
        for index, view in self.views.items():
            leaf, before = self._parameters[index], old.views[index]
            if leaf.grad is before:
                leaf.grad = view.copy_(before)


def _view(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's part of a flat tensor, with the parameter's strides if those leave no gaps."""
    if internal_overlap(parameter) == 0 and _is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == 0 or extent == tensor.numel()


def _empty_sparse(parameter: torch.Tensor) -> torch.Tensor:
    indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros((0, *parameter.shape[1:]), requires_grad=False)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
