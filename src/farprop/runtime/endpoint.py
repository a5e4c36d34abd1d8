"""The endpoint of this process, for calls and process groups: its secret, its identity and its listening sockets."""

from __future__ import annotations

import os
import secrets
import socket
from functools import partial
from typing import Any

import torch.distributed as dist

from farprop.config import Settings
from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import INSPECT, Keys
from farprop.runtime import rendezvous
from farprop.runtime.dialer import Dialer
from farprop.runtime.secret import Secret, find_secret
from farprop.transport import sockets


class Endpoint:
    """Finds the job's secret, and makes the keys and the identity of this process.

    Args:
        store: the job's store.
        name: the name of this worker.
        rank: the rank of this worker.
        purpose: ``signing.CALLS`` or ``signing.GROUP``. Each has keys of its own.
        settings: the settings of this process.
        can_share: whether workers of one host may connect by Unix sockets, if the settings allow them.

    Attributes:
        job: the random name of the job.
        secret: the job's secret.
        keys: derived from the secret; they sign the values that this worker writes to the store.
        inspection_key: with it observers prove themselves, who are no members and make no calls.
        identity: the identity that this worker sends to its peers.
        dialer: dials other workers, and answers those that dial this one.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, purpose: str, settings: Settings, can_share: bool = True
    ) -> None:
        job = self.job = rendezvous.job_of(store)
        self._settings = settings
        self.secret: Secret = find_secret(settings, job, partial(rendezvous.agree, store))
        self.keys = Keys(self.secret.key, job, purpose)
        self.inspection_key = Keys(self.secret.key, job, INSPECT).handshake
        self.identity = Identity(name, rank, secrets.token_hex(8), settings.max_message_bytes)
        unix_allowed = settings.transport == "auto" and sockets.HAVE_UNIX and can_share
        self.dialer = Dialer(self.identity, self.keys, unix_allowed, settings)
        self._tcp: tuple[str, int] = ("", 0)
        self._unix = ""

    def listen(self, towards: str) -> list[socket.socket]:
        """Listen for other workers: on TCP, and on a Unix socket where that is allowed.

        Args:
            towards: a host of the job. Unless the settings name an interface, this worker listens on the address from
                which it reaches that host.

        Returns:
            The listening sockets.
        """
        interface = self._settings.interface
        host = sockets.address_towards(towards) if interface is None else sockets.interface_address(interface)
        listeners = [sockets.listen_tcp(host, self._settings.port_range)]
        self._tcp = listeners[0].getsockname()[:2]
        if self.dialer.unix_allowed:
            unix = f"farprop-{self.identity.instance}"
            try:
                listeners.append(sockets.listen_unix(unix))
            except BaseException:
                listeners[0].close()
                raise
            self._unix = unix
        return listeners

    def entry(self, world_size: int, **facts: Any) -> Entry:
        """The entry that this worker writes to the store. Call this after ``listen``.

        Args:
            world_size: the number of workers; 0 in a group that workers join and leave.
            facts: further fields of the entry.
        """
        return Entry(
            name=self.identity.name,
            rank=self.identity.rank,
            world_size=world_size,
            instance=self.identity.instance,
            tcp=self._tcp,
            unix=self._unix,
            net=self.dialer.net,
            host=socket.gethostname(),
            pid=os.getpid(),
            own_secret=self.secret.was_found,
            tls=self._settings.tls,
            max_message_bytes=self._settings.max_message_bytes,
            **facts,
        )

    def on_all_joined(self) -> None:
        """All workers have the secret: rank 0 removes the file in which the others found it."""
        if self.identity.rank == 0:
            self.secret.remove_file()
        self.secret.let_go()
