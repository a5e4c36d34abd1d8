"""Backward passes: gradients, modes and arguments."""

from __future__ import annotations

import pytest
import torch

import farprop.autograd as autograd
import farprop.rpc as rpc
from farprop.errors import RpcTimeoutError, UsageError
from tests.autograd import functions as g
from tests.support.workers import Cluster, cluster

PATHS = [["worker1"], ["worker0"], ["worker1", "worker2", "worker0"], ["worker1", "worker0"] * 5]


def _backward_along(path: list[str]) -> None:
    a = torch.rand(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = g.double_along(path, a).sum()
        for _ in range(2):
            autograd.backward(context_id, [loss], retain_graph=True)
        gradients = autograd.get_gradients(context_id)
    assert torch.equal(gradients[a], torch.full((3,), 2.0 * 2 ** (len(path) + 1)))
    assert a.grad is None


@pytest.mark.parametrize("path", PATHS, ids=lambda path: "-".join(name[-1] for name in path))
def test_gradients_along_paths_of_workers(workers: Cluster, path: list[str]) -> None:
    workers.run(0, _backward_along, path)


def _none_of(x: torch.Tensor) -> torch.Tensor:
    return x[:0]


def _backward_of_nothing(first: str, second: str) -> None:
    a = torch.rand(3, requires_grad=True)
    with autograd.context() as context_id:
        nothing = rpc.rpc_sync(first, _none_of, args=(a,))
        something = rpc.rpc_sync(second, torch.mul, args=(a, 3))
        for roots in ([nothing.sum() + something.sum()], [something.sum() + nothing.sum()]):
            autograd.backward(context_id, roots, retain_graph=True)
        assert torch.equal(autograd.get_gradients(context_id)[a], torch.full((3,), 6.0))


@pytest.mark.parametrize(("first", "second"), [("worker1", "worker2"), ("worker2", "worker1")])
def test_gradients_without_elements_go_to_their_own_worker(workers: Cluster, first: str, second: str) -> None:
    """They need no room in a message, and must not be sent along with those for another worker."""
    workers.run(0, _backward_of_nothing, first, second)


def _backward_without_collectors() -> None:
    a = torch.rand(2, 2, requires_grad=True)
    with autograd.context() as context_id:
        here = g.times_parameter_without_collector(a)
        there = rpc.rpc_sync("worker1", g.times_parameter_without_collector, args=(here,))
        autograd.backward(context_id, [there.sum()])


def test_an_ended_context_is_freed_without_the_garbage_collector(workers: Cluster) -> None:
    """Its graph holds activations: they must not stay until some thousand objects more were made."""
    workers.run(0, _backward_without_collectors)
    for rank in range(2):
        workers.run(rank, g.context_is_freed)


def _unused(mode: str | None) -> list[int]:
    a, b = torch.rand(2, 2, requires_grad=True), torch.rand(2, 2, requires_grad=True)
    seen: list[int] = []
    a.register_hook(lambda gradient: seen.append(1))  # with a hook, the leaf has to wait for its whole gradient
    with autograd.context() as context_id:
        h = a * b
        rpc.rpc_sync("worker1", torch.add, args=(a, b))
        rpc.rpc_sync("worker2", g.times_parameter, args=(h,))
        used = rpc.rpc_sync("worker1", g.times_parameter, args=(h,))
        autograd.backward(context_id, [used.sum() + h.sum()], mode=mode, timeout=0.5 if mode == "fast" else None)
        gradients = autograd.get_gradients(context_id)
        assert torch.equal(gradients[a], 4 * b)
        assert torch.equal(gradients[b], 4 * a)
        assert rpc.rpc_sync("worker2", g.gradient_of_parameter, args=(context_id,)) is None
        assert torch.equal(rpc.rpc_sync("worker1", g.gradient_of_parameter, args=(context_id,)), h)
    return seen


def test_smart_mode_does_not_wait_for_unused_results(workers: Cluster) -> None:
    assert workers.run(0, _unused, None) == [1]


def test_fast_mode_waits_for_unused_results_until_the_deadline(workers: Cluster) -> None:
    with pytest.raises(RpcTimeoutError, match="In FAST mode it waits for the gradients of every tensor"):
        workers.run(0, _unused, "fast")


def _get_and_set_mode() -> tuple[str, str]:
    first = autograd.get_mode()
    autograd.set_mode("smart")
    with pytest.raises(UsageError, match="There is no mode 'quick'"):
        autograd.set_mode("quick")
    return first, autograd.get_mode()


def test_the_default_mode_of_a_process() -> None:
    with cluster(1, {"FARPROP_AUTOGRAD_MODE": "fast"}) as job:
        assert job.run(0, _get_and_set_mode) == ("fast", "smart")


def _bad_arguments() -> None:
    with autograd.context() as context_id:
        leaf = torch.rand(1, requires_grad=True)
        loss = (leaf * 2).sum()
        for arguments, error, text in [
            ((context_id, None), TypeError, "incompatible function arguments"),
            ((None, [loss]), TypeError, "incompatible function arguments"),
            ((context_id, [1.0]), TypeError, "roots are tensors"),
            ((context_id, []), UsageError, "No tensors provided"),
            ((context_id, [torch.rand(1)]), UsageError, "requires_grad not set on"),
            ((context_id, [torch.rand(2, requires_grad=True) * 2]), UsageError, "all roots need to be scalar"),
            ((context_id, [leaf]), UsageError, "does not have a valid gradient function"),
            ((12345, [loss]), UsageError, "Could not find autograd context with id: 12345"),
        ]:
            with pytest.raises(error, match=text):
                autograd.backward(*arguments)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="There is no mode"):
            autograd.backward(context_id, [loss], mode="lazy")
        with pytest.raises(ValueError, match="A timeout is 0"):
            autograd.backward(context_id, [loss], timeout=-2)
        with pytest.raises(UsageError, match="Already have an autograd context id for this thread"):
            autograd.context().__enter__()
    with pytest.raises(UsageError, match=f"Could not find autograd context with id: {context_id}. It has ended"):
        autograd.get_gradients(context_id)


