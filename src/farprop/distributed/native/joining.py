"""How the ranks of a group find each other: an entry of each in the store, a proven connection between each two."""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from farprop.config import Settings
from farprop.distributed.native.commons import CAN_SHARE, new_bell, size_of
from farprop.errors import AuthenticationError, ProtocolError, RendezvousError
from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import GROUP, Keys
from farprop.runtime import rendezvous
from farprop.runtime.dialling import Dialling
from farprop.runtime.door import Door
from farprop.runtime.secret import find_secret
from farprop.transport import sockets
from farprop.transport.memory import Mapping
from farprop.transport.passage import receive_with_descriptor, rights
from farprop.transport.tls import Stream

_HERE = b"h"  # the first byte of whoever dialled


@dataclass
class Joined:
    """``hosts`` has the ranks of each host; ``memory`` and ``bells`` (one for each rank of this host) are there if
    this host has several; ``limits`` has the largest message that each rank takes.
    """

    peers: dict[int, Stream]
    hosts: list[list[int]]
    memory: Mapping | None
    bells: list[int]
    limits: dict[int, int]


def join(store: dist.Store, rank: int, size: int, settings: Settings, timeout: float) -> Joined:
    deadline = time.monotonic() + timeout
    job = rendezvous.job_of(store)
    secret = find_secret(settings, job, partial(rendezvous.agree, store))
    keys = Keys(secret.key, job, GROUP)
    name = f"rank{rank}"
    identity = Identity(name, rank, secrets.token_hex(8), settings.max_message_bytes)
    is_sharing = settings.transport == "auto" and sockets.HAVE_UNIX and CAN_SHARE
    dialling = Dialling(identity, keys, is_sharing, settings)
    # Ranks share memory if they are in one network namespace, and the settings don't say that they are not.
    dialling.net = f"{dialling.net} {settings.host_name}"
    unix = f"farprop-{identity.instance}" if is_sharing else ""
    listeners = [_listen_tcp(store, settings)]
    try:
        if unix:
            listeners.append(sockets.listen_unix(unix))
        own = Entry(
            name=name,
            rank=rank,
            world_size=size,
            instance=identity.instance,
            tcp=listeners[0].getsockname()[:2],
            unix=unix,
            net=dialling.net,
            host=socket.gethostname(),
            pid=os.getpid(),
            own_secret=secret.was_found,
            tls=settings.tls,
            max_message_bytes=settings.max_message_bytes,
        )
        entries = rendezvous.meet(store, keys, own, timeout, "init_process_group or new_group", "a larger timeout")
        if rank == 0:
            secret.remove_file()  # all have read it
        secret.let_go()
    except BaseException:
        secret.remove_file()
        for listener in listeners:
            listener.close()
        raise
    peers = _connect(entries, rank, dialling, listeners, deadline)
    try:
        hosts = _hosts(entries)
        own_host = next(host for host in hosts if rank in host)
        memory, bells = _share(peers, own_host, rank, deadline) if len(own_host) > 1 else (None, [])
    except BaseException:
        for sock in peers.values():
            sock.close()
        raise
    limits = {entry.rank: entry.max_message_bytes for entry in entries}
    return Joined(peers, hosts, memory, bells, limits)


def _listen_tcp(store: dist.Store, settings: Settings) -> socket.socket:
    if settings.interface is not None:
        host = sockets.interface_address(settings.interface)
    else:
        meeting_host = rendezvous.host_of(store) or os.environ.get("MASTER_ADDR") or "localhost"
        host = sockets.address_towards(meeting_host)
    return sockets.listen_tcp(host, settings.port_range)


def _hosts(entries: list[Entry]) -> list[list[int]]:
    hosts: dict[object, list[int]] = {}
    for entry in entries:
        hosts.setdefault(entry.net if entry.unix else entry.rank, []).append(entry.rank)
    return list(hosts.values())


