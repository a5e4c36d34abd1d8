"""Fake peers: they do the handshake with the key that they are given, and then send anything."""

from __future__ import annotations

import dataclasses
import time

from farprop.config import Settings
from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import Keys
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.dialer import Dialer
from farprop.transport.tls import Stream


def own_entry() -> Entry:
    """Run by a worker: its entry in the store."""
    return current_agent()._own_entry


def own_keys() -> Keys:
    """Run by a worker: the keys of its job."""
    return current_agent()._endpoint.keys


def dial_as(identity: Identity, keys: Keys, entry: Entry, kind: str = "tcp", tls: bool = True) -> Stream:
    """A stream to a worker that takes us for ``identity``, over "tcp" or "unix"."""
    dialling = Dialer(identity, keys, kind == "unix", Settings(tls=tls))
    if kind != "unix":
        entry = dataclasses.replace(entry, unix="")
    stream = dialling.dial(entry, time.monotonic() + 20)
    stream.settimeout(20)
    return stream


def receive(stream: Stream) -> bytes:
    """The next bytes; empty at the end of the stream."""
    while True:
        try:
            return stream.recv(1 << 16)
        except BlockingIOError:
            pass  # a part of a record


def hangs_up(stream: Stream) -> bool:
    """Whether the worker at the other end closes the connection."""
    try:
        while receive(stream):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True
