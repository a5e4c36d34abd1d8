"""Connects the ranks of a group: each publishes an entry in the store, and every two make one connection.

Connections are dialled, accepted and authenticated as those of calls.
"""

from __future__ import annotations

import os
import select
import socket
import time
from dataclasses import dataclass

import torch.distributed as dist

from farprop.config import Settings
from farprop.distributed.native.shm_arena import IS_SUPPORTED, arena_bytes, new_wakeup_fd
from farprop.errors import AuthenticationError, ProtocolError, RendezvousError
from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import GROUP
from farprop.runtime import rendezvous
from farprop.runtime.acceptor import Acceptor
from farprop.runtime.dialer import Dialer
from farprop.runtime.endpoint import Endpoint
from farprop.runtime.event_loop import EventLoop
from farprop.transport import sockets
from farprop.transport.shared_memory import SharedMapping, new_shared_memory, receive_with_descriptor, rights
from farprop.transport.tls import Stream

_HELLO = b"h"  # the first byte that a rank sends on a connection that it dialled


@dataclass
class GroupConnections:
    """The connections and the shared memory of one rank.

    Attributes:
        peers: a connection to every other rank.
        hosts: the ranks of each host.
        memory: the memory that the ranks of this host share; None if it has one rank.
        wakeup_fds: an eventfd for each rank of this host; empty if it has one rank.
        limits: the largest message that each rank takes, in bytes.
    """

    peers: dict[int, Stream]
    hosts: list[list[int]]
    memory: SharedMapping | None
    wakeup_fds: list[int]
    limits: dict[int, int]


def connect_group(store: dist.Store, rank: int, size: int, settings: Settings, timeout: float) -> GroupConnections:
    """Meet the other ranks in the store, and connect with each.

    Args:
        store: of this group alone.
        rank: this rank.
        size: the number of ranks.
        settings: of this process.
        timeout: seconds for all of it.

    Raises:
        RendezvousError: not all ranks came in time, or they can't be a group.
        AuthenticationError: a rank has another secret.
    """
    deadline = time.monotonic() + timeout
    call, more_time = "init_process_group or new_group", "a larger timeout"
    if rendezvous.is_launchers(store):
        attempt = rendezvous.attempt_of(store, rank, size, timeout, call, more_time)
        store = dist.PrefixStore(attempt, store)
        timeout = max(0.0, deadline - time.monotonic())
    can_share = IS_SUPPORTED and _can_make_memory(arena_bytes(size))
    endpoint = Endpoint(store, f"rank{rank}", rank, GROUP, settings, can_share)
    # Ranks share memory if they are in one network namespace, and the settings don't say that they are not.
    endpoint.dialer.net = f"{endpoint.dialer.net} {settings.host_name}"
    listeners = endpoint.listen(rendezvous.host_of(store) or os.environ.get("MASTER_ADDR") or "localhost")
    try:
        own = endpoint.entry(size)
        entries = rendezvous.meet(store, endpoint.keys, own, timeout, call, more_time)
        endpoint.on_all_joined()
    except BaseException:
        endpoint.secret.remove_file()
        for listener in listeners:
            listener.close()
        raise
    peers = _connect_peers(entries, rank, endpoint.dialer, listeners, deadline)
    try:
        hosts = _hosts(entries)
        own_host = next(host for host in hosts if rank in host)
        memory, wakeup_fds = _share_memory(peers, own_host, rank, deadline) if len(own_host) > 1 else (None, [])
    except BaseException:
        for sock in peers.values():
            sock.close()
        raise
    limits = {entry.rank: entry.max_message_bytes for entry in entries}
    return GroupConnections(peers, hosts, memory, wakeup_fds, limits)


def _can_make_memory(size: int) -> bool:
    """Whether this process may make so much shared memory. All ranks have to know before they connect."""
    try:
        descriptor, _ = new_shared_memory(size)
    except OSError:
        return False
    os.close(descriptor)
    return True


def _hosts(entries: list[Entry]) -> list[list[int]]:
    hosts: dict[str | int, list[int]] = {}  # a rank that can't share memory is a host of its own
    for entry in entries:
        hosts.setdefault(entry.net if entry.unix else entry.rank, []).append(entry.rank)
    return list(hosts.values())


