"""Buckets: flat tensors, and the gradients in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.futures import Future

from farprop._torch import internal_overlap
from farprop.distributed.calling import result_of, tensor_of


class Bucket:
    """The memory of the gradients that travel together. A sparse gradient is alone in its bucket, and has none."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], is_sparse: bool) -> None:
        self.parameters = list(parameters)
        self.is_sparse = is_sparse
        self.views: list[torch.Tensor] = []
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # places, and gradients that go there
        self.future: Future[Any] | None = None
        if is_sparse:
            self.flat = _no_elements(self.parameters[0])
            return
        first = self.parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        offset = 0
        for parameter in parameters:
            self.views.append(_view(self.flat, offset, parameter))
            offset += parameter.numel()

    def wait(self) -> None:
        """Wait until it is reduced."""
        assert self.future is not None
        future, self.future = self.future, None
        reduced = tensor_of(result_of(future))
        if self.is_sparse:
            self.flat = reduced
        elif reduced.data_ptr() != self.flat.data_ptr() or reduced.dtype != self.flat.dtype:
            self.flat.copy_(reduced.view(-1))

    def zeros(self) -> torch.Tensor:
        """What a rank without gradients gives."""
        return _no_elements(self.parameters[0]) if self.is_sparse else torch.zeros_like(self.flat)


def _view(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """The place of a gradient, with the strides of its parameter where those have no holes."""
    if internal_overlap(parameter) == 0 and _is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == 0 or reach == tensor.numel()


def _no_elements(parameter: torch.Tensor) -> torch.Tensor:
    indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros((0, *parameter.shape[1:]), requires_grad=False)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
