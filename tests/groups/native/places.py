"""Where the ranks of a job believe that they are."""

from __future__ import annotations


def environment(place: str, size: int) -> list[dict[str, str]]:
    """``one`` host for all, one for each rank (``tcp``), or ``two`` with every other rank."""
    if place == "tcp":
        return [{"FARPROP_TRANSPORT": "tcp"}] * size
    if place == "two":
        return [{"FARPROP_HOST_NAME": "odd" if rank % 2 else "even"} for rank in range(size)]
    return [{}] * size
