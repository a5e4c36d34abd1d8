"""Whether the host at the other end of a connection still answers.

Its system acknowledges what it gets, also while its processes are stopped or busy. So the system here is asked when it
last heard from there, and how often it has sent the same bytes again since. ``TCP_USER_TIMEOUT`` would be less work,
but it ends also connections to hosts that answer, if the process there reads nothing for as long.
"""

from __future__ import annotations

import socket
import struct
import sys
from enum import Enum

from farprop.transport.tls import Stream

LOOK_SECONDS = 0.2
_QUIET_MS = 400
_SILENT_MS = 1500
_RESENT_IN_VAIN = 2
# A host may leave one of these questions open: Linux answers two within half a second once. And the last one may have
# been asked this moment.
_ASKED_IN_VAIN = 3

# Of Linux's tcp_info: how often bytes, or a question whether the other end has room for some, were sent again; how many
# packets are on their way; and the milliseconds since the last acknowledgement.
_TCP_INFO = struct.Struct("<2xBB20xI28xI")


class Pulse(Enum):
    BEATS = "it was heard, or something is on its way to it"
    QUIET = "nothing is on its way, so nothing would be heard"
    GONE = "it does not answer"


def can_watch(sock: Stream) -> bool:
    """Connections within a host need nobody to watch them."""
    return sys.platform == "linux" and sock.family != socket.AF_UNIX


def watch(sock: Stream) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def look(sock: Stream) -> Pulse:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    resent, asked, on_the_way, milliseconds = _TCP_INFO.unpack(info)
    if milliseconds >= _SILENT_MS and (resent >= _RESENT_IN_VAIN or asked >= _ASKED_IN_VAIN):
        return Pulse.GONE
    if milliseconds >= _QUIET_MS and not on_the_way and not asked:
        return Pulse.QUIET
    return Pulse.BEATS
