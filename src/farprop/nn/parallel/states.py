"""The states of modules on all ranks: the same parameters, and those of one rank for all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from farprop.distributed.steps import Steps
from farprop.errors import UsageError

_BROADCAST_BYTES = 250 * 1024 * 1024


def check_same(group: dist.ProcessGroup, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
    """Raise on every rank if some have other parameters than rank 0, or of other shapes, strides or dtypes."""
    digests = [
        _digest(f"{name} {tuple(leaf.shape)} {leaf.stride()} {leaf.dtype}")
        for name, leaf in zip(names, parameters, strict=True)
    ]
    device = parameters[0].device
    heads = _of_all_ranks(group, torch.tensor([len(digests), _digest(str(digests))], device=device))
    if all(head == heads[0] for head in heads):
        return
    others = [rank for rank, head in enumerate(heads) if head != heads[0]]
    text = f"Rank {group.rank()}: the modules of ranks {others} differ from that of rank 0. "
    counts = [head[0] for head in heads]
    if len(set(counts)) > 1:
        text += f"They have {counts} parameters that require grad, by rank. "
    else:
        tables = _of_all_ranks(group, torch.tensor(digests, device=device))
        place = next(place for place, column in enumerate(zip(*tables, strict=True)) if len(set(column)) > 1)
        leaf = parameters[place]
        text += (
            f"The first difference is in parameter {place}, here {names[place]}, {tuple(leaf.shape)}, {leaf.dtype}. "
        )
    raise UsageError(text + "Every rank has to build the same module, with its parameters in the same order.")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def _of_all_ranks(group: dist.ProcessGroup, tensor: torch.Tensor) -> list[list[int]]:
    outputs = [torch.empty_like(tensor) for _ in range(group.size())]
    Steps(group, "the comparison of modules", dist.default_pg_timeout).allgather(outputs, tensor)
    return [output.tolist() for output in outputs]


def spread(group: dist.ProcessGroup, tensors: Iterable[torch.Tensor], rank: int) -> None:
    """Give all ranks the values that one has."""
    # Not named broadcast: pybind takes a function of that name, with the group as its first argument, for the group's
    # own that calls its base, and does not call a group's broadcast that is written in Python.
    found = [tensor.detach() for tensor in tensors]
    if found:
        dist._broadcast_coalesced(group, found, _BROADCAST_BYTES, rank)
