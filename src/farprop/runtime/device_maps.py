"""Device maps: from a tensor's device on this worker to its device on the receiver.

A call uses the caller's map for the callee, and its answer the inverse of the same map. Rules that hold here:

- A message of CPU tensors needs no map. It is encoded without a ``Place``, which raises ``DeviceMapRequired`` at the
  first tensor on another device; only then it is encoded again with a ``Place``.
- A map may move CPU tensors, too. If this worker has such a map, or answers a caller that has one, its encoders are
  ``careful``: they always raise ``DeviceMapRequired`` without a ``Place``.
- All workers of a group check all maps against each other when they join (``check_device_maps``), and get the same
  result. The error texts begin like torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from farprop.errors import UsageError
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


# Checking the maps of a group


def check_device_maps(entries: Sequence[Entry], is_static: bool) -> str | None:
    """Return what is wrong with the device maps; None if they are valid.

    Every worker that checks the same entries gets the same text.

    Args:
        entries: the entries of the workers in the group.
        is_static: whether the group is complete. In other groups a device map may name workers that join later.
    """
    return next(_problems({entry.name: entry for entry in entries}, is_static), None)


def _problems(workers: dict[str, Entry], is_static: bool) -> Iterator[str]:
    for entry in workers.values():
        if len(set(entry.devices)) != len(entry.devices):
            yield f"Node {entry.name} has duplicated devices\ndevices = {entry.devices}"
        if not _exist(entry.devices, entry):
            yield (
                f"Node {entry.name} has devices with invalid indices\ndevices = {entry.devices}\n"
                f"device count = {entry.cuda_devices}"
            )
    for entry in workers.values():
        # In a dynamic group the named worker may join later.
        if is_static and not workers.keys() >= entry.device_maps.keys():
            unknown = sorted(entry.device_maps.keys() - workers.keys())
            yield (
                f"Node {entry.name} has invalid target node names in its device maps\n"
                f"device maps = {sorted(entry.device_maps)}\nnode names = {sorted(workers)}\n"
                f"No worker of this job is called {', '.join(unknown)}: name those that are, in device_maps= or "
                f"set_device_map of {entry.name}."
            )
        for to, device_map in entry.device_maps.items():
            yield from _problems_of(entry, to, workers.get(to), device_map, is_static)


def _problems_of(
    entry: Entry, to: str, target: Entry | None, device_map: dict[str, str], is_static: bool
) -> Iterator[str]:
    where = f"in its device map for {to}\ndevice map = {device_map}"
    if len(set(device_map.values())) != len(device_map):
        yield f"Node {entry.name} has duplicated target devices {where}"
    if entry.devices and not set(entry.devices) >= device_map.keys():
        yield f"Node {entry.name} has unexpected source devices {where}\ndevices = {entry.devices}"
    if not _exist(device_map, entry):
        yield (
            f"Node {entry.name} has source devices with invalid indices {where}\ndevice count = {entry.cuda_devices}"
        )
    if not is_static and "cpu" in device_map.values():
        # The callee would have to map every CPU tensor in its answers, for callers that it may not know yet.
        yield (
            f"Node {entry.name} maps a device to the CPU {where}\nThat works only where world_size is given to "
            "init_rpc. Call .cpu() on what is sent instead."
        )
    if target is None:
        return
    if target.devices and not set(target.devices) >= set(device_map.values()):
        yield f"Node {entry.name} has unexpected target devices {where}\ndevices = {target.devices}"
    if not _exist(device_map.values(), target):
        yield (
            f"Node {entry.name} has target devices with invalid indices {where}\ndevice count = {target.cuda_devices}"
        )


def _exist(devices: Iterable[str], entry: Entry) -> bool:
    """Whether the worker has these devices. Only CUDA devices can be checked before they are used."""
    for device in devices:
        kind, _, index = device.partition(":")
        if kind == "cuda" and index and not (index.isdigit() and int(index) < entry.cuda_devices):
            return False
    return True
