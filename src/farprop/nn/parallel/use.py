"""Which parameters were used: here, and on any rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from farprop.distributed.calling import wait_for


class Use:
    """A parameter that no rank has used keeps the gradient that it has, or none; so ranks tell each other."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.nowhere: set[int] = set()
        """What no rank had used when they last told each other."""
        self._here = bytearray(count)  # since the last reduction, which may be several backward passes ago
        self._device = device
        self._under_way: tuple[Any, torch.Tensor] | None = None  # a work, and the counts that it writes

    def note(self, index: int) -> None:
        self._here[index] = 1

    def launch(self, group: dist.ProcessGroup) -> None:
        counts = torch.tensor(list(self._here), dtype=torch.int32, device=self._device)
        self._under_way = group.allreduce([counts], dist.AllreduceOptions()), counts

    def wait(self) -> None:
        if self._under_way is not None:
            (work, counts), self._under_way = self._under_way, None
            wait_for(work)
            self.nowhere = {index for index, count in enumerate(counts.tolist()) if not count}

    def give_up(self) -> None:
        self._under_way = None

    def forget(self) -> None:
        self._here = bytearray(len(self._here))
