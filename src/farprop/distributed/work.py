"""The work of a collective: a handle to wait on, and its event in torch's profiles."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future, collect_all

from farprop._torch import enter_record, exit_record, profiler_enabled
from farprop.distributed.interop import NO_TIMEOUT, is_done_within, result_of, timed_out, wait_for, wait_within
from farprop.runtime.dynamo_disable import uncompiled_methods
from farprop.runtime.recorder import recorder

__all__ = ["CoalescedWork", "CompletedWork", "Work", "completed", "work_from_future"]

_A_COLLECTIVE = "wait for a collective"


@uncompiled_methods
class Work(dist.Work):
    """A collective that is under way, or done. Whoever runs it calls :meth:`complete` or :meth:`fail`.

    A work that is not done stays alive while somebody has its future or waits on it. Nobody else has to keep it.

    Args:
        future: a future that ends with the collective; without one, the work makes its own.
    """

    def __init__(self, future: Future[Any] | None = None) -> None:
        super().__init__()
        self._future: Future[Any] = Future() if future is None else future
        self._is_kept = False

    def __init_subclass__(cls) -> None:
        uncompiled_methods(cls)

    def complete(self, outputs: Sequence[torch.Tensor]) -> None:
        """End the work successfully.

        Args:
            outputs: the tensors that the collective wrote.
        """
        self._future.set_result(list(outputs))

    def fail(self, error: Exception) -> None:
        """End the work with an error, which everybody who waits gets.

        Args:
            error: what went wrong.
        """
        with warnings.catch_warnings():
            # Torch's future warns of error types that TorchScript does not know.
            warnings.simplefilter("ignore")
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the collective is done.

        Args:
            timeout: how long to wait; zero waits without a limit.

        Returns:
            True.

        Raises:
            CollectiveTimeoutError: the time is over. The collective goes on.
            Exception: the error of the collective, if it failed.
        """
        began = recorder.begin_wait(_A_COLLECTIVE) if recorder.is_on and not self._future.done() else 0.0
        try:
            if timeout > NO_TIMEOUT and not is_done_within(self._future, timeout):
                raise timed_out(timeout.total_seconds())
            result_of(self._future)
            return True
        finally:
            if began:
                recorder.end_wait(_A_COLLECTIVE, began)

    def get_future(self) -> Future[Any]:
        """Get a future that ends with the collective.

        Returns:
            The future of the list of tensors that the collective writes.
        """
        if not self._is_kept and not self._future.done():
            self._is_kept = True
            # The callback has this object, and the future has the callback until it is done.
            self._future.add_done_callback(lambda _: self._release())
        return self._future

    def _release(self) -> None:
        self._is_kept = False

    def is_completed(self) -> bool:
        """Whether the collective has ended.

        Returns:
            True if it has, with or without an error.
        """
        return self._future.done()

    def is_success(self) -> bool:
        """Whether the collective has ended without an error.

        Returns:
            True if it has.
        """
        return self._future.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of the collective.

        Returns:
            The error; None if it has not failed.
        """
        if not self._future.done():
            return None
        try:
            result_of(self._future)
        except Exception as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that the collective wrote. Call it when the work is done.

        Returns:
            The tensors.
        """
        return list(self._future.value())

    def synchronize(self) -> None:
        """Torch's name for a wait that may leave the work to a device's stream."""
        self.wait()


class CompletedWork(Work):
    """The work of a collective that was done before the call returned.

    Few programs ask for its future, so it is made when one does.

    Args:
        outputs: the tensors that the collective wrote.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        dist.Work.__init__(self)
        self._outputs = outputs

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(list(self._outputs))
        return future

    def result(self) -> list[torch.Tensor]:
        return list(self._outputs)


class CoalescedWork(Work):
    """Several collectives as one work.

    Args:
        works: the works of the collectives.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for all of them, up to ``timeout`` for each; raise the first error."""
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
    """Make the work of a collective that ends with a future.

    Args:
        future: its value should be the list of the tensors that the collective wrote.

    Returns:
        The work.
    """
    return Work(future)


def completed(outputs: Sequence[torch.Tensor]) -> Work:
    """The work of a collective that is done.

    Args:
        outputs: the tensors that the collective wrote.
    """
    work = Work()
    work.complete(outputs)
    return work


def begin_profile_event(name: str, tensors: Sequence[torch.Tensor]) -> Any:
    """Begin the event ``farprop:<name>`` in torch's profile; ``name`` is the one that other backends use.

    Returns:
        The event, for :func:`end_profile_event`; None if this thread is not profiled.
    """
    return enter_record(f"farprop:{name}", *tensors) if profiler_enabled() else None


def end_profile_event(event: Any) -> None:
    """End an event, in any thread. To torch, an event that ends in another thread is asynchronous."""
    if event is not None:
        exit_record(event)
