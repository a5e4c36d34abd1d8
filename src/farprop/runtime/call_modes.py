"""The modes of the caller's thread that hold in the functions it calls: autocast and checkpoints.

They travel in a request's ``MODES`` head, which most requests don't have. A coroutine has them in each of its steps:
its thread runs others in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CoroutineType
from typing import Any

import torch

from farprop._torch import is_any_autocast_enabled, privateuse_name
from farprop.errors import ProtocolError
from farprop.runtime import checkpoint_regions
from farprop.runtime.async_results import Deferred
from farprop.runtime.checkpoint_regions import MAKING, current_region
from farprop.runtime.coroutine_steps import in_steps
from farprop.wire.modes_head import ModesHead

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "xla")


def modes_here(with_autocast: bool, keeps_graph: bool) -> bytes:
    """The packed modes of this thread for a call; empty if there are none.

    Args:
        with_autocast: whether autocast is on for any device, and travels.
        keeps_graph: whether the callee keeps a graph of the call.
    """
    checkpoint = keeps_graph and checkpoint_regions.is_used and current_region.get() is MAKING
    if not with_autocast and not checkpoint:
        return b""
    dtypes = Autocast.here().dtypes if with_autocast else {}
    return ModesHead({device: _NAMES[dtype] for device, dtype in dtypes.items()}, checkpoint).pack()


class Autocast:
    """``torch.autocast`` as a thread has it: the types of devices that it is on for, with the dtypes."""

    def __init__(self, dtypes: dict[str, torch.dtype]) -> None:
        self.dtypes = dtypes

    @classmethod
    def here(cls) -> Autocast:
        """That of this thread."""
        if not is_any_autocast_enabled():
            return cls({})
        return cls(
            {
                device: torch.get_autocast_dtype(device)
                for device in (*_DEVICES, privateuse_name())
                if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
            }
        )

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have it on in this thread, too."""
        if not self.dtypes:
            yield
            return
        before = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in self.dtypes
        ]
        had_cache = torch.is_autocast_cache_enabled()
        try:
            for device, dtype in self.dtypes.items():
                torch.set_autocast_enabled(device, True)
                torch.set_autocast_dtype(device, dtype)
            # Torch has one cache of cast weights for all threads. A weight that one thread cast with grad off would
            # come without a graph to another one.
            torch.set_autocast_cache_enabled(False)
            yield
        finally:
            torch.set_autocast_cache_enabled(had_cache)
            for device, enabled, dtype in before:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)


class CallModes:
    """The modes that a called function runs in.

    Raises:
        ProtocolError: a device or a dtype is unknown here.
    """

    def __init__(self, packed: bytes | memoryview) -> None:
        head = ModesHead.parse(packed)
        self._checkpoint = head.checkpoint
        dtypes: dict[str, torch.dtype] = {}
        for device, dtype in head.autocast.items():
            if device not in (*_DEVICES, privateuse_name()) or dtype not in _DTYPES:
                raise ProtocolError(
                    f"a call has autocast to {dtype[:20]!r} on for {device[:20]!r}, which is unknown here"
                )
            if torch.amp.is_autocast_available(device):
                dtypes[device] = _DTYPES[dtype]
        self._autocast = Autocast(dtypes)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function in these modes, and what it leaves to be done later."""
        with self._autocast.on():
            if self._checkpoint and torch.is_grad_enabled():
                value = checkpoint_regions.run_as_region(function, args, kwargs)
            else:
                value = function(*args, **kwargs)
        if type(value) is CoroutineType:
            return in_steps(self._autocast.on, value)
        if type(value) is Deferred:
            return value.wrapped(self.run)
        return value
