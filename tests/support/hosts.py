"""Hosts: network namespaces, joined by veth and a switch, whose cables a test can cut.

A worker is on a host if its environment says so (see ``Hosts.environments`` and ``child``). Nothing outside of the
namespaces is touched, and all of it goes away with them.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

NAMESPACE = "TESTS_NETWORK_NAMESPACE"
_NAMED = Path("/run/netns")  # where `ip netns` keeps them
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()

SECRET = "the-secret-of-several-hosts-0123456789abcdef"


class NotAllowedError(Exception):
    """This machine does not let us make hosts. The text says why."""


class Hosts:
    """A context manager. Host 0 is at 192.0.2.1, host 1 at 192.0.2.2, and so on: addresses reserved for examples."""

    def __init__(self, count: int) -> None:
        prefix = f"farprop-tests-{os.getpid()}-{next(_numbers)}"
        self.names = [f"{prefix}-host{host}" for host in range(count)]
        self.switch = f"{prefix}-switch"

    def __enter__(self) -> Hosts:
        if shutil.which("ip") is None:
            raise NotAllowedError("there is no `ip` here (Debian: iproute2)")
        try:
            try:
                _ip("netns", "add", self.switch)
                _ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
            except subprocess.CalledProcessError as error:
                raise NotAllowedError(f"hosts can't be made here: {error.stderr.strip()}") from error
            _ip("-n", self.switch, "link", "set", "switch", "up")
            for host, name in enumerate(self.names):
                _ip("netns", "add", name)
                ends = ["eth0", "netns", name, "type", "veth", "peer", f"port{host}", "netns", self.switch]
                _ip("link", "add", *ends)
                _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", self.switch, "link", "set", f"port{host}", "master", "switch", "up")
                for interface in ("lo", "eth0"):
                    _ip("-n", name, "link", "set", interface, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in [*self.names, self.switch]:
            if (_NAMED / name).exists():
                _ip("netns", "delete", name)

    def address(self, host: int) -> str:
        return f"192.0.2.{host + 1}"

    def environments(self, places: Sequence[int], **more: str) -> list[Mapping[str, str]]:
        """For workers on these hosts; the first one has the store."""
        shared = {"MASTER_ADDR": self.address(places[0]), "FARPROP_SECRET": SECRET, **more}
        return [{**shared, NAMESPACE: self.names[host]} for host in places]

    def at_switch(self) -> list[str]:
        """The words before a command that is to run at the switch. They end as the command: it has the same process."""
        return ["ip", "netns", "exec", self.switch]

    def send_single_packets(self) -> None:
        """Let no host send several packets as one frame, so that a lost frame is a lost packet."""
        for name in self.names:
            _ip("-n", name, "link", "set", "eth0", "gso_max_segs", "1")

    def cut(self, host: int) -> None:
        """Cut the cable between the host and the switch. No end is notified."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "nomaster")

    def mend(self, host: int) -> None:
        _ip("-n", self.switch, "link", "set", f"port{host}", "master", "switch")

    def unplug(self, host: int) -> None:
        """Take the host's own interface down, which its kernel notices."""
        _ip("-n", self.names[host], "link", "set", "eth0", "down")

    def part(self, one: int, other: int) -> None:
        """Cut off two hosts from each other; all others still reach both."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", self.names[here], "route", "add", "blackhole", f"{self.address(there)}/32")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def enter(name: str) -> None:
    """Move this process, which must have one thread, to a host."""
    with open(_NAMED / name) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"can't enter {name}")
