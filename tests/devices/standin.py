"""A device type written in Python, with any number of devices: ``lazy:0``, ``lazy:1``, ...

Torch knows the name ``lazy``, but its builds have no such devices. The name is suitable because autograd runs the
graphs of all of these devices on the caller's thread. With ``privateuseone``, torch's name for backends of others, it
assumes that a backend in Python has one device, and refuses graphs on any other.

A tensor on such a device wraps one on the CPU. Nothing outside of this module reaches the inner tensor: readers of its
bytes have to call ``.cpu()``, and torch's own ``to`` moves tensors from the CPU, through two kernels that this module
registers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten


class Elsewhere(torch.Tensor):
    """A tensor on a stand-in device."""

    _inner: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: Any) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(device),
        )  # fmt: skip
        made._inner = inner
        return made  # type: ignore[no-any-return]

    def __init__(self, inner: torch.Tensor, device: Any) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Elsewhere({self._inner}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        used: list[torch.device] = []

        def unwrapped(tensor: Elsewhere) -> torch.Tensor:
            used.append(tensor.device)
            return tensor._inner

        target = kwargs.get("device")
        if target is not None:
            kwargs["device"] = "cpu"
        inner_args, inner_kwargs = tree_map_only(Elsewhere, unwrapped, (args, kwargs))
        if len(set(used)) > 1 and func not in (_aten.copy_.default, _aten._to_copy.default):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, not on {set(used)}")
        out = func(*inner_args, **inner_kwargs)
        if func is _aten.copy_.default:
            return args[0]
        device = used[0] if target is None else torch.device(target)
        return out if device.type == "cpu" else tree_map_only(torch.Tensor, lambda t: cls(t, device), out)


def _empty(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return Elsewhere(torch.empty(size, dtype=dtype), device)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return Elsewhere(torch.empty_strided(size, stride, dtype=dtype), device)


# The kernels are registered as long as this object lives.
_kernels = torch.library.Library("aten", "IMPL")
_kernels.impl("empty.memory_format", _empty, "Lazy")
_kernels.impl("empty_strided", _empty_strided, "Lazy")
