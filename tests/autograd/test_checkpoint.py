"""``torch.utils.checkpoint`` around calls and inside of called functions: every call is made once."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import UsageError
from tests.references.looking import all_empty, owned
from tests.support.workers import Cluster

WEIGHT = torch.linspace(0.5, 1.5, 6, dtype=torch.float64).requires_grad_()
ran: list[str] = []
masks: list[torch.Tensor] = []
alive: list[weakref.ref[torch.Tensor]] = []
gates: dict[str, threading.Event] = {}


def take_ran() -> list[str]:
    taken = list(ran)
    ran.clear()
    return taken


def gradient_of_weight(context_id: int) -> torch.Tensor:
    return dist_autograd.get_gradients(context_id)[WEIGHT]


def layer(x: torch.Tensor) -> torch.Tensor:
    ran.append("layer")
    return torch.sin(torch.tanh(x * WEIGHT) * x)


def layers_on(workers: list[str], x: torch.Tensor) -> torch.Tensor:
    """A layer on each of these workers, called one from the other."""
    y = layer(x)
    return torch.sin(rpc.rpc_sync(workers[0], layers_on, (workers[1:], y)) * y) if workers else y


def all_on(workers: list[str], x: torch.Tensor) -> torch.Tensor:
    """What ``layers_on`` computes, without calls."""
    y = layer(x)
    return torch.sin(all_on(workers[1:], y) * y) if workers else y


def with_dropout(x: torch.Tensor) -> torch.Tensor:
    mask = dropout(torch.ones_like(x), 0.5)
    masks.append(mask.detach())
    return torch.sin(x * WEIGHT * mask) * mask


def take_masks() -> list[torch.Tensor]:
    taken = list(masks)
    masks.clear()
    return taken


def changing(x: torch.Tensor) -> torch.Tensor:
    """Changes its argument, and what it has computed."""
    x.mul_(2)
    y = torch.sin(x * WEIGHT)
    y.add_(1)
    return y * y


def checkpointed_here(reentrant: bool, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=reentrant) * 2  # type: ignore[no-any-return]


def _expected(function: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the argument and of the weight in one process."""
    x = _input()
    function(*args, x).sum().backward()
    assert x.grad is not None
    assert WEIGHT.grad is not None
    found = x.grad, WEIGHT.grad
    WEIGHT.grad = None
    ran.clear()
    return found


def _input() -> torch.Tensor:
    return torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()


def _weights(context_id: int) -> torch.Tensor:
    """The sum of the gradients of all workers' weights."""
    found = [dist_autograd.get_gradients(context_id).get(WEIGHT)]
    for worker in ("worker1", "worker2"):
        found.append(rpc.rpc_sync(worker, _gradient_if_any, (context_id,)))
    return torch.stack([gradient for gradient in found if gradient is not None]).sum(0)


def _gradient_if_any(context_id: int) -> torch.Tensor | None:
    return dist_autograd.get_gradients(context_id).get(WEIGHT)


def _around(reentrant: bool, mode: str, keep: bool) -> None:
    path = ["worker1", "worker2", "worker1"]
    expected, of_weight = _expected(all_on, path)
    with dist_autograd.context() as context_id:
        x = _input()
        y = checkpoint(lambda z: layers_on(path, z), x, use_reentrant=reentrant)
        before = [take_ran(), *(rpc.rpc_sync(worker, take_ran) for worker in ("worker1", "worker2"))]
        assert [len(each) for each in before] == [1, 2, 1]
        for number in range(1, 3 if keep else 2):
            dist_autograd.backward(context_id, [y.sum()], retain_graph=keep, mode=mode)
            torch.testing.assert_close(dist_autograd.get_gradients(context_id)[x], number * expected)
            torch.testing.assert_close(_weights(context_id), number * of_weight)
        # Each worker ran its own part again; nobody called anybody.
        again = [take_ran(), *(rpc.rpc_sync(worker, take_ran) for worker in ("worker1", "worker2"))]
        assert all(again)
        assert WEIGHT.grad is None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("mode", "keep"), [("smart", False), ("fast", True)])
def test_around_calls_of_calls(workers: Cluster, reentrant: bool, mode: str, keep: bool) -> None:
    workers.run(0, _around, reentrant, mode, keep)