def _connect_peers(
    entries: list[Entry], rank: int, dialer: Dialer, listeners: list[socket.socket], deadline: float
) -> dict[int, Stream]:
    """Dial the lower ranks, then accept the higher ones. Rank 0 only accepts, so ranks don't wait in a circle."""
    peers: dict[int, Stream] = {}
    above = {entry.identity for entry in entries[rank + 1 :]}

    def check(identity: bytes) -> Identity:
        peer = Identity.from_bytes(identity)
        if peer not in above or peer.rank in peers:
            raise AuthenticationError(f"{peer.name} is not a rank that dials rank {rank} of this group")
        return peer

    def admit(stream: Stream, peer: Identity) -> None:
        sockets.make_ready(stream)
        if stream.family != socket.AF_UNIX:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peers[peer.rank] = stream

    loop = EventLoop()
    acceptor = Acceptor(loop, f"rank {rank}", dialer.accepted, check, admit)
    try:
        for listener in listeners:
            acceptor.listen(listener)
        for entry in entries[:rank]:
            peers[entry.rank] = dialer.dial(entry, deadline)
            try:
                peers[entry.rank].sendall(_HELLO)
            except OSError as error:
                raise _lost(entry.rank, error) from error
        while len(peers) < len(entries) - 1:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [entry.rank for entry in entries if entry.rank not in peers and entry.rank != rank]
                raise RendezvousError(f"Rank {rank} met ranks {missing}, but they did not connect to it in time.")
            loop.poll(left)
        # A rank that dialled may still be in the handshake, and would take what we send for a part of it. Its first
        # byte says that its handshake is complete.
        for entry in entries[rank + 1 :]:
            if _receive_byte(peers[entry.rank], entry.rank, deadline) != _HELLO:
                raise RendezvousError(f"Rank {entry.rank} went away while the group was made.")
    except BaseException:
        for sock in peers.values():
            sock.close()
        raise
    finally:
        acceptor.close()
        loop.close()
    return peers


def _share_memory(
    peers: dict[int, Stream], host: list[int], rank: int, deadline: float
) -> tuple[SharedMapping, list[int]]:
    """The first rank of the host makes the memory, each rank its eventfd; the descriptors go to all others."""
    first = host[0]
    others = [other for other in host if other != rank]
    size = arena_bytes(len(host))
    if rank == first:
        try:
            descriptor, memory = new_shared_memory(size)
        except OSError as error:  # it could be made a moment ago
            raise RendezvousError(f"Rank {rank} can't make {size} bytes of shared memory: {error}") from error
        try:
            for other in others:
                _send_descriptor(peers[other], other, descriptor)
        finally:
            os.close(descriptor)
    else:
        descriptor = _receive_descriptor(peers[first], first, deadline)
        try:
            memory = SharedMapping(descriptor, size)
        finally:
            os.close(descriptor)
    wakeup_fds = {rank: new_wakeup_fd()}
    try:
        for other in others:
            _send_descriptor(peers[other], other, wakeup_fds[rank])
        for other in others:
            wakeup_fds[other] = _receive_descriptor(peers[other], other, deadline)
    except BaseException:
        for fd in wakeup_fds.values():
            os.close(fd)
        raise
    return memory, [wakeup_fds[member] for member in host]


def _send_descriptor(sock: Stream, to: int, descriptor: int) -> None:
    try:
        sock.sendmsg([b"d"], rights(descriptor))
    except OSError as error:
        raise _lost(to, error) from error


def _receive_descriptor(sock: Stream, source: int, deadline: float) -> int:
    _await_data(sock, source, deadline)
    if not isinstance(sock, socket.socket):
        raise RendezvousError(f"Rank {source} is on another host, and can't share memory with this one.")
    try:
        count, descriptor = receive_with_descriptor(sock, memoryview(bytearray(1)))
    except OSError as error:
        raise _lost(source, error) from error
    if not count or descriptor is None:
        raise RendezvousError(f"Rank {source} went away, or passed no memory, while the group was made.")
    return descriptor


def _receive_byte(stream: Stream, source: int, deadline: float) -> bytes:
    while True:
        _await_data(stream, source, deadline)
        try:
            return stream.recv(1)
        except BlockingIOError:
            pass  # only a part of a TLS record has arrived
        except (OSError, ProtocolError) as error:
            raise _lost(source, error) from error


def _lost(rank: int, error: Exception) -> RendezvousError:
    return RendezvousError(f"Rank {rank} was lost while the group was made: {error}")


def _await_data(sock: Stream, source: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise RendezvousError(f"Rank {source} stopped responding while the group was made.")