def _connect(
    entries: list[Entry], rank: int, dialling: Dialling, listeners: list[socket.socket], deadline: float
) -> dict[int, Stream]:
    """Dial the ranks below, then let those above in. Rank 0 only lets in, so nobody waits in a circle."""
    peers: dict[int, Stream] = {}
    above = {entry.identity for entry in entries[rank + 1 :]}

    def check(identity: bytes) -> Identity:
        peer = Identity.from_bytes(identity)
        if peer not in above or peer.rank in peers:
            raise AuthenticationError(f"{peer.name} is not one that dials rank {rank} of this group")
        return peer

    def admit(stream: Stream, peer: Identity) -> None:
        sockets.make_ready(stream)
        if stream.family != socket.AF_UNIX:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peers[peer.rank] = stream

    loop = _AcceptLoop()
    door = Door(loop, f"rank {rank}", dialling.accepted, check, admit)  # type: ignore[arg-type]
    try:
        for listener in listeners:
            door.listen(listener)
        for entry in entries[:rank]:
            peers[entry.rank] = dialling.dial(entry, deadline)
            peers[entry.rank].sendall(_HERE)
        while len(peers) < len(entries) - 1:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [entry.rank for entry in entries if entry.rank not in peers and entry.rank != rank]
                raise RendezvousError(f"Rank {rank} met ranks {missing}, but they did not connect to it in time.")
            loop.run(min(left, 1.0))
            door.expire(time.monotonic())
        # Before that, a dialler takes whatever comes for the end of the handshake.
        for entry in entries[rank + 1 :]:
            if _receive_word(peers[entry.rank], entry.rank, deadline) != _HERE:
                raise RendezvousError(f"Rank {entry.rank} went away while the group was made.")
    except BaseException:
        for sock in peers.values():
            sock.close()
        raise
    finally:
        door.close()
        loop.close()
    return peers


class _AcceptLoop:
    """As much of a loop as a door needs, run by whoever waits for the group."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}

    def add(self, descriptor: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, events)

    def change(self, descriptor: int, events: int) -> None:
        self._epoll.modify(descriptor, events)

    def remove(self, descriptor: int) -> None:
        del self._handlers[descriptor]
        self._epoll.unregister(descriptor)

    def set_alarm(self, when: float) -> None:
        """It looks often enough."""

    def run(self, seconds: float) -> None:
        for descriptor, events in self._epoll.poll(seconds):
            handler = self._handlers.get(descriptor)
            if handler is not None:
                handler(events)

    def close(self) -> None:
        self._epoll.close()


def _share(peers: dict[int, Stream], host: list[int], rank: int, deadline: float) -> tuple[Mapping, list[int]]:
    """The first rank of the host makes the memory, and each its bell; the descriptors go to all others."""
    others = [other for other in host if other != rank]
    bells = {rank: new_bell()}
    memory: Mapping | None = None
    size = size_of(len(host))
    try:
        if rank == host[0]:
            descriptor = os.memfd_create("farprop-group", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, size)
                memory = Mapping(descriptor, size)
                for other in others:
                    _pass_descriptor(peers[other], descriptor)
            finally:
                os.close(descriptor)
        for other in others:
            _pass_descriptor(peers[other], bells[rank])
        for other in others:
            if other == host[0]:
                descriptor = _take_descriptor(peers[other], other, deadline)
                try:
                    memory = Mapping(descriptor, size)
                finally:
                    os.close(descriptor)
            bells[other] = _take_descriptor(peers[other], other, deadline)
        assert memory is not None
    except BaseException:
        for bell in bells.values():
            os.close(bell)
        raise
    return memory, [bells[member] for member in host]


def _pass_descriptor(sock: Stream, descriptor: int) -> None:
    sock.sendmsg([b"d"], rights(descriptor))


def _await_data(sock: Stream, source: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise RendezvousError(f"Rank {source} stopped in the middle while the group was made.")


def _receive_word(stream: Stream, source: int, deadline: float) -> bytes:
    while True:
        _await_data(stream, source, deadline)
        try:
            return stream.recv(len(_HERE))
        except BlockingIOError:
            pass  # a part of a record
        except (OSError, ProtocolError) as error:
            raise RendezvousError(f"Rank {source} was lost while the group was made: {error}") from error


def _take_descriptor(sock: Stream, source: int, deadline: float) -> int:
    _await_data(sock, source, deadline)
    if not isinstance(sock, socket.socket):
        raise RendezvousError(f"Rank {source} is on another host, and can't share memory with this one.")
    count, descriptor = receive_with_descriptor(sock, memoryview(bytearray(1)))
    if not count or descriptor < 0:
        raise RendezvousError(f"Rank {source} went away, or passed no memory, while the group was made.")
    return descriptor
