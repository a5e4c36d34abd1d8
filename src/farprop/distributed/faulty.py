"""A group that fails when it is told to."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch.distributed as dist

from farprop.distributed.work import Work
from farprop.distributed.wrapping import WrappedProcessGroup
from farprop.errors import InjectedFaultError

__all__ = ["FaultyProcessGroup"]


class FaultyProcessGroup(WrappedProcessGroup):
    """Does what another group does, but fails or delays some collectives: to test what a program makes of it.

    A collective that fails is not started on the wrapped group, and its work raises ``InjectedFaultError``. Other ranks
    that started it wait for this one, so most tests let it fail on all ranks. One that is delayed starts at once, and
    its work is done later than it would be.

    Args:
        group: any group.
        fail: which collectives fail, by number; the first is 1.
        delay: seconds by which collectives are delayed, by number.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        fail: Collection[int] = (),
        delay: Mapping[int, float] | None = None,
    ) -> None:
        super().__init__(group)
        self._fail = frozenset(fail)
        self._delay = dict(delay or {})
        self._numbers = itertools.count(1)

    def run(self, name: str, start: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        number = next(self._numbers)
        if number in self._fail:
            work = Work()
            work.fail(InjectedFaultError(f"Collective {number} of rank {self.rank()}, {name}, was told to fail."))
            return work
        if number in self._delay:
            return _delayed(start(), self._delay[number])
        return start()


def _delayed(inner: Any, seconds: float) -> Work:
    outer = Work()

    def end() -> None:
        try:
            inner.wait()
            outer.complete(inner.get_future().value())
        except Exception as error:
            outer.fail(error)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return outer
