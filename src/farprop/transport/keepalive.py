"""Detects that the host at the other end of a TCP connection has vanished.

There are two ways. Every connection has TCP keepalive (:func:`set_keepalive`): the kernel closes it after a time of
silence. That is enough for calls, which have deadlines of their own. A process group can't go on without one of its
ranks, and has to know within two seconds, so it polls the kernel (:func:`probe`).

The other host's kernel acknowledges data even while its processes are stopped or busy. So ``probe`` asks the local
kernel for the time of the last acknowledgement, and for the number of retransmits since then. ``TCP_USER_TIMEOUT``
would be simpler, but it also closes connections to live hosts whose process reads nothing for as long.
"""

from __future__ import annotations

import socket
import struct
import sys
from enum import Enum

from farprop.transport.tls import Stream

PROBE_SECONDS = 0.2  # how often to probe
_IDLE_MS = 400
_SILENT_MS = 1500
_MIN_RETRANSMITS = 2
# Linux answers only one of two window probes within half a second, and the last probe may have been sent just now.
_MIN_WINDOW_PROBES = 3

# Fields of Linux's tcp_info: retransmits of data, probes of a closed window, packets in flight, milliseconds since the
# last acknowledgement.
_TCP_INFO = struct.Struct("<2xBB20xI28xI")


class HostState(Enum):
    """The result of a probe."""

    ANSWERS = "it has acknowledged data lately, or data is in flight to it"
    IDLE = "no data is in flight, so there is nothing to acknowledge: send something"
    VANISHED = "it does not answer"


def set_keepalive(sock: Stream) -> None:
    """Have the kernel close the connection when the other host has vanished. Unix sockets need nothing."""
    if sock.family == socket.AF_UNIX:
        return
    # A host that vanished is detected within a minute even if nobody calls it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The last one, in milliseconds, is for a host that vanished while data was in flight to it.
    options = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 120_000))
    for option, value in options:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def can_probe(sock: Stream) -> bool:
    """Whether :func:`probe` can be used. Connections within a host need no probes."""
    return sys.platform == "linux" and sock.family != socket.AF_UNIX


def prepare_probes(sock: Stream) -> None:
    """Turn off the kernel's timeout for a caller that probes: it would also close connections to slow processes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def probe(sock: Stream) -> HostState:
    """Ask the local kernel about the host at the other end. Sends nothing."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    retransmits, window_probes, in_flight, milliseconds = _TCP_INFO.unpack(info)
    if milliseconds >= _SILENT_MS and (retransmits >= _MIN_RETRANSMITS or window_probes >= _MIN_WINDOW_PROBES):
        return HostState.VANISHED
    if milliseconds >= _IDLE_MS and not in_flight and not window_probes:
        return HostState.IDLE
    return HostState.ANSWERS
