"""Two hosts, which are network namespaces, and the link between them: its rate and its delay."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from tests.support.hosts import Hosts
from tests.support.links import Links

# Room for one wake-up of the scheduler at 10 Gbit/s, and much less than the messages whose time is taken.
_BURST = "256kb"
_LONGEST_QUEUE = "50ms"


@dataclass(frozen=True)
class Link:
    """What is between the hosts, in each direction."""

    label: str
    gigabits: float
    delay: float = 0.0
    """One way, in seconds."""

    def micros(self, size: int) -> float:
        """The time that so many bytes need on the wire alone."""
        return size * 8 / (self.gigabits * 1e3)


LINKS = {
    "1gbit": Link("1 Gbit/s", 1),
    "10gbit": Link("10 Gbit/s", 10),
    "delay": Link("10 Gbit/s, a delay of 0.5 ms each way", 10, 0.0005),
}


class Network:
    """A context manager. It raises `NotAllowedError` where hosts can't be made."""

    def __init__(self) -> None:
        self.hosts = Hosts(2)
        self._links: Links | None = None

    def __enter__(self) -> Network:
        self.hosts.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._undelay()
        self.hosts.__exit__()

    def on(self, host: int) -> list[str]:
        """The words before a command that is to run on a host. They end as the command: it has the same process."""
        return ["ip", "netns", "exec", self.hosts.names[host]]

    def use(self, link: Link) -> None:
        """Make the link like this. Connections stay."""
        self._undelay()
        shape = ["rate", f"{link.gigabits}gbit", "burst", _BURST, "latency", _LONGEST_QUEUE]
        for name in self.hosts.names:
            subprocess.run(["tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", "tbf", *shape], check=True)
        if link.delay:
            self._delay(link.delay)

    def _delay(self, seconds: float) -> None:
        """Put a relay in the place of the switch: the kernel may lack netem, which delays packets."""
        self._links = Links(self.hosts).__enter__()
        for host in (0, 1):
            self._links.use(host, ("in",), delay=seconds)

    def _undelay(self) -> None:
        if self._links is not None:
            self._links.__exit__()
            self._links = None
