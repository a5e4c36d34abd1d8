"""A peer that has proved itself and then says what it likes, byte by byte."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tests.calls.test_trust import _closes, _connect, _instance, _key, _prove, _serves
from tests.support.workers import Cluster

closes, serves = _closes, _serves


@contextmanager
def proven(c: Cluster, kind: str = "tcp") -> Iterator[socket.socket]:
    """A connection to worker 0, as worker 1."""
    key = c.run(0, _key)
    identity = json.dumps(["worker1", 1, c.run(0, _instance, 1)]).encode()
    with _connect(c, kind) as connection:
        _prove(connection, key, identity)
        yield connection


def memory(pid: int | None = None) -> int:
    """The resident bytes of a process."""
    with open(f"/proc/{pid or os.getpid()}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
