"""Groups around groups: every collective of the wrapped group passes one method."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from farprop.distributed.calling import NO_TIMEOUT
from farprop.distributed.group import COLLECTIVES, ProcessGroup
from farprop.distributed.work import Work


class WrappedProcessGroup(ProcessGroup):
    """A group that does what another one does. Derive from it and override :meth:`run`.

    Args:
        group: any group: of torch, or written in Python.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def getBackendName(self) -> str:  # noqa: N802
        return f"{type(self).__name__}({self.group.name()})"

    def run(self, name: str, start: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        """Called for every collective; ``start`` starts it on the wrapped group and returns its work."""
        return start()

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.group.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]

    def shutdown(self) -> None:
        self.group.shutdown()

    def abort(self) -> None:
        self.group.abort()


def _forwarding(name: str) -> Callable[..., Any]:
    def collective(self: WrappedProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return self.run(name, lambda: getattr(self.group, name)(*args, **kwargs), args)

    collective.__name__ = name
    return collective


for _name in COLLECTIVES:
    setattr(WrappedProcessGroup, _name, _forwarding(_name))


class WrappedWork(Work):
    """A work that does what another one does."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return bool(self.work.wait(timeout))

    def get_future(self) -> Future[Any]:
        return self.work.get_future()  # type: ignore[no-any-return]

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def is_success(self) -> bool:
        return bool(self.work.is_success())

    def exception(self) -> BaseException | None:
        return self.work.exception()  # type: ignore[no-any-return]

    def result(self) -> list[torch.Tensor]:
        return self.work.result()  # type: ignore[no-any-return]

    def _source_rank(self) -> int:
        return self.work._source_rank()  # type: ignore[no-any-return]
