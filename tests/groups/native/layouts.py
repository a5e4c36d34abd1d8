"""How the ranks of a job are spread over hosts."""

from __future__ import annotations


def environment(layout: str, size: int) -> list[dict[str, str]]:
    """The environment of each rank.

    Args:
        layout: ``one`` host for all ranks, one for each (``tcp``), or ``two`` hosts of every other rank.
        size: the number of ranks.
    """
    if layout == "tcp":
        return [{"FARPROP_TRANSPORT": "tcp"}] * size
    if layout == "two":
        return [{"FARPROP_HOST_NAME": "odd" if rank % 2 else "even"} for rank in range(size)]
    return [{}] * size
