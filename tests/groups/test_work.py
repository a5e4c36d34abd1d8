"""Works: waiting, errors and lifetime."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta

import pytest
import torch
from torch.futures import Future

from farprop.distributed import FaultyProcessGroup, LonelyProcessGroup, ProcessGroup, Work, work_from_future
from farprop.errors import CollectiveTimeoutError, InjectedFaultError, UsageError


def test_a_work_that_succeeds():
    work = Work()
    assert not work.is_completed()
    assert not work.is_success()
    assert work.exception() is None
    x = torch.ones(2)
    work.complete([x])
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0] is x
    assert work.get_future().value()[0].equal(x)


def test_a_work_that_fails():
    work = Work()
    work.fail(KeyError("gone"))
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), KeyError)
    with pytest.raises(KeyError, match="gone"):
        work.wait()


def test_wait_with_a_timeout():
    work = Work()
    with pytest.raises(CollectiveTimeoutError, match="not done after 0.01 s"):
        work.wait(timedelta(milliseconds=10))
    thread = threading.Timer(0.01, work.complete, [[]])
    thread.start()
    assert work.wait(timedelta(seconds=50))
    thread.join()


def test_wait_without_a_timeout():
    work = Work()
    thread = threading.Timer(0.01, work.complete, [[]])
    thread.start()
    assert work.wait(timedelta.max)
    thread.join()


def test_a_work_around_a_future():
    future = Future()
    work = work_from_future(future)
    assert not work.is_completed()
    future.set_result([torch.ones(1)])
    assert work.wait(timedelta(seconds=1))
    assert work.is_success()
    assert work.get_future() is future


class _Tracked(Work):
    """A work in Python that weak references can watch."""


def test_a_work_lives_as_long_as_its_future():
    work = _Tracked()
    seen = weakref.ref(work)
    future = work.get_future()
    del work
    gc.collect()
    assert seen() is not None
    seen().complete([])
    assert future.wait() == []
    del future
    gc.collect()
    assert seen() is None


class _Slow(LonelyProcessGroup):
    """Its works end in another thread, which refers only to the future."""

    def __init__(self):
        super().__init__()
        self.threads = []
        self.works = []

    def allreduce(self, tensors, opts=None, timeout=None):
        work = _Tracked()
        thread = threading.Timer(0.01, work.get_future().set_result, [list(tensors)])
        self.threads.append(thread)
        self.works.append(weakref.ref(work))
        thread.start()
        return work


def test_torch_keeps_works_alive_while_it_waits():
    group = _Slow()
    layer = torch.nn.Linear(2, 2)
    ddp = torch.nn.parallel.DistributedDataParallel(layer, process_group=group)
    ddp(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad.equal(torch.ones(2, 2))
    for thread in group.threads:
        thread.join()
    del thread
    group.threads.clear()
    gc.collect()
    assert group.works
    assert all(work() is None for work in group.works)


class _Nothing(ProcessGroup):
    pass


def test_a_group_without_primitives_names_the_methods_it_needs():
    group = _Nothing(0, 2)
    for call in (
        lambda: group.allreduce([torch.ones(1)]),
        lambda: group.barrier(),
        lambda: group.reduce_scatter([torch.ones(1)], [[torch.ones(1)] * 2]),
        lambda: group.send([torch.ones(1)], 1, 0),
    ):
        with pytest.raises(UsageError, match="has to have send and recv, or allreduce, broadcast and allgather"):
            call()
    with pytest.raises(UsageError, match="no rank 2"):
        _Nothing(2, 2)
    with pytest.raises(UsageError, match="one rank"):
        LonelyProcessGroup(1, 2)


def test_a_faulty_group_fails_and_delays_the_chosen_calls():
    group = FaultyProcessGroup(LonelyProcessGroup(), fail=[2], delay={3: 0.01})
    assert group.allreduce([torch.ones(1)]).wait()
    work = group.broadcast([torch.ones(1)])
    with pytest.raises(InjectedFaultError, match="Collective 2 of rank 0, broadcast, was told to fail"):
        work.wait()
    with pytest.raises(InjectedFaultError):
        work.get_future().wait()
    x = torch.ones(1)
    assert group.allreduce([x]).get_future().wait()[0] is x
    assert group.allreduce([x]).wait()


class _Frame:
    """Something that a frame holds when an error passes through it."""


def test_an_error_keeps_no_frames():
    work = Work()
    work.fail(KeyError("gone"))

    def wait() -> weakref.ref:
        held = _Frame()
        with pytest.raises(KeyError):
            work.wait()
        return weakref.ref(held)

    held = wait()
    gc.collect()
    assert held() is None
    assert work.exception() is not None
