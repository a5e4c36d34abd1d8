"""The states of modules on all ranks: the same parameters, and those of one rank for all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from farprop._torch import broadcast_coalesced
from farprop.distributed.calling import implementer, rank_of, size_of, wait_for
from farprop.errors import UsageError

_BROADCAST_BYTES = 250 * 1024 * 1024


def check_same(group: dist.ProcessGroup, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
    """Raise on every rank if some have other parameters than rank 0, or of other shapes, strides or dtypes."""
    here = [
        f"{name}, {tuple(leaf.shape)}, {leaf.stride()}, {leaf.dtype}"
        for name, leaf in zip(names, parameters, strict=True)
    ]
    text = "\n".join(here).encode()
    device = parameters[0].device
    heads = _of_all_ranks(group, torch.tensor([len(here), len(text), _digest(text)], device=device))
    there = torch.zeros(heads[0][1], dtype=torch.uint8, device=device)
    if rank_of(group) == 0:
        there.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    wait_for(implementer(group, "broadcast").broadcast([there], dist.BroadcastOptions()))
    if all(head == heads[0] for head in heads):
        return
    others = [rank for rank, head in enumerate(heads) if head != heads[0]]
    counts = [head[0] for head in heads]
    if len(set(counts)) > 1:
        what = f"They have {counts} parameters that require grad, by rank."
    else:
        what = _first_difference(bytes(there.tolist()).decode().split("\n"), here)
    raise UsageError(
        f"Rank {rank_of(group)}: the modules of ranks {others} differ from that of rank 0. {what} Every rank has to "
        "build the same module, with its parameters in the same order."
    )


def _first_difference(of_rank_0: Sequence[str], here: Sequence[str]) -> str:
    for place, (theirs, ours) in enumerate(zip(of_rank_0, here, strict=True)):
        if theirs != ours:
            return f"The first difference is in parameter {place}: rank 0 has {theirs}; this rank has {ours}."
    return "This rank has what rank 0 has."


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:7])


def _of_all_ranks(group: dist.ProcessGroup, tensor: torch.Tensor) -> list[list[int]]:
    outputs = [torch.empty_like(tensor) for _ in range(size_of(group))]
    wait_for(implementer(group, "allgather").allgather([outputs], [tensor], AllgatherOptions()))
    return [output.tolist() for output in outputs]


def spread(group: dist.ProcessGroup, tensors: Iterable[torch.Tensor], rank: int) -> None:
    """Give all ranks the values that one has."""
    # Not named broadcast: pybind takes a function of that name, with the group as its first argument, for the group's
    # own that calls its base, and does not call a group's broadcast that is written in Python.
    found = [tensor.detach() for tensor in tensors]
    if found:
        broadcast_coalesced(implementer(group, "broadcast"), found, _BROADCAST_BYTES, rank)
