"""Groups to learn from and to test with: one of a single rank, and two that wrap another group."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from farprop.distributed.arguments import as_list, as_lists, operation
from farprop.distributed.interop import NO_TIMEOUT
from farprop.distributed.process_group import COLLECTIVES, ProcessGroup
from farprop.distributed.reduction import Reduction
from farprop.distributed.work import Work, completed
from farprop.errors import InjectedFaultError, UsageError
from farprop.locks import make_lock

__all__ = ["CountingProcessGroup", "FaultyProcessGroup", "LonelyProcessGroup"]


class LonelyProcessGroup(ProcessGroup):
    """A group with one rank, 0: a program for many ranks runs on one machine, with nothing to start.

    It is also the shortest example of a group: it has three collectives, and the others follow from them.

    Args:
        rank: 0.
        size: 1.

    Raises:
        UsageError: another rank or size was given.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if (rank, size) != (0, 1):
            raise UsageError(f"A LonelyProcessGroup has one rank, and can't be rank {rank} of {size}.")
        super().__init__(rank, size)

    def getBackendName(self) -> str:  # noqa: N802
        return "lonely"

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        reduction = Reduction.from_op(operation(opts), 1)
        for tensor in as_list(tensors):
            reduction.prescale(tensor)
        return completed(as_list(tensors))

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        return completed(as_list(tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        lists, tensors = as_lists(outputs, inputs)
        for output, tensor in zip(lists, tensors, strict=True):
            output[0].copy_(tensor)
        return completed([output[0] for output in lists])


class WrappedProcessGroup(ProcessGroup):
    """A group that forwards every collective to another one. Derive from it and override :meth:`run`.

    Args:
        group: any group: of torch, or written in Python.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def getBackendName(self) -> str:  # noqa: N802
        return f"{type(self).__name__}({self.group.name()})"

    def run(self, name: str, start: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        """Called for every collective.

        Args:
            name: of the collective.
            start: starts it on the wrapped group, and returns its work.
            arguments: of the call.

        Returns:
            The work that the caller gets.
        """
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
    """A work that forwards to another one.

    Args:
        work: any work.
    """

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


class CountingProcessGroup(WrappedProcessGroup):
    """Forwards to another group and counts: to see how a program uses its group.

    Args:
        group: any group.

    Example:
        ``group = CountingProcessGroup(LonelyProcessGroup())``, then run, then look at ``group.calls``.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.calls: Counter[str] = Counter()
        """How often each collective was called, by name."""
        self.bytes: Counter[str] = Counter()
        """The bytes of the tensors that were passed to each, outputs included."""
        self.waits = 0
        """How often somebody waited on a work."""
        self.futures = 0
        """How often somebody asked a work for its future."""
        self._lock = make_lock("counting_group")

    def run(self, name: str, start: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            self.calls[name] += 1
            self.bytes[name] += sum(tensor.nbytes for tensor in _tensors(arguments))
        return _CountedWork(start(), self)

    def _count_wait(self) -> None:
        with self._lock:
            self.waits += 1

    def _count_future(self) -> None:
        with self._lock:
            self.futures += 1


class _CountedWork(WrappedWork):
    def __init__(self, work: Any, group: CountingProcessGroup) -> None:
        super().__init__(work)
        self._group = group

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._group._count_wait()
        return super().wait(timeout)

    def get_future(self) -> Future[Any]:
        self._group._count_future()
        return super().get_future()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


class FaultyProcessGroup(WrappedProcessGroup):
    """Forwards to another group, but fails or delays some collectives: to test how a program copes.

    A collective that fails is not started on the wrapped group, and its work raises ``InjectedFaultError``. Other ranks
    that started it wait for this one, so most tests let it fail on all ranks. A collective that is delayed starts at
    once, and its work ends later.

    Args:
        group: any group.
        fail: the numbers of the collectives that fail; the first is 1.
        delay: the seconds by which collectives are delayed, by number.
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
