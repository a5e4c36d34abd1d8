"""``torch.distributed.monitored_barrier`` for groups that are written in Python."""

from datetime import timedelta

import torch.distributed as dist

__all__ = ["monitored_barrier"]

_monitored_barrier = dist.monitored_barrier


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """A barrier that names who has not come in time.

    torch's own only takes groups of the backend Gloo. A group in Python knows itself what it can do.
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup) or type(found) is dist.ProcessGroup:
        _monitored_barrier(group, timeout, wait_all_ranks)
        return
    limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
    found.monitored_barrier(limit, wait_all_ranks)  # type: ignore[attr-defined]
