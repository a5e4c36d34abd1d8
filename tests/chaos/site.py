"""Where the workers of a scenario run: on hosts with cables, on a small disk, with clocks of their own."""

from __future__ import annotations

import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tests.chaos.faults import ON_HOSTS, Event
from tests.support import clocks, disks, hosts
from tests.support.clocks import WallClock
from tests.support.disks import SmallDisk
from tests.support.hosts import Hosts
from tests.support.links import Links

_MIB = 1 << 20
IN_FLIGHT = 32 * _MIB
# So that the memory of a flood has limits that are far below its size.
_FLOOD_ENVIRONMENT = {"FARPROP_IN_FLIGHT_BYTES": str(IN_FLIGHT), "FARPROP_SHM_POOL_BYTES": str(IN_FLIGHT)}


def missing_faults(has_clocks: bool) -> dict[str, str]:
    """The faults that this machine does not let us make, and why."""
    found = {} if has_clocks else {"clock": "no library for clocks is preloaded"}
    try:
        with Hosts(1):
            pass
    except hosts.NotAllowedError as error:
        found |= dict.fromkeys(sorted(ON_HOSTS), str(error))
    try:
        with tempfile.TemporaryDirectory() as directory, SmallDisk(directory):
            pass
    except disks.NotAllowedError as error:
        found["disk"] = str(error)
    return found


class Site:
    """A context manager.

    Args:
        events: What will happen: the site has what they need.
        size: The number of workers.
        directory: An empty directory.
        seed: Decides who shares a host, and which frames a cable loses.
    """

    def __init__(self, events: Sequence[Event], size: int, directory: str, seed: int) -> None:
        faults = {event.fault for event in events}
        dice = random.Random(f"{seed}/site")
        two_hosts = dice.random() < 0.3
        self._places = [rank % 2 if two_hosts else rank for rank in range(size)]
        self._hosts = Hosts(max(self._places) + 1) if faults & ON_HOSTS else None
        self._links = Links(self._hosts, seed) if self._hosts else None
        self._disk = SmallDisk(f"{directory}/disk") if "disk" in faults else None
        self.meeting_place = self._disk.directory if self._disk else directory
        self._clocks: list[WallClock] = []
        if "clock" in faults:
            self._clocks = [WallClock(os.path.join(directory, f"clock{rank}")) for rank in range(size)]
        # A worker whose monotonic clock differs is on another host.
        self._ahead = {event.rank: str(int(event.ahead)) for event in events if is_ahead_from_the_start(event)}
        self._more = _FLOOD_ENVIRONMENT if "flood" in faults else {}
        self._active: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
        self._stack = ExitStack()

    def __enter__(self) -> Site:
        with self._stack:
            if self._hosts and self._links:
                self._stack.enter_context(self._hosts)
                self._hosts.send_single_packets()
                self._stack.enter_context(self._links)
            if self._disk:
                self._stack.enter_context(self._disk)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def environments(self) -> list[dict[str, str]]:
        """Of each worker."""
        size = len(self._places)
        found = (
            [dict(own) for own in self._hosts.environments(self._places)] if self._hosts else [{} for _ in range(size)]
        )
        for rank, own in enumerate(found):
            own |= self._more
            if self._disk:
                own |= self._disk.environment
            if self._clocks:
                own |= self._clocks[rank].environment
            if self._ahead:
                own["FARPROP_SECRET"] = hosts.SECRET
            if rank in self._ahead:
                own[clocks.MONOTONIC] = self._ahead[rank]
        return found

    def begin(self, event: Event) -> None:
        """Let something happen to a cable, the disk or a clock."""
        if event.fault in ON_HOSTS:
            for way in event.ways:
                self._active[self._places[event.rank], way].append(event.link)
            self._change(event)
        elif event.fault == "disk" and self._disk:
            self._disk.fill(event.with_files)
        elif event.fault == "clock" and not is_ahead_from_the_start(event):
            self._clocks[event.rank].set(event.ahead)

    def end(self, event: Event) -> None:
        """Let it be over. Clocks stay wrong."""
        if event.fault in ON_HOSTS:
            for way in event.ways:
                self._active[self._places[event.rank], way].remove(event.link)
            self._change(event)
        elif event.fault == "disk" and self._disk:
            self._disk.free()

    def _change(self, event: Event) -> None:
        assert self._links is not None
        host = self._places[event.rank]
        for way in event.ways:
            settings: dict[str, Any] = {}
            for link in self._active[host, way]:
                settings |= {name: max(value, settings.get(name, 0.0)) for name, value in link.items()}
            self._links.use(host, (way,), **settings)


def is_ahead_from_the_start(event: Event) -> bool:
    """Whether it is about a monotonic clock. Those don't jump."""
    return event.fault == "clock" and event.at == 0
