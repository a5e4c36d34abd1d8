"""Where other workers come in: listening sockets, and connections whose peers have not proved themselves yet."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from farprop.errors import FarpropError
from farprop.ids import WorkerInfo
from farprop.protocol.handshake import READY, Listener
from farprop.runtime.loop import IN, Loop

_log = logging.getLogger("farprop.serving")

HANDSHAKE_SECONDS = 20.0
_MAX_UNPROVEN_PEERS = 256
_ACCEPTS = 32  # at a time: a flood of connections must not keep the loop from everything else
_DEAF_SECONDS = 0.1
_now = time.monotonic


class Unproven:
    """An accepted connection whose peer has not proved itself: holds at most 1 KiB and a deadline."""

    def __init__(self, door: Door, sock: socket.socket, machine: Listener) -> None:
        self.deadline = _now() + HANDSHAKE_SECONDS
        self.sock = sock
        self._door = door
        self._machine = machine

    def on_events(self, _: int) -> None:
        try:
            data = self.sock.recv(512)
            if not data:
                self._door.refuse(self, "it went away")
                return
            reply = self._machine.receive(data)
            peer = None
            if self._machine.state == READY:
                # Before the last word, so that a peer that is refused knows it.
                peer = self._door.check(self._machine.peer_identity)
            if reply:
                self.sock.send(reply, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except (FarpropError, OSError) as error:
            self._door.refuse(self, str(error))
            return
        if peer is not None:
            self._door.admit(self, peer)


class Door:
    """``check(identity)`` says who a peer is that has proved that it knows the secret, or raises; ``on_proven`` is
    called with those it did not refuse.
    """

    def __init__(
        self,
        loop: Loop,
        worker: str,
        new_machine: Callable[[], Listener],
        check: Callable[[bytes], WorkerInfo],
        on_proven: Callable[[socket.socket, WorkerInfo], None],
    ) -> None:
        self._loop = loop
        self._worker = worker
        self._new_machine = new_machine
        self.check = check
        self._on_proven = on_proven
        self._listeners: list[socket.socket] = []
        self._deaf_until = 0.0
        self._unproven: dict[int, Unproven] = {}

    def listen(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        self._loop.add(listener.fileno(), IN, lambda _: self._on_accept(listener))

    def _on_accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, _address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors, most likely. The listener would be ready again at once, so look away for a moment.
                _log.error("%s can't accept connections: %s", self._worker, error)
                self._loop.change(listener.fileno(), 0)
                self._deaf_until = _now() + _DEAF_SECONDS
                self._loop.set_alarm(self._deaf_until)
                return
            if len(self._unproven) >= _MAX_UNPROVEN_PEERS:
                # The oldest and not the newest: a worker proves itself within milliseconds, so a flood of others can't
                # keep it out.
                self.refuse(next(iter(self._unproven.values())), "too many peers have not proved themselves")
            sock.setblocking(False)
            unproven = Unproven(self, sock, self._new_machine())
            self._unproven[sock.fileno()] = unproven
            self._loop.add(sock.fileno(), IN, unproven.on_events)
            self._loop.set_alarm(unproven.deadline)

    def refuse(self, unproven: Unproven, why: str) -> None:
        _log.warning("refused a connection to %s: %s", self._worker, why)
        self._drop(unproven)
        unproven.sock.close()

    def admit(self, unproven: Unproven, peer: WorkerInfo) -> None:
        self._drop(unproven)
        self._on_proven(unproven.sock, peer)

    def _drop(self, unproven: Unproven) -> None:
        self._unproven.pop(unproven.sock.fileno(), None)
        self._loop.remove(unproven.sock.fileno())

    def expire(self, now: float) -> float:
        """Refuse peers that take too long to prove themselves; when to look again (0: not)."""
        for unproven in [u for u in self._unproven.values() if u.deadline <= now]:
            self.refuse(unproven, f"it did not prove itself within {HANDSHAKE_SECONDS:.0f} s")
        if self._deaf_until and self._deaf_until <= now:
            self._deaf_until = 0.0
            for listener in self._listeners:
                self._loop.change(listener.fileno(), IN)
        times = [unproven.deadline for unproven in self._unproven.values()]
        if self._deaf_until:
            times.append(self._deaf_until)
        return min(times, default=0.0)

    def close(self) -> None:
        for listener in self._listeners:
            self._loop.remove(listener.fileno())
            listener.close()
        for unproven in list(self._unproven.values()):
            self._drop(unproven)
            unproven.sock.close()

    def abandon(self) -> None:
        """In a forked child: close the descriptors without a word to the peers."""
        for sock in (*self._listeners, *(u.sock for u in self._unproven.values())):
            sock.close()
