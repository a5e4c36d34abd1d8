"""The arguments of ``DistributedDataParallel``: which are supported, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from farprop._torch import root_mesh
from farprop.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MIB = 1024 * 1024

DeviceLike: TypeAlias = int | str | torch.device

# What to do instead of using an argument that is not supported.
_ALTERNATIVES = {
    "delay_all_reduce_named_params": "Leave it out: these parameters are then reduced with the others",
    "param_to_hook_all_reduce": "Leave it out, together with delay_all_reduce_named_params",
    "mixed_precision": "Use torch.autocast around the forward pass",
    "skip_all_reduce_unused_params": "Leave it out: find_unused_parameters=True takes care of unused parameters",
    "bucket_cap_mb_list": "Give one size for all buckets, as bucket_cap_mb",
}


def check_supported(**given: Any) -> None:
    """Raise ``UsageError`` for an argument of torch's that is not supported, unless its value is None."""
    for name, value in given.items():
        if value is not None:
            shown = value if isinstance(value, bool | list) else f"a {type(value).__name__}"
            raise UsageError(f"DistributedDataParallel can't take {name}={shown}. {_ALTERNATIVES[name]}.")


def ignored_names(module: nn.Module) -> set[str]:
    """Names of the parameters and buffers that are not synchronised."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters whose gradients are averaged, with their names."""
    ignored = ignored_names(module)
    return [(name, leaf) for name, leaf in module.named_parameters() if leaf.requires_grad and name not in ignored]


def sparse_weights(module: nn.Module) -> set[torch.Tensor]:
    """The parameters that get sparse gradients."""
    return {
        layer.weight for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }


def bucket_limits(cap_mb: float | None, total: int) -> tuple[int, int]:
    """Bytes of the first bucket, and of the later ones, if there are ``total`` bytes of gradients."""
    if cap_mb is not None:
        return int(cap_mb * MIB), int(cap_mb * MIB)
    # The last bucket is reduced when the backward pass has nothing left to compute, so it should not be the largest.
    return MIB, min(25 * MIB, max(MIB, total // 3))


def group_of(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """The group that the arguments name, or the default group."""
    if device_mesh is None:
        return default_group() if process_group is None else process_group
    if process_group is not None:
        raise UsageError("Cannot specify both process_group and device_mesh arguments. Leave one of them out.")
    if device_mesh.ndim != 1:
        raise UsageError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if root_mesh(device_mesh) != device_mesh:
        raise UsageError(
            f"DistributedDataParallel can't take device_mesh={device_mesh}, a slice of a larger mesh, because it can't "
            "take parameters that are sharded over the rest. If none are, give process_group=device_mesh.get_group()."
        )
    return device_mesh.get_group(mesh_dim=0)


def default_group() -> dist.ProcessGroup:
    """The default group of ``torch.distributed``; raises ``UsageError`` if there is none."""
    group = dist.group.WORLD
    if group is None:
        raise UsageError("There is no process group. Call torch.distributed.init_process_group first, or give one.")
    return group


def checked_device(
    module: nn.Module,
    parameters: list[tuple[str, nn.Parameter]],
    device_ids: Sequence[DeviceLike] | None,
    output_device: DeviceLike | None,
) -> torch.device:
    """The device of the first parameter; raises if the device arguments do not fit the module."""
    if not parameters:
        raise UsageError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    for name, leaf in module.named_parameters():
        if isinstance(leaf, nn.parameter.UninitializedParameter):
            raise UsageError(f"{name} is not initialized yet. Run a forward pass of the module before you wrap it.")
    kinds = {leaf.device.type for _, leaf in parameters}
    if len(kinds) > 1:
        raise ValueError(f"The parameters have to be on devices of one type, but are on {sorted(kinds)}.")
    if not device_ids:
        if output_device is not None:
            raise ValueError(
                f"output_device={output_device} needs device_ids, but device_ids is {device_ids}. Leave it out."
            )
        return parameters[0][1].device
    if len(device_ids) > 1 or kinds == {"cpu"} or len({leaf.device for _, leaf in parameters}) > 1:
        raise ValueError(
            f"device_ids names the one device of a module that is not on the CPU, but it is {device_ids}. Leave it out."
        )
    return parameters[0][1].device