def test_bad_arguments(workers: Cluster) -> None:
    workers.run(0, _bad_arguments)


def _other_context() -> None:
    a = torch.rand(2, requires_grad=True)
    with autograd.context():
        kept = rpc.rpc_sync("worker1", torch.neg, args=(a,))
    with autograd.context() as context_id, pytest.raises(UsageError, match="but the backward pass is of context"):
        autograd.backward(context_id, [kept.sum()])


def test_a_tensor_of_another_context_is_an_error(workers: Cluster) -> None:
    workers.run(0, _other_context)


def _asynchronous(function: object) -> None:
    a = torch.ones(2, 2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", function, args=("worker2", a)).sum()
        autograd.backward(context_id, [loss])
        sign = -1 if function is g.later else 1
        assert torch.equal(autograd.get_gradients(context_id)[a], torch.full((2, 2), 3.0 * sign))
        assert torch.equal(
            rpc.rpc_sync("worker2", g.gradient_of_parameter, args=(context_id,)), torch.full((2, 2), 1.0 * sign)
        )


@pytest.mark.parametrize("function", [g.later, g.coroutine], ids=["async_execution", "coroutine"])
def test_backward_through_asynchronous_functions(workers: Cluster, function: object) -> None:
    workers.run(0, _asynchronous, function)


def _from_a_reference() -> None:
    a = torch.ones(2, 2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.remote("worker1", torch.sum, args=(rpc.rpc_sync("worker2", g.times_parameter, args=(a,)),))
        loss.backward(context_id)
        assert torch.equal(autograd.get_gradients(context_id)[a], torch.full((2, 2), 3.0))


def test_backward_of_a_remote_reference(workers: Cluster) -> None:
    workers.run(0, _from_a_reference)
