"""What the kernel says about processes of this host: whether one lives, is stopped, or computes. Needs no answer."""

from __future__ import annotations

import os

from farprop.protocol.inspection import Member
from farprop.transport.sockets import network_namespace

UNRESPONSIVE = "stopped, or it holds the interpreter's lock"
_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory_bytes() -> int:
    """The resident memory of this process."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def is_computing(native_id: int) -> bool | None:
    """Whether a thread of this process uses the processor now; None if that is not known."""
    state = _state(f"/proc/self/task/{native_id}/stat")
    return None if state is None else state == "R"


def silence_of(member: Member, own_net: str | None = None) -> str | None:
    """Why a process of this host may not answer, as the kernel knows it; None if it does not, or for another host."""
    if member.net != (network_namespace() if own_net is None else own_net) or not member.pid:
        return None
    state = _state(f"/proc/{member.pid}/stat")
    if state is None:
        return "it has ended"
    if state in "Tt":
        return "it is stopped"
    if state in "ZX":
        return "it has ended"
    return None


def _state(path: str) -> str | None:
    try:
        with open(path) as file:
            # The name of the command is in brackets, and may hold anything.
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
