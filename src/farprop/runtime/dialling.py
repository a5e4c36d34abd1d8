"""Reaching another worker: a socket on which both sides have proved that they know the job's secret."""

from __future__ import annotations

import json
import secrets
import socket
from functools import partial

from farprop.errors import AuthenticationError, ConnectionLostError
from farprop.protocol.handshake import READY, Dialler, Listener
from farprop.protocol.roster import Entry
from farprop.transport import sockets


class SomebodyElse(ConnectionLostError):
    """The worker's address belongs to another process now."""


class Unresponsive(ConnectionLostError):
    """The worker accepts connections and does not answer: it is stopped, or very busy."""


class Dialling:
    """Who we are, when we dial and when we are dialled."""

    def __init__(self, identity: bytes, key: bytes, unix_allowed: bool) -> None:
        self.net = sockets.network_namespace()
        self.unix_allowed = unix_allowed
        self._identity = identity
        self._key = key

    def listener(self) -> Listener:
        """The machine that answers somebody who dials us."""
        return Listener(self._key, self._identity, secrets.token_bytes(32))

    def dial(self, entry: Entry, deadline: float) -> socket.socket:
        try:
            return sockets.dial(entry, self.net, self.unix_allowed, deadline, partial(self._prove, entry))
        except ConnectionLostError as error:
            raise type(error)(
                f"Can't reach {entry.name} ({entry.host}, pid {entry.pid}): {error}. It has shut down or died, or the "
                "network is cut."
            ) from error

    def _prove(self, entry: Entry, sock: socket.socket) -> None:
        machine = Dialler(self._key, self._identity, secrets.token_bytes(32))
        sock.sendall(machine.start())
        while machine.state != READY:
            try:
                data = sock.recv(512)
            except TimeoutError as error:
                raise Unresponsive("it accepts connections, and does not answer") from error
            if not data and not machine.peer_identity:
                raise ConnectionLostError("it closed the connection before it said who it is")
            if not data:
                raise AuthenticationError(
                    f"{entry.name} closed the connection during the handshake: it does not know this job's secret, "
                    "takes this worker for dead, or is not of this job. All workers need the same FARPROP_SECRET."
                )
            reply = machine.receive(data)
            if reply:
                sock.sendall(reply)
        name, _, instance = json.loads(machine.peer_identity)
        if name != entry.name or instance != entry.instance:
            raise SomebodyElse(f"its address belongs to {name} of another start now")
