"""The memory of buckets: flat tensors that gradients are copied into, reduced in, and copied back from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.futures import Future

from farprop._torch import foreach_copy, foreach_multiply, internal_overlap
from farprop.distributed.interop import result_of, tensor_of
from farprop.errors import UsageError
from farprop.nn.parallel.grad_storage import GradStorage
from farprop.protocol.ddp_buckets import BucketIndices

_LARGE = 1 << 14  # elements; above it one pass over the memory saves more than one batched call


class FlatBuffer:
    """The memory of one bucket. A sparse gradient has a bucket of its own, whose buffer is the gradient itself."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], is_sparse: bool) -> None:
        self.parameters = list(parameters)
        self.is_sparse = is_sparse
        self.views: list[torch.Tensor] = []  # of each parameter's gradient in the flat tensor
        self.to_copy: list[tuple[torch.Tensor, torch.Tensor]] = []  # views, and gradients to copy there
        self.future: Future[list[torch.Tensor] | torch.Tensor] | None = None
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
        """Wait until the bucket is reduced."""
        assert self.future is not None
        future, self.future = self.future, None
        reduced = tensor_of(result_of(future))
        if self.is_sparse:
            self.flat = reduced
        elif reduced.data_ptr() != self.flat.data_ptr() or reduced.dtype != self.flat.dtype:
            self.flat.copy_(reduced.view(-1))

    def zeros(self) -> torch.Tensor:
        """What a rank without gradients contributes to the reduction."""
        return _empty_sparse(self.parameters[0]) if self.is_sparse else torch.zeros_like(self.flat)


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
        elif scale is not None and index in self.large and gradient.dtype == view.dtype:
            torch.mul(gradient, scale, out=view)
        else:
            self._buffer_of[index].to_copy.append((view, gradient))

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
        reduced = [buffer.flat] if buffer.is_sparse else buffer.views
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
