"""A peer that is authenticated, and then sends arbitrary bytes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager

import farprop.rpc as rpc
from farprop.transport.tls import Stream
from tests.calls import functions as f
from tests.support.peers import dial_as, own_entry, own_keys
from tests.support.workers import Cluster


def serves(c: Cluster) -> None:
    """Both workers still answer each other."""
    assert c.run(1, rpc.rpc_sync, "worker0", f.add, (1,)) == 2
    assert c.run(0, rpc.rpc_sync, "worker1", f.add, (1,)) == 2


@contextmanager
def proven(c: Cluster, tls: bool = True) -> Iterator[Stream]:
    """A connection to worker 0, as worker 1."""
    identity = c.run(1, own_entry).identity
    with closing(dial_as(identity, c.run(0, own_keys), c.run(0, own_entry), tls=tls)) as connection:
        yield connection


def memory(pid: int | None = None) -> int:
    """The resident bytes of a process."""
    with open(f"/proc/{pid or os.getpid()}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
