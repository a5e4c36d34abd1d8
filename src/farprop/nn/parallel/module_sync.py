"""Keeps the module the same on all ranks: checks that the parameters fit, and copies the values of one rank to all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from farprop._torch import broadcast_coalesced
from farprop.distributed.interop import implementer, rank_of, size_of, wait_for
from farprop.errors import UsageError

_BROADCAST_BYTES = 250 * 1024 * 1024


def check_same_parameters(group: dist.ProcessGroup, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
    """Raise ``UsageError`` on every rank if names, shapes, strides or dtypes differ from those of rank 0 anywhere."""
    here = [
        f"{name}, {tuple(leaf.shape)}, {leaf.stride()}, {leaf.dtype}"
        for name, leaf in zip(names, parameters, strict=True)
    ]
    text = "\n".join(here).encode()
    device = parameters[0].device
    heads = _gather_ints(group, torch.tensor([len(here), len(text), _digest(text)], device=device))
    there = torch.zeros(heads[0][1], dtype=torch.uint8, device=device)
    if rank_of(group) == 0:
        there.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    wait_for(implementer(group, "broadcast").broadcast([there], dist.BroadcastOptions()))
    if all(head == heads[0] for head in heads):
        return
    others = [rank for rank, head in enumerate(heads) if head != heads[0]]
    counts = [head[0] for head in heads]
    if len(set(counts)) > 1:
        difference = f"Ranks have {counts} parameters that require grad."
    else:
        difference = _first_difference(bytes(there.tolist()).decode().split("\n"), here)
    raise UsageError(
        f"Rank {rank_of(group)}: the modules of ranks {others} differ from the one of rank 0. {difference} Every rank "
        "has to build the same module, with its parameters in the same order."
    )


def _first_difference(on_rank_0: Sequence[str], here: Sequence[str]) -> str:
    for index, (theirs, ours) in enumerate(zip(on_rank_0, here, strict=True)):
        if theirs != ours:
            return f"The first difference is in parameter {index}: rank 0 has {theirs}; this rank has {ours}."
    return "This rank has the same parameters as rank 0."


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:7])


def _gather_ints(group: dist.ProcessGroup, tensor: torch.Tensor) -> list[list[int]]:
    outputs = [torch.empty_like(tensor) for _ in range(size_of(group))]
    wait_for(implementer(group, "allgather").allgather([outputs], [tensor], AllgatherOptions()))
    return [output.tolist() for output in outputs]


def copy_from_rank(group: dist.ProcessGroup, tensors: Iterable[torch.Tensor], rank: int) -> None:
    """Copy the values of ``tensors`` on one rank to all ranks."""
    # This function must not be named broadcast. When pybind looks for a Python override of the group's broadcast, it
    # inspects the calling frame; a caller of that name with the group as its first argument looks like the override
    # calling its base class, and then a broadcast that is written in Python is not called.
    values = [tensor.detach() for tensor in tensors]
    if values:
        broadcast_coalesced(implementer(group, "broadcast"), values, _BROADCAST_BYTES, rank)


def any_rank(group: dist.ProcessGroup, device: torch.device, here: bool) -> bool:
    """Whether ``here`` is true on any rank. All ranks have to call it."""
    flag = torch.tensor([float(here)], device=device)
    dist.all_reduce(flag, group=group)
    return bool(flag.item())


def highest_rank(group: dist.ProcessGroup, device: torch.device, here: bool) -> int:
    """The highest rank on which ``here`` is true. All ranks have to call it, and on one of them it has to be true."""
    rank = torch.tensor([rank_of(group) if here else -1], device=device)
    dist.all_reduce(rank, dist.ReduceOp.MAX, group=group)
    return int(rank.item())
