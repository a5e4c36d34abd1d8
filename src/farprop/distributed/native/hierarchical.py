"""Collectives of ranks on several hosts: in shared memory within a host, and by messages between hosts."""

from __future__ import annotations

from farprop.distributed.native.host_all_to_all import HostAllToAll
from farprop.distributed.native.host_moves import HostMoves
from farprop.distributed.native.host_reductions import HostReductions


class Hierarchical(HostReductions, HostMoves, HostAllToAll):
    """The collectives of a group whose ranks are on several hosts; docs/design.md has a table of them."""
