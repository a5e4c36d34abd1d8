"""Whether the host at the other end of a TCP connection has vanished: calls and process groups decide it alike.

A kernel acknowledges data whatever its processes do, so a host that answers is told from a process that does not.
``HostLiveness`` is fed with what the local kernel knows about a connection, several times a second. It asks for a
heartbeat if nothing is in flight, because then there is nothing to acknowledge.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

PROBE_SECONDS = 0.2  # how often to probe
HEARTBEAT_SECONDS = 0.4  # a heartbeat is sent this long after the last acknowledgement, or later
_SILENT_MS = 1500
_MIN_RETRANSMITS = 2
# Linux answers only one of two window probes within half a second, and the last probe may have been sent just now.
_MIN_WINDOW_PROBES = 3


class TcpFacts(NamedTuple):
    """What the local kernel knows about a connection."""

    retransmits: int  # of the oldest data that is not acknowledged
    window_probes: int  # of a closed window, since the last answer to one
    in_flight: int  # packets that are not acknowledged
    silent_ms: int  # since the last acknowledgement


class HostState(Enum):
    """The result of a probe."""

    ANSWERS = "it has acknowledged data lately, or data is in flight to it"
    IDLE = "no data is in flight, so there is nothing to acknowledge: send something"
    VANISHED = "it does not answer"


class HostLiveness:
    """The host at the other end of one connection. ``VANISHED`` is final: whoever sees it gives the connection up."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = HostState.ANSWERS

    def on_probe(self, facts: TcpFacts) -> HostState:
        """Decide by what the kernel says now."""
        if self.state is not HostState.VANISHED:
            self.state = _judge(facts)
        return self.state


def _judge(facts: TcpFacts) -> HostState:
    unanswered = facts.retransmits >= _MIN_RETRANSMITS or facts.window_probes >= _MIN_WINDOW_PROBES
    if facts.silent_ms >= _SILENT_MS and unanswered:
        return HostState.VANISHED
    if facts.silent_ms >= 1000 * HEARTBEAT_SECONDS and not facts.in_flight and not facts.window_probes:
        return HostState.IDLE
    return HostState.ANSWERS
