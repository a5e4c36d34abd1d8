"""Sockets between workers: listening, connecting, and noticing that the host at the other end has vanished.

Workers of one host connect by Unix sockets, others by TCP. There are two ways to notice that a host has vanished. Every
TCP connection has keepalive (:func:`set_keepalive`): the kernel closes it after a time of silence. That is enough while
nobody waits. Whoever waits for the other end, for an answer or in a process group, asks the kernel several times a
second (:func:`tcp_facts`), and has ``protocol.host_liveness`` decide.

``TCP_USER_TIMEOUT`` would be simpler, but it also closes connections to live hosts whose process reads nothing for as
long.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable
from typing import Protocol

from farprop.errors import AuthenticationError, ConnectionLostError, UsageError
from farprop.protocol.host_liveness import TcpFacts
from farprop.transport.tls import Stream

SEND_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
HAVE_UNIX = sys.platform == "linux"  # abstract names and memfd
_BACKLOG = 4096
_CONNECT_SECONDS = 3.0  # of one attempt: time for two packets
_SIOCGIFADDR = 0x8915
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Address(Protocol):
    """The addresses of a worker."""

    @property
    def tcp(self) -> tuple[str, int]: ...
    @property
    def unix(self) -> str: ...


def network_namespace() -> str:
    """Identifies the network namespace and the clock. Workers with equal ones can connect by abstract socket names, and
    have the same monotonic clock.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            found = f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""
    try:
        return f"{found}/{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:
        return found  # a kernel without time namespaces


def listen_unix(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def listen_tcp(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """Listen on ``host`` at the first free port of the range ``ports``; on any port without a range."""
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
    """Return the address of an interface such as ``eth0``; an address is returned unchanged."""
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
    """The local address from which ``host`` is reached, the default to listen on. Sends nothing."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def connect(address: Address, unix: bool, deadline: float) -> socket.socket:
    """Connect a socket to a worker.

    Args:
        address: the worker's addresses.
        unix: whether to use the Unix socket.
        deadline: on the monotonic clock.

    Raises:
        ConnectionLostError: the worker can't be reached in time.
    """
    if unix:
        return _connect_unix(address.unix, deadline)
    while True:
        left = max(0.05, deadline - time.monotonic())
        try:
            connection = _connect_tcp(address.tcp, min(left, _CONNECT_SECONDS))
            break
        except OSError as error:
            # The kernel asks less and less often. If the network comes back, a new attempt is faster.
            if not isinstance(error, TimeoutError) or left <= _CONNECT_SECONDS:
                raise ConnectionLostError(f"can't connect to {address.tcp[0]}:{address.tcp[1]}: {error}") from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _connect_tcp(address: tuple[str, int], seconds: float) -> socket.socket:
    """As ``socket.create_connection``, which leaves its socket open when it is interrupted."""
    problem = OSError("it has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(seconds)
            connection.connect(place)
            return connection
        except OSError as error:
            connection.close()
            problem = error
        except BaseException:
            connection.close()
            raise
    raise problem


def _connect_unix(name: str, deadline: float) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.05, deadline - time.monotonic()))
            connection.connect("\0" + name)
            return connection
        except BlockingIOError:
            # A Unix listener with a full backlog refuses at once, but soon has room again.
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
    """Raise for a Unix connection with a process of another user, as the kernel reports it."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise AuthenticationError(
            f"the other end of a Unix connection belongs to another user (uid {user}) than this worker (uid "
            f"{os.geteuid()}). Workers of one host have to run as one user, or use FARPROP_TRANSPORT=tcp."
        )


def make_ready(connection: Stream) -> None:
    """Prepare a socket for messages after its handshake: no timeout, because each call passes ``MSG_DONTWAIT``."""
    connection.settimeout(None)
    set_keepalive(connection)


def unsent(parts: Iterable[bytes | memoryview], sent: int) -> list[memoryview]:
    """The rest of a message's parts after the kernel has taken the first ``sent`` bytes."""
    rest = []
    for part in parts:
        if sent >= len(part):
            sent -= len(part)
        else:
            rest.append(memoryview(part)[sent:])
            sent = 0
    return rest


# Hosts that have vanished

# Fields of Linux's tcp_info: retransmits of data, probes of a closed window, packets in flight, milliseconds since the
# last acknowledgement.
_TCP_INFO = struct.Struct("<2xBB20xI28xI")
# Another one: milliseconds since the last data arrived.
_LAST_DATA = struct.Struct("<52xI")


def set_keepalive(sock: Stream) -> None:
    """Have the kernel close the connection when the other host has vanished. Unix sockets need nothing."""
    if sock.family == socket.AF_UNIX:
        return
    # A host that vanished is detected even if nobody calls it. Linux closes the connection after TCP_USER_TIMEOUT, not
    # after the keepalives, if both are set: 122 s were measured.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The last one, in milliseconds, is for a host that vanished while data was in flight to it.
    options = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 120_000))
    for option, value in options:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def can_probe(sock: Stream) -> bool:
    """Whether :func:`tcp_facts` can be used. Connections within a host need no probes."""
    return sys.platform == "linux" and sock.family != socket.AF_UNIX


def prepare_probes(sock: Stream) -> None:
    """Turn off the kernel's timeout for a caller that probes: it would also close connections to slow processes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def tcp_facts(sock: Stream) -> TcpFacts:
    """Ask the local kernel about the other end of a connection. Sends nothing."""
    return TcpFacts(*_TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)))


def seconds_since_data(sock: Stream) -> float:
    """How long ago the kernel received the last bytes of a TCP connection; 0 where the kernel does not say."""
    try:
        (milliseconds,) = _LAST_DATA.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA.size))
    except (OSError, struct.error):
        return 0.0
    return float(milliseconds) / 1000
