"""Where a worker listens and how another one reaches it."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import time
from typing import Protocol

from farprop.errors import AuthenticationError, ConnectionLostError, UsageError
from farprop.transport.tls import Stream

HAVE_UNIX = sys.platform == "linux"  # abstract names and memfd
_BACKLOG = 4096
_SIOCGIFADDR = 0x8915
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Address(Protocol):
    """Where a worker can be dialled."""

    @property
    def tcp(self) -> tuple[str, int]: ...
    @property
    def unix(self) -> str: ...


def network_namespace() -> str:
    """Names the space in which abstract socket names are known; equal for workers that can use them together."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def listen_unix(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def listen_tcp(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """Listen on ``host`` at the first free port of the range, or any port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in [0] if ports is None else range(ports[0], ports[1] + 1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        # Without this a restarted worker would have to wait a minute for its port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise UsageError(
                f"Can't listen on {host}: {error}. Set FARPROP_INTERFACE to an interface or address of this host."
            ) from error
        listener.setblocking(False)
        return listener
    raise UsageError(
        f"No port of FARPROP_PORT_RANGE {ports[0]}-{ports[1]} is free on {host}. Widen the range: "
        "each worker needs one."
        if ports
        else f"No port is free on {host}."
    )


def interface_address(interface: str) -> str:
    """The address of an interface such as ``eth0``; an address is returned as it is."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, interface)
            return interface
        except OSError:
            pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            import fcntl

            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(
                f"FARPROP_INTERFACE={interface!r} is neither an address nor an interface with one. "
                f"Interfaces here: {known}."
            ) from None
    return socket.inet_ntoa(reply[20:24])


def address_towards(host: str) -> str:
    """The local address from which ``host`` is reached: what to listen on by default. Sends nothing."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def connect(address: Address, unix: bool, deadline: float) -> socket.socket:
    """A socket that is connected to a worker."""
    if unix:
        return _connect_unix(address.unix, deadline)
    try:
        connection = socket.create_connection(address.tcp, timeout=max(0.05, deadline - time.monotonic()))
    except OSError as error:
        raise ConnectionLostError(f"can't connect to {address.tcp[0]}:{address.tcp[1]}: {error}") from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _connect_unix(name: str, deadline: float) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.05, deadline - time.monotonic()))
            connection.connect("\0" + name)
            return connection
        except BlockingIOError:
            # A Unix listener whose backlog is full says so at once; a moment later it has room.
            connection.close()
            if time.monotonic() > deadline:
                raise ConnectionLostError("the worker accepts no connections: its backlog is full") from None
            time.sleep(0.005)
        except OSError as error:
            connection.close()
            raise ConnectionLostError(f"can't connect: {error}") from error
        except BaseException:
            connection.close()
            raise


def check_user(sock: socket.socket) -> None:
    """Refuse a Unix connection with a process of another user. The system says whose it is."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise AuthenticationError(
            f"the other end of a Unix connection belongs to another user (uid {user}) than this worker (uid "
            f"{os.geteuid()}). Workers of one host have to run as one user, or use FARPROP_TRANSPORT=tcp."
        )


def make_ready(connection: Stream) -> None:
    """From the handshake's timeouts to what a connection needs: each call says itself that it must not block."""
    connection.settimeout(None)
    if connection.family != socket.AF_UNIX:
        # A host that vanished without a word is found out within a minute even if nobody calls it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # The last is for one that vanished while data was on its way to it, in milliseconds.
        options = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 120_000))
        for option, value in options:
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