def _inside(reentrant: bool) -> None:
    x = _input()
    (2 * layer(x)).sum().backward()
    expected, of_weight = x.grad, WEIGHT.grad
    WEIGHT.grad = None
    ran.clear()
    with dist_autograd.context() as context_id:
        x = _input()
        y = rpc.rpc_sync("worker1", checkpointed_here, (reentrant, x))
        dist_autograd.backward(context_id, [y.sum()])
        torch.testing.assert_close(dist_autograd.get_gradients(context_id)[x], expected)
        torch.testing.assert_close(rpc.rpc_sync("worker1", gradient_of_weight, (context_id,)), of_weight)
        assert rpc.rpc_sync("worker1", take_ran) == ["layer", "layer"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_of_a_called_function(workers: Cluster, reentrant: bool) -> None:
    workers.run(0, _inside, reentrant)


def _random_numbers() -> None:
    for worker in ("worker1", "worker2"):
        rpc.rpc_sync(worker, torch.manual_seed, (7,))
    with dist_autograd.context() as context_id:
        x = _input()

        def region(z: torch.Tensor) -> torch.Tensor:
            mine = dropout(torch.ones_like(z), 0.5)
            masks.append(mine)
            first = rpc.rpc_sync("worker1", with_dropout, (z * mine,))
            return torch.sin(rpc.rpc_async("worker2", with_dropout, (first * mine,)).wait() * mine)

        y = checkpoint(region, x, use_reentrant=False)
        dist_autograd.backward(context_id, [y.sum()])
        drawn = [take_masks(), *(rpc.rpc_sync(worker, take_masks) for worker in ("worker1", "worker2"))]
        for each in drawn:
            assert len(each) == 2  # drawn twice, and the same
            assert torch.equal(*each)
        found = dist_autograd.get_gradients(context_id)[x]
    mine, first, second = (each[0] for each in drawn)
    x = _input()
    a = torch.sin(x * mine * WEIGHT * first) * first
    b = torch.sin(a * mine * WEIGHT * second) * second
    torch.sin(b * mine).sum().backward()
    torch.testing.assert_close(found, x.grad)
    WEIGHT.grad = None


def test_each_worker_draws_the_same_random_numbers_again(workers: Cluster) -> None:
    workers.run(0, _random_numbers)


def _to_many() -> None:
    names = ["worker1", "worker2"]
    for rows in (1, 20_000):  # in the calls themselves, and as a parcel
        with dist_autograd.context() as context_id:
            x = _input().detach().repeat(rows, 1).requires_grad_()

            def region(z: torch.Tensor) -> torch.Tensor:
                first = rpc.gather(rpc.broadcast(names, with_dropout, (z,)))
                second = rpc.gather(rpc.map(names, with_dropout, [(first["worker1"],), (first["worker2"],)]))
                return torch.sin(second[0] * second[1])

            y = checkpoint(region, x, use_reentrant=False)
            dist_autograd.backward(context_id, [y.sum()])
            found = dist_autograd.get_gradients(context_id)[x]
            drawn = [rpc.rpc_sync(name, take_masks) for name in names]
        expected = x.detach().requires_grad_()
        results = []
        for masks in drawn:
            assert len(masks) == 4, "each worker runs its own part again, and is called once"
            a, b = masks[:2]
            again = masks[2:]
            assert all(any(torch.equal(mask, other) for other in again) for mask in (a, b)), "other random numbers"
            results.append(torch.sin(torch.sin(expected * WEIGHT * a) * a * WEIGHT * b) * b)
        torch.sin(results[0] * results[1]).sum().backward()
        torch.testing.assert_close(found, expected.grad)
        WEIGHT.grad = None


def test_calls_to_many_workers_are_made_once(workers: Cluster) -> None:
    workers.run(0, _to_many)


def sines(x: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
    ran.append("sines")
    for number in range(n):
        yield torch.sin(x * (number + 1))


def _streams() -> None:
    x = _input()
    torch.stack([torch.sin(torch.sin(x * (number + 1)) * x) for number in range(5)]).sum().backward()
    for window in (1, 16):
        with dist_autograd.context() as context_id:
            z = _input()

            def region(z: torch.Tensor, window: int = window) -> torch.Tensor:
                stream = rpc.stream("worker1", sines, (z, 5), window=window)
                return torch.stack([torch.sin(item * z) for item in stream]).sum(0)

            y = checkpoint(region, z, use_reentrant=False)
            dist_autograd.backward(context_id, [y.sum()])
            torch.testing.assert_close(dist_autograd.get_gradients(context_id)[z], x.grad)
            assert rpc.rpc_sync("worker1", take_ran) == ["sines"]


def test_generators_run_once(workers: Cluster) -> None:
    workers.run(0, _streams)


def _count_and_neg(x: torch.Tensor) -> torch.Tensor:
    ran.append("neg")
    return -x


def _references() -> None:
    made: list[Any] = []
    with dist_autograd.context() as context_id:
        x = _input()

        def region(z: torch.Tensor) -> torch.Tensor:
            reference = rpc.remote("worker1", _count_and_neg, (z,))
            made.append(reference)
            with pytest.raises(ZeroDivisionError):
                rpc.rpc_sync("worker1", _fail)
            here = reference.to_here()
            here.mul_(3)  # the second run must not see it changed
            return torch.sin(here) * torch.sin(here)

        y = checkpoint(region, x, use_reentrant=False)
        dist_autograd.backward(context_id, [y.sum()])
        found = dist_autograd.get_gradients(context_id)[x]
        assert rpc.rpc_sync("worker1", take_ran) == ["neg", "failed"]
    assert len(made) > 1
    assert all(reference is made[0] for reference in made)
    x = _input()
    torch.sin(-3 * x).square().sum().backward()
    torch.testing.assert_close(found, x.grad)


def _fail() -> None:
    ran.append("failed")
    raise ZeroDivisionError


def test_references_and_failed_calls_are_made_once(workers: Cluster) -> None:
    workers.run(0, _references)


def _random_sin(x: torch.Tensor) -> torch.Tensor:
    ran.append("random")
    return torch.rand(x.shape).sin()


def _without_a_context(reentrant: bool) -> None:
    x = _input()
    drawn: list[torch.Tensor] = []

    def region(z: torch.Tensor) -> torch.Tensor:
        drawn.append(rpc.rpc_sync("worker1", _random_sin, (z.detach(),)))
        return torch.sin(z * drawn[-1])

    y = checkpoint(region, x, use_reentrant=reentrant)
    y.sum().backward(retain_graph=True)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, drawn[0] * torch.cos(x.detach() * drawn[0]))
    y.sum().backward()  # the function runs a third time
    torch.testing.assert_close(x.grad, 2 * drawn[0] * torch.cos(x.detach() * drawn[0]))
    assert len(drawn) == 3
    assert rpc.rpc_sync("worker1", take_ran) == ["random"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_calls_are_made_once_outside_of_a_context_too(workers: Cluster, reentrant: bool) -> None:
    workers.run(0, _without_a_context, reentrant)


def _sin_after(x: torch.Tensor, name: str) -> torch.Tensor:
    """The sine, once the caller has opened the gate of this name, if there is one."""
    if name:
        assert gates.setdefault(name, threading.Event()).wait(30)
    return torch.sin(x)


def _open(name: str) -> None:
    gates.setdefault(name, threading.Event()).set()


def _callbacks(reentrant: bool, is_late: bool) -> None:
    """A callback of a future runs on the thread that completes the future, or at once if that is done."""
    ran_here: list[str] = []

    def finish(future: Any) -> torch.Tensor:
        ran_here.append("callback")
        value = future.wait().sin() * 2
        return value if is_late else dropout(value)  # on this thread, so that the order is known

    def region(z: torch.Tensor) -> torch.Tensor:
        name = f"late {reentrant} {len(ran_here)}" if is_late else ""
        future = rpc.rpc_async("worker1", _sin_after, (z * z, name))
        if not is_late:
            future.wait()
        done = future.then(finish).then(lambda other: other.wait().cos())
        if is_late:
            rpc.rpc_sync("worker1", _open, (name,))
        y = dropout(done.wait().exp())
        return rpc.rpc_sync("worker1", torch.cos, (y,)) * z

    found = []
    for is_checkpointed in (False, True):
        with dist_autograd.context() as context_id:
            x = _input()
            torch.manual_seed(0)
            y = checkpoint(region, x, use_reentrant=reentrant) if is_checkpointed else region(x)
            dist_autograd.backward(context_id, [y.sum()])
            found.append((y.detach(), dist_autograd.get_gradients(context_id)[x]))
    torch.testing.assert_close(found[1], found[0])
    assert ran_here == ["callback"] * 2


def _changed_after_a_callback() -> None:
    def region(z: torch.Tensor) -> torch.Tensor:
        future = rpc.rpc_async("worker1", _sin_after, (z, ""))
        future.wait()
        y = future.then(lambda done: done.wait().exp()).wait()
        return y.mul_(2)  # the gradient of exp() needs its result

    with dist_autograd.context() as context_id:
        y = checkpoint(region, _input(), use_reentrant=False)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            dist_autograd.backward(context_id, [y.sum()])


def test_what_a_callback_has_saved_must_not_change(workers: Cluster) -> None:
    workers.run(0, _changed_after_a_callback)


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_callbacks_of_futures(workers: Cluster, reentrant: bool, is_late: bool) -> None:
    workers.run(0, _callbacks, reentrant, is_late)


def _sin_and_reference(x: torch.Tensor) -> torch.Tensor:
    """Makes a reference in a region: the region keeps it, and the graph keeps the region."""
    rpc.remote("worker2", torch.ones, (2,))
    return torch.sin(torch.sin(x))


class _Holding(torch.autograd.Function):
    """Its node keeps a reference."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.reference = rpc.remote("worker2", torch.ones, (2,))
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1


def _node_with_reference(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(_Holding.apply(x))  # type: ignore[no-untyped-call]


def _graphs_with_references(is_checkpointed: bool, order: int) -> None:
    with dist_autograd.context() as context_id:
        x = _input()
        if is_checkpointed:
            y = checkpoint(lambda z: rpc.rpc_sync("worker1", _sin_and_reference, (z,)), x, use_reentrant=False)
        else:
            y = rpc.rpc_sync("worker1", _node_with_reference, (x,))
        root = torch.sin(y).sum()
        for number in range(order):
            dist_autograd.backward(context_id, [root], create_graph=number < order - 1)
            root = dist_autograd.get_gradients(context_id)[x].sum()
        assert rpc.rpc_sync("worker2", owned) == 1


@pytest.mark.parametrize("is_checkpointed", [True, False])
@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_references_of_a_graph_end_with_the_context(workers: Cluster, is_checkpointed: bool, order: int) -> None:
    """A reference has the context that it was made in, and the context has the graph that has the reference."""
    workers.run(0, _graphs_with_references, is_checkpointed, order)
    all_empty(workers)


def _changes_in_place() -> None:
    expected, of_weight = _expected(lambda x: changing(x * 1))
    with dist_autograd.context() as context_id:
        x = _input()
        y = checkpoint(lambda z: rpc.rpc_sync("worker1", changing, (z,)), x, use_reentrant=False)
        dist_autograd.backward(context_id, [y.sum()])
        torch.testing.assert_close(dist_autograd.get_gradients(context_id)[x], expected)
        torch.testing.assert_close(rpc.rpc_sync("worker1", gradient_of_weight, (context_id,)), of_weight)


def test_called_functions_may_change_their_arguments(workers: Cluster) -> None:
    workers.run(0, _changes_in_place)


def _change_one(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Its arguments are one tensor, and so are its results."""
    x.mul_(2)
    z = torch.sin(x) * torch.sin(y)
    return z, z


def _one_tensor_twice() -> None:
    expected, _ = _expected(lambda x: torch.sin(2 * torch.sin(2 * x) ** 2) ** 2 + 0 * WEIGHT)
    with dist_autograd.context() as context_id:
        x = _input()

        def region(a: torch.Tensor) -> torch.Tensor:
            b, c = rpc.rpc_sync("worker1", _change_one, (a, a))
            b.mul_(2)
            return torch.sin(b) * torch.sin(c)

        y = checkpoint(region, x, use_reentrant=False)
        dist_autograd.backward(context_id, [y.sum()])
        torch.testing.assert_close(dist_autograd.get_gradients(context_id)[x], expected)


def test_a_tensor_that_is_sent_twice_is_one_tensor_in_both_runs(workers: Cluster) -> None:
    workers.run(0, _one_tensor_twice)


def _nested() -> None:
    expected, _ = _expected(lambda x: layer(torch.sin(layer(x))))
    with dist_autograd.context() as context_id:
        x = _input()

        def inner(z: torch.Tensor) -> torch.Tensor:
            return torch.sin(rpc.rpc_sync("worker1", layer, (z,)))

        def outer(z: torch.Tensor) -> torch.Tensor:
            return layer(checkpoint(inner, z, use_reentrant=False))  # type: ignore[no-any-return]

        y = checkpoint(outer, x, use_reentrant=False)
        assert rpc.rpc_sync("worker1", take_ran) == ["layer"]
        dist_autograd.backward(context_id, [y.sum()])
        torch.testing.assert_close(dist_autograd.get_gradients(context_id)[x], expected)
        assert rpc.rpc_sync("worker1", take_ran) == ["layer"]  # again, for its own part
    ran.clear()


def test_a_region_in_a_region(workers: Cluster) -> None:
    workers.run(0, _nested)


def _large(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(8):
        y = torch.sin(y)  # its node keeps its input
        alive.append(weakref.ref(y))
    return y


def _alive() -> int:
    gc.collect()
    count = sum(each() is not None for each in alive)
    alive.clear()
    return count


def _memory() -> None:
    kept = []
    for is_checkpointed in (False, True):
        with dist_autograd.context() as context_id:
            x = torch.ones(100, requires_grad=True)
            call = _call_large
            y = checkpoint(call, x, use_reentrant=False) if is_checkpointed else call(x)
            kept.append(rpc.rpc_sync("worker1", _alive))
            dist_autograd.backward(context_id, [y.sum()])
            rpc.rpc_sync("worker1", _alive)
    assert kept[1] < kept[0] <= 8


def _call_large(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker1", _large, (x,))  # type: ignore[no-any-return]


def test_the_callee_forgets_its_activations(workers: Cluster) -> None:
    workers.run(0, _memory)


def _other_calls() -> None:
    runs: list[int] = []

    def fickle(z: torch.Tensor) -> torch.Tensor:
        runs.append(0)
        return torch.sin(rpc.rpc_sync("worker1" if len(runs) == 1 else "worker2", torch.sin, (z,)))

    with dist_autograd.context() as context_id:
        y = checkpoint(fickle, _input(), use_reentrant=False)
        with pytest.raises(UsageError, match=r"on worker2, where the first run made a call of .* on worker1"):
            dist_autograd.backward(context_id, [y.sum()])


def test_a_second_run_that_makes_other_calls_is_an_error(workers: Cluster) -> None:
    workers.run(0, _other_calls)


def _unwatched() -> None:
    """Local checkpoints outside of contexts are as torch's, and a region that failed leaves nothing behind."""
    with dist_autograd.context(), pytest.raises(ZeroDivisionError):
        checkpoint(lambda z: z / (1 // 0), _input(), use_reentrant=False)
    x = _input()
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    expected, _ = x.grad, WEIGHT.grad
    WEIGHT.grad = None
    y = _input()
    layer(y).sum().backward()
    torch.testing.assert_close(expected, y.grad)
    assert rpc.rpc_sync("worker1", layer, (_input(),)).shape == (6,)
    WEIGHT.grad = None
    ran.clear()


def test_local_checkpoints_are_torchs(workers: Cluster) -> None:
    workers.run(0, _unwatched)


class Reentrant(torch.autograd.Function):
    """Somebody else's checkpoint: calls in its backward function, and runs a pass there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = rpc.rpc_sync("worker1", torch.sin, (x,))
        torch.autograd.backward(y, gradient)
        return torch.ones_like(gradient)


def _pass_in_a_pass() -> None:
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker2", torch.sin, (_input(),))
        for _ in range(100):  # a graph without leaves that is large enough to run to its end
            y = y + 1
        y = Reentrant.apply(y)
        with pytest.raises(UsageError, match="ran a backward pass of its own"):
            dist_autograd.backward(context_id, [y.sum()])


def test_a_pass_inside_of_a_backward_function_that_comes_to_a_call(workers: Cluster) -> None:
    workers.run(0, _pass_in_a_pass)
