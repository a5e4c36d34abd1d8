"""Checks the device maps of a group against each other. The error texts begin like torch's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from farprop.protocol.roster import Entry


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
