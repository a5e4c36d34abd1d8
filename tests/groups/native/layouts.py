"""How the ranks of a job are spread over hosts."""

from __future__ import annotations

SEVERAL_HOSTS = ("2+2", "3+1", "1+1+2", "2+1+1")


def environment(layout: str, size: int) -> list[dict[str, str]]:
    """The environment of each rank.

    Args:
        layout: ``one`` host for all ranks, one for each (``tcp``), ``two`` hosts of every other rank, or the number of
            ranks on each host, such as ``3+1``.
        size: the number of ranks.
    """
    if layout == "tcp":
        return [{"FARPROP_TRANSPORT": "tcp"}] * size
    if layout == "two":
        return [{"FARPROP_HOST_NAME": "odd" if rank % 2 else "even"} for rank in range(size)]
    if layout == "one":
        return [{}] * size
    return [{"FARPROP_HOST_NAME": str(host)} for host, ranks in enumerate(hosts(layout)) for _ in ranks]


def hosts(layout: str) -> list[list[int]]:
    """The ranks of each host of a layout such as ``3+1``."""
    ranks = iter(range(100))
    return [[next(ranks) for _ in range(int(count))] for count in layout.split("+")]
