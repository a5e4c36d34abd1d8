"""The work of a collective: a handle to wait on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future, collect_all

from farprop.distributed.calling import NO_TIMEOUT, is_done_within, result_of, timed_out, wait_for, wait_within
from farprop.runtime.uncompiled import uncompiled_methods

__all__ = ["Work", "completed", "work_from_future"]


@uncompiled_methods
class Work(dist.Work):
    """A collective that is under way, or done. Whoever runs it calls :meth:`complete` or :meth:`fail`.

    It stays alive as long as it is not done and somebody has its future, or waits on it; nobody has to keep it.

    Args:
        future: a future whose end is that of the collective; without one, this makes one.
    """

    def __init__(self, future: Future[Any] | None = None) -> None:
        super().__init__()
        self._future: Future[Any] = Future() if future is None else future
        self._is_kept = False

    def __init_subclass__(cls) -> None:
        uncompiled_methods(cls)

    def complete(self, outputs: Sequence[torch.Tensor]) -> None:
        """The collective is done; ``outputs`` are the tensors that it wrote."""
        self._future.set_result(list(outputs))

    def fail(self, error: Exception) -> None:
        """The collective has failed: whoever waits gets this error."""
        with warnings.catch_warnings():
            # Torch's future warns of error types that TorchScript does not know.
            warnings.simplefilter("ignore")
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the collective is done, and raise its error if it failed.

        ``CollectiveTimeoutError`` after ``timeout``, if that is more than nothing. The collective goes on then.
        """
        if timeout > NO_TIMEOUT and not is_done_within(self._future, timeout):
            raise timed_out(timeout.total_seconds())
        result_of(self._future)
        return True

    def get_future(self) -> Future[Any]:
        """The future of the list of tensors that the collective writes."""
        if not self._is_kept and not self._future.done():
            self._is_kept = True
            # The callback has this object, and the future has the callback until it is done.
            self._future.add_done_callback(lambda _: self._let_go())
        return self._future

    def _let_go(self) -> None:
        self._is_kept = False

    def is_completed(self) -> bool:
        """Whether the collective has ended, well or not."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether the collective has ended well."""
        return self._future.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of the collective, if it has failed."""
        if not self._future.done():
            return None
        try:
            result_of(self._future)
        except Exception as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that the collective wrote, once it is done."""
        return list(self._future.value())

    def synchronize(self) -> None:
        """Torch's name for a wait that may leave the work to a device's stream."""
        self.wait()


class CoalescedWork(Work):
    """Several collectives as one.

    Args:
        works: theirs.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for all of them, for each as long as ``timeout`` says; raise the first error."""
        for work in self._works:
            if timeout <= NO_TIMEOUT:
                wait_for(work)
            elif not wait_within(work, timeout):
                raise timed_out(timeout.total_seconds())
        return True

    def get_future(self) -> Future[Any]:
        """The future of the tensors that all of them write."""
        each = [work.get_future() for work in self._works]
        together: Future[Any] = collect_all(each).then(lambda done: [t for one in done.value() for t in one.value()])
        return together

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]


def work_from_future(future: Future[Any]) -> Work:
    """The work of a collective that ends when ``future`` does. Its value should be the list of the tensors written."""
    return Work(future)


def completed(outputs: Sequence[torch.Tensor]) -> Work:
    """The work of a collective that is done."""
    work = Work()
    work.complete(outputs)
    return work
