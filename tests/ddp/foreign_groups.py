"""Process groups and works as third parties write them: they use only torch's classes, nothing of farprop's.

Each does its collectives on a group of torch's, so that they are right, and then returns a work of one kind.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, _create_work_from_future
from torch.futures import Future

Log = Counter[tuple[str, int]]


class SubclassWork(dist.Work):
    """A completed work. ``wait`` requires its argument."""

    def __init__(self, result: Any, group: Foreign) -> None:
        super().__init__()
        self._group = weakref.ref(group)
        self._future: Future[Any] = Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta) -> Any:
        self._group().log["wait", round(timeout.total_seconds())] += 1  # returns nothing, which torch accepts

    def get_future(self) -> Future[Any]:
        self._group().log["future", 0] += 1
        return self._future


class LateWork(dist.Work):
    """Completed by its group."""

    def __init__(self, group: Foreign, error: Exception | None = None) -> None:
        super().__init__()
        self._group = weakref.ref(group)
        self._future: Future[Any] = Future()
        self._error = error

    def finish(self, result: Any) -> None:
        if self._error is None:
            self._future.set_result(result)
        else:
            self._future.set_exception(self._error)

    def wait(self, timeout: timedelta) -> bool:
        self._group().log["wait", round(timeout.total_seconds())] += 1
        self._future.wait()
        return True

    def get_future(self) -> Future[Any]:
        self._group().log["future", 0] += 1
        return self._future


class Foreign:
    """The base of the groups in this file: they count calls, and their works are of one kind.

    Kinds of works: ``subclass``, ``wrapper`` (torch makes it of a future), ``plain`` (of torch's own C++ classes), and
    ``late``: all-reduces of a backward pass are done at its end, the last one first.
    """

    log: Log
    fails: int  # which of the next all-reduces fails; 0: none

    def set_up(self, inner: dist.ProcessGroup, kind: str) -> None:
        self.inner, self.kind = inner, kind
        self.log = Counter()
        self.fails = 0
        self.kept: list[Any] = []  # C++ does not keep the Python side of works
        self._held: list[tuple[LateWork, Any]] = []
        self._holds = False
        self.finished: list[int] = []  # the order in which late works were completed

    def begin_backward(self) -> None:
        """Called when a backward pass begins. At its end, before any wait, late works complete in reverse order."""
        if self.kind == "late":
            self._holds = True
            torch.autograd.Variable._execution_engine.queue_callback(self._release)

    def _release(self) -> None:
        self._holds = False  # the first all-reduces of a static graph follow this
        held, self._held = self._held, []

        def finish() -> None:
            for number in reversed(range(len(held))):
                work, result = held[number]
                self.finished.append(number)
                work.finish(result)

        thread = threading.Thread(target=finish)
        thread.start()
        self.kept.append(thread)

    def join(self) -> None:
        """Wait for threads; nothing may be left of a test."""
        for thread in self.kept:
            if isinstance(thread, threading.Thread):
                thread.join()

    def work(self, name: str, tensors: list[torch.Tensor], result: Any, start: Callable[[], dist.Work]) -> dist.Work:
        self.log[name, sum(tensor.nbytes for tensor in tensors)] += 1
        inner = start()
        if self.kind == "plain":
            return inner
        inner.wait()
        error = None
        if name == "allreduce" and self.fails:
            self.fails -= 1
            error = ValueError("the network is gone") if not self.fails else None
        if self.kind == "wrapper":
            future: Future[Any] = Future()
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            return _create_work_from_future(future)
        if self.kind == "subclass" and error is None:
            work: Any = SubclassWork(result, self)
        else:
            work = LateWork(self, error)
            if name == "allreduce" and self._holds:
                self._held.append((work, result))
            else:
                work.finish(result)
        self.kept.append(work)
        return work


class DirectGroup(Foreign, dist.ProcessGroup):
    """Derives from torch's class, and implements the three collectives that torch's DDP calls."""

    def __init__(self, inner: dist.ProcessGroup, kind: str) -> None:
        dist.ProcessGroup.__init__(self, inner.rank(), inner.size())
        self.set_up(inner, kind)

    def broadcast(self, tensor_list, opts):
        return self.work("broadcast", tensor_list, tensor_list, lambda: self.inner.broadcast(tensor_list, opts))

    def allgather(self, output_tensors, input_tensor, opts):
        return self.work(
            "allgather", input_tensor, output_tensors, lambda: self.inner.allgather(output_tensors, input_tensor, opts)
        )

    def allreduce(self, tensors, opts):
        return self.work("allreduce", tensors, tensors, lambda: self.inner.allreduce(tensors, opts))

    def getBackendName(self):  # noqa: N802
        return "foreign"


class RenamedGroup(DirectGroup):
    """Overrides rank and size for C++; Python sees other values, as in some wrappers."""

    def __init__(self, inner: dist.ProcessGroup, kind: str) -> None:
        dist.ProcessGroup.__init__(self, 0, 1)
        self.set_up(inner, kind)

    def getRank(self):  # noqa: N802
        return self.inner.rank()

    def getSize(self):  # noqa: N802
        return self.inner.size()

    def size(self):
        return 1000


class GlooGroup(Foreign, dist.ProcessGroup):
    """Uses the backend of another group, and overrides only one method."""

    def __init__(self, inner: dist.ProcessGroup, kind: str) -> None:
        dist.ProcessGroup.__init__(self, inner.rank(), inner.size())
        self.use(inner._get_backend(torch.device("cpu")), dist.ProcessGroup.BackendType.GLOO)
        self.set_up(inner, kind)

    def use(self, backend: Any, kind: Any) -> None:
        self._register_backend(torch.device("cpu"), kind, backend)
        self._set_default_backend(kind)

    def allreduce(self, tensors, opts):
        return self.work("allreduce", tensors, tensors, lambda: self.inner.allreduce(tensors, opts))


class SubsetGroup(GlooGroup):
    """The same with a backend that has no thread of its own: on Gloo torch's class hangs now and then."""

    def __init__(self, inner: dist.ProcessGroup, kind: str) -> None:
        dist.ProcessGroup.__init__(self, inner.rank(), inner.size())
        backend = FakeProcessGroup._create_internal(inner.rank(), inner.size())
        self.use(backend, dist.ProcessGroup.BackendType.CUSTOM)
        self.set_up(inner, kind)


GROUPS = {"direct": DirectGroup, "renamed": RenamedGroup, "subset": SubsetGroup}
WORKS = ("subclass", "wrapper", "plain", "late")
