"""Which parameters were used: here, and on any rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from farprop.distributed.work import result_of


class Use:
    """A parameter that no rank has used keeps the gradient that it has, or none; so ranks tell each other."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.nowhere: set[int] = set()
        """What no rank had used when they last told each other."""
        self._here = bytearray(count)  # since the last reduction, which may be several backward passes ago
        self._device = device
        self._future: Any = None

    def note(self, index: int) -> None:
        self._here[index] = 1

    def launch(self, group: dist.ProcessGroup) -> None:
        counts = torch.tensor(list(self._here), dtype=torch.int32, device=self._device)
        self._future = group.allreduce([counts], dist.AllreduceOptions()).get_future()

    def wait(self) -> None:
        if self._future is not None:
            future, self._future = self._future, None
            counts = result_of(future)[0].tolist()
            self.nowhere = {index for index, count in enumerate(counts) if not count}

    def give_up(self) -> None:
        self._future = None

    def forget(self) -> None:
        self._here = bytearray(len(self._here))
