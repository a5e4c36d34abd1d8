"""Device maps: on which device of the receiver a tensor goes on that is not on the CPU here.

A call goes by the caller's map for the callee, its answer by the inverse of the same map. Rules that hold here:

- Nobody looks at a map for a message of CPU tensors. Encoding it without a ``Place`` raises ``NotPlaced`` at the first
  tensor that is elsewhere, and only then it is encoded again with one.
- A map may move CPU tensors too. A worker that has such a map, or answers to one that has, can't wait for
  a tensor to raise ``NotPlaced``: its encoders are ``careful``, and raise it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from farprop.errors import UsageError
from farprop.protocol.device_maps import judge_device_maps
from farprop.protocol.roster import Entry
from farprop.runtime.group import Group
from farprop.wire.codec import Encoded
from farprop.wire.tensors import NotPlaced, Place

Maps = Mapping[str, Mapping[torch.device, torch.device]]


def portable(maps: Maps) -> dict[str, dict[str, str]]:
    """The maps as a roster's entry has them."""
    return {to: {str(source): str(target) for source, target in one.items()} for to, one in maps.items()}


def careful(encoder: Callable[..., Encoded]) -> Callable[..., Encoded]:
    """An encoder that wants a ``Place``, whatever it encodes."""

    def encode(*args: Any, place: Place | None = None) -> Encoded:
        if place is None:
            raise NotPlaced("A message was encoded without a look at the device maps, which move CPU tensors too.")
        return encoder(*args, place=place)

    return encode


class DeviceMaps:
    """The maps of a worker, and those of its callers."""

    def __init__(self, group: Group, maps: Mapping[str, Mapping[str, str]], instance_of: Callable[[int], Any]) -> None:
        self._group = group
        self._me = group.own.name
        self._maps = maps
        self._instance_of = instance_of

    def check(self) -> None:
        """Raises if the maps of the workers that are there can't be used."""
        entries = sorted(self._group.entries.values(), key=lambda entry: entry.rank)
        problem = judge_device_maps(entries, self._group.is_static)
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
        """Where tensors in a call go."""
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
        """Where tensors in an answer go. The caller is looked up when there is a tensor."""

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
        # "cuda" without a number is what people write who have one.
        target = device_map.get(str(device)) or device_map.get(device.type)
        if target is None and (device.type == "cpu" or worker == self._me):
            return str(device)
        return target

    def _entry(self, worker: str) -> Entry:
        info = self._group.info(worker)  # waits until the workers have met
        entry = self._group.find(worker)
        if entry is None or self._instance_of(info.id) not in (None, entry.instance):
            self._group.refresh()  # another has taken its place
            entry = self._group.find(worker)
        if entry is None:
            raise UsageError(f"{worker} has left the group, and with it its device maps.")
        return entry
