"""Passes of one context that run at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import farprop.autograd as autograd
import farprop.rpc as rpc
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.autograd.contexts import Context, current_context
from farprop.wire.message import PassHead
from tests.autograd import functions as g
from tests.support.workers import Cluster

_THREADS, _PASSES = 6, 40


@contextmanager
def _hasty_threads() -> Iterator[None]:
    """Threads take turns after a few bytecodes, not after 5 ms: what two of them can do to each other soon happens."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _work(context: Context, leaf: torch.Tensor) -> None:
    current_context.set(context)
    for _ in range(_PASSES):
        first, second = (rpc.rpc_sync(f"worker{to}", g.times_parameter, args=(leaf,)) for to in (1, 2))
        autograd.backward(context.id, [(first + second).sum()])


def _passes_on_several_threads() -> None:
    failures: list[BaseException] = []
    leaves = [torch.ones(2, 2, requires_grad=True) for _ in range(_THREADS)]

    def work(context: Context, leaf: torch.Tensor) -> None:
        try:
            _work(context, leaf)
        except BaseException as error:
            failures.append(error)

    with autograd.context() as context_id:
        context = autograd._retrieve_context(context_id)
        threads = [threading.Thread(target=work, args=(context, leaf)) for leaf in leaves]
        with _hasty_threads():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert failures == []
        gradients = autograd.get_gradients(context_id)
        for leaf in leaves:
            assert torch.equal(gradients[leaf], torch.full((2, 2), 6.0 * _PASSES))
        for worker in ("worker1", "worker2"):
            there = rpc.rpc_sync(worker, g.gradient_of_parameter, args=(context_id,))
            assert torch.equal(there, torch.full((2, 2), float(_THREADS * _PASSES)))


def test_passes_of_one_context_on_several_threads(workers: Cluster) -> None:
    workers.run(0, _passes_on_several_threads)


def _oldest_of_a_pass_that_begins_later() -> tuple[list[int], list[int]]:
    """A pass begins, and before it has sent anything, another one runs from its begin to its end."""
    driver = current_agent().gradients
    begun, go_on = threading.Event(), threading.Event()
    heads: list[PassHead] = []
    original_head, original_plan = driver._head, Context.plan

    def head_of(*args: Any) -> bytes:
        head = original_head(*args)
        heads.append(PassHead.parse(head))
        return head

    def plan(self: Context, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is slow:
            begun.set()
            go_on.wait(30)
        return original_plan(self, *args, **kwargs)

    with autograd.context() as context_id, pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_head", head_of)
        patch.setattr(Context, "plan", plan)
        a = torch.ones(2, 2, requires_grad=True)
        losses = [rpc.rpc_sync("worker1", g.times_parameter, args=(a,)).sum() for _ in range(2)]
        slow = threading.Thread(target=autograd.backward, args=(context_id, losses[:1]))
        slow.start()
        begun.wait(30)
        autograd.backward(context_id, losses[1:])
        go_on.set()
        slow.join()
    return [head.pass_id.number for head in heads], [head.oldest for head in heads]


def test_a_pass_that_has_sent_nothing_yet_counts_as_running(workers: Cluster) -> None:
    """Otherwise its first messages could arrive before that of the later pass, which would have it forgotten."""
    (later, first), oldest = workers.run(0, _oldest_of_a_pass_that_begins_later)
    assert first < later
    assert oldest == [first, first]
