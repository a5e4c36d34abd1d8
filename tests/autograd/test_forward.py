"""What a forward pass records: nodes, contexts, and which workers know a context."""

from __future__ import annotations

import threading

import pytest
import torch

import farprop.autograd as autograd
import farprop.rpc as rpc
from farprop.errors import UsageError
from tests.autograd import functions as g
from tests.references.looking import wait_until
from tests.support.workers import Cluster


def _send_and_receive_nodes() -> None:
    a, b, plain = torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True) * 2, torch.rand(2)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", torch.stack, args=([a, plain, b],))
        context = autograd._current_context()
        assert context._context_id() == context_id
        ((message_id, send),) = context._send_functions().items()
        ((_, receive),) = context._recv_functions().items()
        assert message_id >> 48 == 0
        assert send.name() == "torch::distributed::autograd::SendRpcBackward"
        assert send.next_functions[0][0].variable is a  # the tensor without grad has no edge
        assert send.next_functions[1] == (b.grad_fn, 0)
        assert len(send.next_functions) == 2
        assert result.grad_fn is receive
        assert receive.name() == "torch::distributed::autograd::RecvRpcBackward"
        assert context._known_worker_ids() == {1}
        assert "1 sends, 1 receives" in repr(context)
        with pytest.raises(UsageError, match=r"farprop.autograd.backward\(context_id"):
            result.sum().backward()


def test_a_call_makes_a_send_and_a_receive_node(workers: Cluster) -> None:
    workers.run(0, _send_and_receive_nodes)


def _no_send_node() -> None:
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        with torch.no_grad():
            result = rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(2, requires_grad=True),))
        assert not result.requires_grad
        context = autograd._current_context()
        assert not context._send_functions()
        assert context._known_worker_ids() == {1}
        assert rpc.rpc_sync("worker1", g.context_exists, args=(context_id,))
    assert rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(2, requires_grad=True),)).is_leaf


def test_no_send_node_without_grad_or_outside_a_context(workers: Cluster) -> None:
    workers.run(0, _no_send_node)


def _context_in_calls(kind: str) -> None:
    with autograd.context() as context_id:
        if kind == "async":
            assert rpc.rpc_async("worker1", g.current_context_id).wait() == context_id
        elif kind == "remote":
            assert rpc.remote("worker1", g.current_context_id).to_here() == context_id
        else:
            assert rpc.rpc_sync("worker1", rpc.rpc_sync, args=("worker2", g.current_context_id)) == context_id
    with pytest.raises(UsageError, match="doesn't have a valid autograd context"):
        rpc.rpc_sync("worker1", g.current_context_id)


@pytest.mark.parametrize("kind", ["async", "remote", "nested"])
def test_called_functions_run_in_the_callers_context(workers: Cluster, kind: str) -> None:
    workers.run(0, _context_in_calls, kind)


def _call_after_the_context() -> None:
    """A call that arrives after its context has ended runs without it, and does not revive it."""
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(2),))
        late = autograd._current_context()
    wait_until(lambda: not rpc.rpc_sync("worker1", g.context_exists, args=(context_id,)))
    from farprop.runtime.autograd.contexts import current_context

    token = current_context.set(late)
    try:
        result = rpc.rpc_sync("worker1", g.times_parameter, args=(torch.ones(2, 2, requires_grad=True),))
    finally:
        current_context.reset(token)
    assert result.is_leaf
    assert torch.equal(result, torch.full((2, 2), 3.0))
    assert not rpc.rpc_sync("worker1", g.context_exists, args=(context_id,))


def test_a_late_call_does_not_revive_its_context(workers: Cluster) -> None:
    workers.run(0, _call_after_the_context)


def _threads() -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                a = torch.full((2, 2), float(number), requires_grad=True)
                with autograd.context() as context_id:
                    x = rpc.rpc_sync("worker1", g.times_parameter, args=(a,))
                    x = rpc.rpc_sync("worker2", g.times_parameter, args=(x,))
                    autograd.backward(context_id, [x.sum()])
                    assert torch.equal(autograd.get_gradients(context_id)[a], torch.full((2, 2), 9.0))
                    other = rpc.rpc_sync("worker1", g.gradient_of_parameter, args=(context_id,))
                    assert torch.equal(other, torch.full((2, 2), 3.0 * number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_many_threads_with_contexts_of_their_own(workers: Cluster) -> None:
    workers.run(0, _threads)
    assert workers.run(1, g.grad_of_parameter) is None
