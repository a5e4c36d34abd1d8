"""The sum of sparse tensors of all ranks."""

from __future__ import annotations

import torch
from torch.distributed import ReduceOp

from farprop.distributed.reduction import Reduction
from farprop.distributed.steps import Steps
from farprop.errors import UsageError


def allreduce(steps: Steps, tensor: torch.Tensor, reduction: Reduction) -> None:
    """Everybody gets everybody's elements, which are added up in the order of ranks."""
    if reduction.kind not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UsageError(f"Sparse tensors can be added up or averaged, but the operation is {reduction.kind}.")
    own = tensor.coalesce()
    indices, values = own.indices(), own.values()
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(steps.size)]
    steps.allgather(counts, torch.tensor([indices.size(1)]))
    longest = max(int(count) for count in counts)
    mine = indices.new_zeros((longest, indices.size(0))), values.new_zeros((longest, *values.shape[1:]))
    mine[0][: indices.size(1)] = indices.t()
    mine[1][: indices.size(1)] = values
    came: list[list[torch.Tensor]] = []
    for part in mine:
        outputs = [torch.empty_like(part) for _ in range(steps.size)]
        steps.allgather(outputs, part)
        came.append([output[: int(count)] for output, count in zip(outputs, counts, strict=True)])
    total = torch.sparse_coo_tensor(
        torch.cat(came[0]).t(), torch.cat(came[1]), tensor.shape, check_invariants=False
    ).coalesce()
    reduction.end(total)
    tensor.copy_(total)
