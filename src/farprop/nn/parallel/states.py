"""The states of modules on all ranks: the same parameters, and those of one rank for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from farprop.errors import UsageError

_BROADCAST_BYTES = 250 * 1024 * 1024


def check_same(group: dist.ProcessGroup, parameters: Sequence[torch.Tensor]) -> None:
    """Raise if ranks have other parameters, or of other shapes."""
    try:
        dist._verify_params_across_processes(group, list(parameters), None)
    except RuntimeError as error:
        raise UsageError(
            f"Rank {group.rank()}: the modules of the ranks differ. Every rank has to build the same one, with its "
            f"parameters in the same order. {error}"
        ) from error


def spread(group: dist.ProcessGroup, tensors: Iterable[torch.Tensor], rank: int) -> None:
    """Give all ranks the values that one has."""
    # Not named broadcast: pybind takes a function of that name, with the group as its first argument, for the group's
    # own that calls its base, and does not call a group's broadcast that is written in Python.
    found = [tensor.detach() for tensor in tensors]
    if found:
        dist._broadcast_coalesced(group, found, _BROADCAST_BYTES, rank)
