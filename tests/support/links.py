"""The cables of hosts, with a rate, a delay, and losses, which a test can change while workers talk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.hosts import Hosts

_ROOT = Path(__file__).parents[2]
BOTH = ("in", "out")  # from the host, and to the host


class Links:
    """A context manager. It puts a relay in the place of the switch.

    Args:
        hosts: Their cables.
        seed: Decides which frames are lost, doubled or late.
    """

    def __init__(self, hosts: Hosts, seed: object = 0) -> None:
        self._hosts = hosts
        self._seed = seed
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Links:
        ports = [f"port{host}" for host in range(len(self._hosts.names))]
        for host in range(len(ports)):
            self._hosts.cut(host)
        try:
            self._relay = subprocess.Popen(
                [*self._hosts.at_switch(), sys.executable, "-m", "tests.support.relay", str(self._seed), *ports],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._expect("ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._relay is not None:
            self._relay.communicate()  # it ends with its input
            self._relay = None
        for host in range(len(self._hosts.names)):
            self._hosts.mend(host)

    def use(self, host: int, ways: tuple[str, ...] = BOTH, **settings: Any) -> None:
        """Make the cable of a host like this; see ``relay.Way``. What is not said has its default."""
        assert self._relay is not None
        assert self._relay.stdin is not None
        self._relay.stdin.write(json.dumps({"port": host, "ways": ways, "settings": settings}) + "\n")
        self._relay.stdin.flush()
        self._expect("done")

    def _expect(self, line: str) -> None:
        assert self._relay is not None
        assert self._relay.stdout is not None
        if self._relay.stdout.readline().strip() != line:
            raise RuntimeError("the relay between the hosts has failed; it wrote why")
