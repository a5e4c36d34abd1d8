"""Device maps: from a tensor's device on this worker to its device on the receiver.

A call uses the caller's map for the callee, and its answer the inverse of the same map. Rules that hold here:

- A message of CPU tensors needs no map. It is encoded without a ``Place``, which raises ``DeviceMapRequired`` at the
  first tensor on another device; only then it is encoded again with a ``Place``.
- A map may move CPU tensors, too. If this worker has such a map, or answers a caller that has one, its encoders are
  ``careful``: they always raise ``DeviceMapRequired`` without a ``Place``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from farprop.errors import UsageError
from farprop.protocol.device_maps import check_device_maps
from farprop.protocol.roster import Entry
from farprop.runtime.membership import Membership
from farprop.wire.dialect import EncodeCall, EncodeValue
from farprop.wire.message import Message
from farprop.wire.tensors import DeviceMapRequired, Place

_NO_PLACE = "A message was encoded without the device maps, which move CPU tensors, too."
Maps = Mapping[str, Mapping[torch.device, torch.device]]


def portable(maps: Maps) -> dict[str, dict[str, str]]:
    """The maps in the form of a roster's entry."""
    return {to: {str(source): str(target) for source, target in one.items()} for to, one in maps.items()}


def careful_call(encoder: EncodeCall) -> EncodeCall:
    """Wrap an encoder of calls so that it always requires a ``Place``."""

    def encode(
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        graph: list[torch.Tensor] | None = None,
        place: Place | None = None,
    ) -> Message:
        if place is None:
            raise DeviceMapRequired(_NO_PLACE)
        return encoder(function, args, kwargs, graph, place)

    return encode


def careful_value(encoder: EncodeValue) -> EncodeValue:
    """Wrap an encoder of values so that it always requires a ``Place``."""

    def encode(value: Any, graph: list[torch.Tensor] | None = None, place: Place | None = None) -> Message:
        if place is None:
            raise DeviceMapRequired(_NO_PLACE)
        return encoder(value, graph, place)

    return encode


class DeviceMaps:
    """The device maps of this worker, and those of its callers."""

    def __init__(
        self, group: Membership, maps: Mapping[str, Mapping[str, str]], instance_of: Callable[[int], Any]
    ) -> None:
        self._group = group
        self._me = group.own.name
        self._maps = maps
        self._instance_of = instance_of

    def check(self) -> None:
        """Raise if the maps of the workers in the group are invalid."""
        entries = sorted(self._group.entries.values(), key=lambda entry: entry.rank)
        problem = check_device_maps(entries, self._group.is_static)
        if problem is not None:
            raise ValueError(problem)

    @property
    def moves_cpu_in_calls(self) -> bool:
        return any("cpu" in device_map for device_map in self._maps.values())

    @property
    def moves_cpu_in_answers(self) -> bool:
        entries = self._group.entries.values()
        return any("cpu" in entry.device_maps.get(self._me, {}).values() for entry in entries)

    def map_for(self, worker: str) -> dict[torch.device, torch.device]:
        """This worker's map for a callee."""
        return {torch.device(source): torch.device(target) for source, target in self._maps.get(worker, {}).items()}

    def towards(self, worker: str) -> Place:
        """The ``Place`` for calls to a worker."""
        device_map = self._maps.get(worker, {})

        def place(device: torch.device) -> str:
            target = self._target(device_map, device, worker)
            if target is None:
                raise UsageError(
                    f"A tensor on {device} can't be sent to {worker}: no device map says which device takes it there. "
                    f"Call .cpu() on it first, or have {self._me} say so in its options before init_rpc: "
                    f'options.set_device_map("{worker}", {{"{device}": ...}}).'
                ) from None
            return target

        return place

    def back_to(self, caller: str) -> Place:
        """The ``Place`` for answers to a caller. Its map is looked up at the first tensor."""

        def place(device: torch.device) -> str:
            device_map = self._entry(caller).device_maps.get(self._me, {})
            target = self._target({there: here for here, there in device_map.items()}, device, caller)
            if target is None:
                raise UsageError(
                    f"A tensor on {device} can't be sent back to {caller}: no device of it is mapped to {device} of "
                    f"{self._me}. Call .cpu() on it first, or have {caller} say so in its options before init_rpc: "
                    f'options.set_device_map("{self._me}", {{...: "{device}"}}).'
                ) from None
            return target

        return place

    def _target(self, device_map: Mapping[str, str], device: torch.device, worker: str) -> str | None:
        # People with one device write "cuda" without a number.
        target = device_map.get(str(device)) or device_map.get(device.type)
        if target is None and (device.type == "cpu" or worker == self._me):
            return str(device)
        return target

    def _entry(self, worker: str) -> Entry:
        info = self._group.info(worker)  # waits until the workers have joined
        entry = self._group.find(worker)
        if entry is None or self._instance_of(info.id) not in (None, entry.instance):
            self._group.refresh()  # another process has taken its name
            entry = self._group.find(worker)
        if entry is None:
            raise UsageError(f"{worker} has left the group, and with it its device maps.")
        return entry
