"""Gradients and hooks in small programs, one for each bug that the oracle's random programs have found."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.runtime.autograd.nodes import SendRpcBackward
from tests.support.workers import Cluster


def _first(*tensors: torch.Tensor) -> torch.Tensor:
    return tensors[0] * 2


def _sum(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


def _empty_tensors() -> None:
    leaf = torch.ones(2, 3, requires_grad=True)
    with dist_autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", _first, args=(leaf[:0],))
        assert result.shape == (0, 3)
        assert result.grad_fn is not None
        dist_autograd.backward(context_id, [result.sum() + leaf.sum()])
        assert torch.equal(dist_autograd.get_gradients(context_id)[leaf], torch.ones(2, 3))


def _view_made_with_grad_off() -> None:
    """Torch says that the view requires grad, but its graph leads to no leaf."""
    leaf, other = torch.ones(2, 2, requires_grad=True), torch.ones(3, requires_grad=True)
    with torch.no_grad():
        view = leaf.narrow(1, 0, 1)
    assert view.requires_grad
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", _sum, args=(view, other))
        dist_autograd.backward(context_id, [loss])
        assert set(dist_autograd.get_gradients(context_id)) == {other}


def _hooks_of_a_receive() -> None:
    leaf = torch.ones(3, requires_grad=True)
    ran: list[str] = []

    def prehook(gradients: Any) -> Any:
        ran.append("in front")
        return tuple(gradient * 3 for gradient in gradients)

    with dist_autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", _first, args=(leaf,))
        assert result.grad_fn is not None
        result.register_hook(lambda gradient: ran.append("tensor"))
        result.grad_fn.register_prehook(prehook)
        result.grad_fn.register_hook(lambda outputs, gradients: ran.append(f"behind {outputs} {gradients[0].tolist()}"))
        dist_autograd.backward(context_id, [result.sum()])
        assert torch.equal(dist_autograd.get_gradients(context_id)[leaf], torch.full((3,), 6.0))
    assert ran == ["tensor", "in front", "behind (None,) [3.0, 3.0, 3.0]"]


def _hooks_of_a_leaf() -> None:
    leaf = torch.ones(3, requires_grad=True)
    ran: list[tuple[str, bool]] = []
    node = torch.autograd.graph.get_gradient_edge(leaf).node

    def note(name: str) -> Any:
        return lambda *_: ran.append((name, torch.is_grad_enabled()))

    node.register_hook(note("after"))
    leaf.register_post_accumulate_grad_hook(note("accumulated"))
    node.register_prehook(note("before"))
    leaf.register_hook(note("tensor"))
    leaf.sum().backward()
    expected, ran[:] = ran[:], []
    with dist_autograd.context() as context_id:
        # Twice, so that the leaf is reached from several sources.
        loss = rpc.rpc_sync("worker1", _sum, args=(leaf,)) + rpc.rpc_sync("worker2", _sum, args=(leaf,))
        dist_autograd.backward(context_id, [loss])
    assert ran == expected
    assert [name for name, _ in expected] == ["tensor", "before", "accumulated", "after"]


def _call_own_worker_twice() -> torch.Tensor:
    own_info = rpc.get_worker_info()
    one, two = (torch.ones(2, requires_grad=True) for _ in range(2))
    return rpc.rpc_sync(own_info, _sum, args=(one,)) + rpc.rpc_sync(own_info, _sum, args=(two,))  # type: ignore[no-any-return]


def _two_branches_end_on_one_worker() -> None:
    """Each branch returns its share of the credit, both in one answer."""
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", _call_own_worker_twice)
        dist_autograd.backward(context_id, [loss], timeout=10)


@pytest.mark.parametrize(
    "body",
    [
        _empty_tensors,
        _view_made_with_grad_off,
        _hooks_of_a_receive,
        _hooks_of_a_leaf,
        _two_branches_end_on_one_worker,
    ],
)
def test_gradients_of_small_programs(workers: Cluster, body: Any) -> None:
    workers.run(0, body)


def test_all_threads_see_the_same_edges_of_a_send() -> None:
    """Two messages of a pass may arrive at the same time, and both look up the edges."""
    for _ in range(100):
        send = SendRpcBackward([torch.ones(1, requires_grad=True) for _ in range(20)])
        gate, found = threading.Barrier(3), []

        def look(send: SendRpcBackward = send, gate: threading.Barrier = gate, found: list[int] = found) -> None:
            gate.wait()
            found.append(len(send.next_functions))

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [20, 20, 20]
        assert len(send.next_functions) == 20
