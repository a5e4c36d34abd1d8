"""What a rank without inputs does while others still train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from farprop.nn.parallel.distributed import DistributedDataParallel


class Accompanying(JoinHook):
    """The collectives of an iteration, in the order in which ``forward`` and ``backward`` of the others call them."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def main_hook(self) -> None:
        self._ddp._accompany()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._ddp._take_over(is_last_joiner)
