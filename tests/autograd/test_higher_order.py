"""Derivatives of higher order across workers: recorded passes, gradients of chosen inputs, and products with them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

import farprop.autograd as autograd
import farprop.rpc as rpc
from farprop.errors import BackwardError, ConnectionLostError, UsageError
from tests.autograd import functions as g
from tests.references.looking import wait_until
from tests.support.workers import Cluster, cluster

Tensor = torch.Tensor
Call = Callable[..., Any]


def _here(_: str, function: Call, args: tuple[Any, ...]) -> Any:
    """As ``rpc_sync``, in this process."""
    return function(*args)


def _there(worker: str, function: Call, args: tuple[Any, ...]) -> Any:
    return rpc.rpc_sync(worker, function, args=args)


# A critic with a gradient penalty: its layers are on three workers

_weights: dict[int, Tensor] = {}


def _layer(number: int, x: Tensor) -> Tensor:
    if number not in _weights:
        source = torch.Generator().manual_seed(number)
        _weights[number] = torch.randn(4, 4, generator=source, dtype=torch.float64).div(2).requires_grad_()
    return torch.tanh(x @ _weights[number])


def _step(context_id: int | None) -> None:
    with torch.no_grad():
        for number, weight in _weights.items():
            gradients = {weight: weight.grad} if context_id is None else autograd.get_gradients(context_id)
            if gradients.get(weight) is not None:
                _weights[number] = (weight - 0.1 * gradients[weight]).requires_grad_()  # type: ignore[operator]


def _critic(call: Call, x: Tensor) -> Tensor:
    for number in range(3):
        x = call(f"worker{number}", _layer, (number, x))
    return x.sum(1)


def _critic_losses(call: Call) -> list[float]:
    _weights.clear()
    source = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(4):
        real, fake, between = torch.randn(3, 5, 4, generator=source, dtype=torch.float64)
        between.requires_grad_()
        if call is _here:
            losses.append(_critic_step(call, None, real, fake, between))
            continue
        with autograd.context() as context_id:
            losses.append(_critic_step(call, context_id, real, fake, between))
    return losses


def _critic_step(call: Call, context_id: int | None, real: Tensor, fake: Tensor, between: Tensor) -> float:
    score = _critic(call, between).sum()
    if context_id is None:
        (slope,) = torch.autograd.grad(score, between, create_graph=True)
    else:
        (slope,) = autograd.grad(context_id, score, between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).pow(2).mean()
    loss = _critic(call, fake).mean() - _critic(call, real).mean() + 10 * penalty
    if context_id is None:
        loss.backward()
        _step(None)
    else:
        autograd.backward(context_id, [loss])
        for number in range(3):
            rpc.rpc_sync(f"worker{number}", _step, args=(context_id,))
    return loss.item()


def test_a_critic_with_a_gradient_penalty_learns_as_in_one_process(workers: Cluster) -> None:
    losses = workers.run(0, _critic_losses, _there)
    expected = _critic_losses(_here)
    assert len(set(expected)) == 4
    assert losses == pytest.approx(expected, abs=1e-6)


# What comes with a recorded pass


def _cube(x: Tensor) -> Tensor:
    return x * x * x


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


def _once(x: Tensor) -> Tensor:
    return _Once.apply(x) * x  # type: ignore[no-any-return,no-untyped-call]


def _with_hook(call: Call, a: Tensor, modes: list[bool]) -> Tensor:
    """A loss whose gradient passes a hook, in every pass."""
    y = call("worker1", _cube, (a,))
    y.register_hook(lambda gradient: (modes.append(torch.is_grad_enabled()), gradient * 2)[1])
    return y.pow(2).sum()  # type: ignore[no-any-return]


def _hooked_and_unused(mode: str) -> None:
    """With a hook that scales the gradient, a result that is not used, and grad mode off around the pass."""
    modes: list[bool] = []
    a, b = (torch.tensor([2.0], requires_grad=True) for _ in range(2))
    with autograd.context() as context_id:
        if mode == "smart":
            rpc.rpc_sync("worker2", _cube, args=(a,))  # not used
        loss = _with_hook(_there, a, modes)
        with torch.no_grad():
            autograd.backward(context_id, [loss], create_graph=True, mode=mode)
        first = autograd.get_gradients(context_id)[a]
        (second,) = autograd.grad(context_id, first, a, create_graph=True)
        (third,) = autograd.grad(context_id, second, a)  # type: ignore[arg-type]
        assert autograd.get_gradients(context_id)[a] is first
    expected: list[Tensor] = [_with_hook(_here, b, [])]
    for order in range(3):
        expected += torch.autograd.grad(expected[-1], b, create_graph=order < 2)
    assert [first, second, third] == expected[1:]
    assert [made.requires_grad for made in (first, second, third)] == [True, True, False]  # type: ignore[union-attr]
    assert modes == [True, True, False]


def _differentiated_twice() -> None:
    a = torch.tensor([2.0], requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", _once, args=(a,))
        autograd.backward(context_id, [y.sum()], create_graph=True)
        before = autograd.get_gradients(context_id)
        assert before[a].item() == 12
        with pytest.raises(BackwardError, match="Error on Node 1: .*once_differentiable") as raised:
            autograd.backward(context_id, [before[a].sum()])
        assert any("worker1" in note for note in raised.value.__notes__)
        assert autograd.get_gradients(context_id) == before


def _counts(context_id: int) -> tuple[int, int, int]:
    context = autograd._retrieve_context(context_id)
    return len(context._send_functions()), len(context._recv_functions()), len(context.wanted)


def _recorded(context_id: int, loss: Tensor, a: Tensor, wants_input: bool) -> Any:
    """The gradient of ``a``, by a recorded pass."""
    if wants_input:
        return autograd.grad(context_id, loss, a, create_graph=True)[0]
    autograd.backward(context_id, [loss], create_graph=True)
    return autograd.get_gradients(context_id)[a]


def _failed_pass_is_undone() -> None:
    a = torch.ones(2, 2, requires_grad=True)
    names = ("worker0", "worker1", "worker2")
    for wants_input in (False, True):
        rpc.rpc_sync("worker1", g.set_error, args=("no gradient today",))
        with autograd.context() as context_id:
            x = rpc.rpc_sync("worker1", g.raising_later, args=(a,))
            loss = rpc.rpc_sync("worker2", g.times_parameter, args=(x,)).pow(2).sum()
            before = [rpc.rpc_sync(name, _counts, args=(context_id,)) for name in names]

            with pytest.raises(BackwardError, match="no gradient today"):
                _recorded(context_id, loss, a, wants_input)
            after = [rpc.rpc_sync(name, _counts, args=(context_id,)) for name in names]
            assert after == before
            assert not autograd.get_gradients(context_id)
            rpc.rpc_sync("worker1", g.set_error, args=(None,))
            assert torch.equal(_recorded(context_id, loss, a, wants_input), torch.full((2, 2), 162.0))
            assert [rpc.rpc_sync(name, _counts, args=(context_id,)) for name in names] != before


def _wrong_arguments() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", _cube, args=(a,))
        sends = _counts(context_id)
        with pytest.raises(UsageError, match="don't depend on input 1"):
            autograd.grad(context_id, y.sum(), [a, b], create_graph=True)
        assert _counts(context_id) == sends
        with pytest.raises(UsageError, match="not a scalar"):
            autograd.grad(context_id, y, a)
        with pytest.raises(UsageError, match="does not require grad"):
            autograd.grad(context_id, y.sum(), torch.ones(2))
        with pytest.raises(TypeError, match="number 0 is RRef"):
            autograd.grad(context_id, [rpc.RRef(y)], a)  # type: ignore[list-item]
        with pytest.raises(UsageError, match="on worker1 is of type int"):
            autograd.grad(context_id, y.sum(), rpc.remote("worker1", int))
        with pytest.raises(UsageError, match="shape"):
            autograd.grad(context_id, y, a, torch.ones(3))
        assert autograd.grad(context_id, y, [b, a], torch.ones(2), allow_unused=True)[0] is None
    with pytest.raises(UsageError, match="has ended"):
        autograd.grad(context_id, y.sum(), a)


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_hooks_and_unused_results(workers: Cluster, mode: str) -> None:
    workers.run(0, _hooked_and_unused, mode)


def test_a_function_that_is_once_differentiable_is_torchs_error(workers: Cluster) -> None:
    workers.run(0, _differentiated_twice)


def test_a_recorded_pass_that_fails_leaves_nothing_behind(workers: Cluster) -> None:
    workers.run(0, _failed_pass_is_undone)


def test_arguments_of_grad_are_checked(workers: Cluster) -> None:
    workers.run(0, _wrong_arguments)


# Inputs elsewhere, and products


def _weight(number: int) -> rpc.RRef[Tensor]:
    _layer(number, torch.zeros(1, 4, dtype=torch.float64))
    return rpc.RRef(_weights[number])


def _forward(x: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def _products() -> None:
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4).requires_grad_()
    references = [rpc.rpc_sync(f"worker{number}", _weight, args=(number,)) for number in range(3)]
    inputs = [x, *references]
    copies = [x.detach().clone().requires_grad_(), *[r.to_here().detach().requires_grad_() for r in references]]
    vectors = [torch.full_like(copy, 0.5 + n, requires_grad=False) for n, copy in enumerate(copies)]
    with autograd.context() as context_id:
        y = x
        for number in range(3):
            y = rpc.rpc_sync(f"worker{number}", _layer, args=(number, y))
        loss = y.pow(2).sum()
        products = autograd.hvp(context_id, loss, inputs, vectors)
        changes = autograd.jvp(context_id, [y], inputs, vectors)
        linear = autograd.hvp(context_id, rpc.rpc_sync("worker1", torch.neg, args=(x,)).sum(), x, vectors[0])
        gradients = autograd.grad(context_id, loss, inputs)
        owners = [made.owner_name() for made in products[1:]]  # type: ignore[union-attr]
        assert owners == ["worker0", "worker1", "worker2"]
        found = [
            [made.to_here() if isinstance(made, rpc.RRef) else made for made in some] for some in (products, gradients)
        ]
        assert not autograd.get_gradients(context_id)

    def local(*values: Tensor) -> Tensor:
        return _forward(values[0], list(values[1:]))

    _, expected = torch.autograd.functional.hvp(lambda *v: local(*v).pow(2).sum(), tuple(copies), tuple(vectors))
    for ours, theirs in zip(found[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    _, expected = torch.autograd.functional.jvp(local, tuple(copies), tuple(vectors))
    torch.testing.assert_close(changes[0], expected)
    for ours, theirs in zip(found[1], torch.autograd.grad(local(*copies).pow(2).sum(), copies), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(linear[0], torch.zeros_like(x))  # type: ignore[arg-type]


def test_products_with_inputs_on_every_worker(workers: Cluster) -> None:
    workers.run(0, _products)


def _wrong_vectors() -> None:
    x = torch.ones(4, requires_grad=True)
    reference = rpc.remote("worker1", torch.ones, args=(4,), kwargs={"requires_grad": True})
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", _times_local, args=(_cube(x), reference)).sum()
        # Shapes that torch could broadcast: the product would be that with another vector.
        for vector in (torch.ones(2, 4), torch.ones(1), torch.ones(())):
            for item in (x, reference):
                with pytest.raises(UsageError, match=r"A vector has the shape \(.*\), and its input has \(4,\)"):
                    autograd.hvp(context_id, loss, item, vector)
                with pytest.raises(UsageError, match=r"A vector has the shape \(.*\), and its input has \(4,\)"):
                    autograd.jvp(context_id, loss, item, vector)
        with pytest.raises(UsageError, match=r"A vector has the shape \(3,\)"):
            autograd.hvp(context_id, loss, x, rpc.remote("worker1", torch.ones, args=(3,)))
        with pytest.raises(TypeError, match="and not int"):
            autograd.hvp(context_id, loss, [x], [2])  # type: ignore[list-item]
        (product,) = autograd.hvp(context_id, loss, x, torch.full((4,), 2.0))
        torch.testing.assert_close(product, torch.full((4,), 12.0))


def _times_local(x: Tensor, other: rpc.RRef[Tensor]) -> Tensor:
    return x * other.local_value()


def test_vectors_of_another_shape_are_refused(workers: Cluster) -> None:
    workers.run(0, _wrong_vectors)


# Transforms of torch's


def _squares(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: (row * row).sum())(x)


def _transformed() -> None:
    x = torch.arange(6.0).reshape(2, 3)

    def called(row: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", _cube, args=(row,)).sum()

    with pytest.raises(UsageError, match="torch.func \\(vmap\\).*farprop.autograd.grad, hvp and jvp"):
        torch.vmap(called)(x)
    with pytest.raises(UsageError, match="torch.func \\(grad\\)"):
        torch.func.grad(called)(x)
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(UsageError, match="forward mode.*farprop.autograd"):
            called(torch.autograd.forward_ad.make_dual(x, x))
        assert called(x) == _cube(x).sum()  # it has no tangent
    assert torch.equal(rpc.rpc_sync("worker1", _squares, args=(x,)), _squares(x))


def test_transforms_around_a_call_say_what_is_possible(workers: Cluster) -> None:
    workers.run(0, _transformed)


# Memory

_noted: list[weakref.ref[_Mark]] = []


class _Mark:
    """Lives as long as a node."""


class _Marked(torch.autograd.Function):
    """Does nothing. Its node has a mark."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark = _Mark()
        _noted.append(weakref.ref(ctx.mark))
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Marked.apply(gradient)  # type: ignore[no-any-return,no-untyped-call]


def _saving(x: Tensor) -> Tensor:
    gc.disable()
    return _Marked.apply(x * x)  # type: ignore[no-any-return,no-untyped-call]


def _all_are_freed() -> int:
    """Wait until what was noted here is gone; returns how many there were."""
    try:
        wait_until(lambda: all(noted() is None for noted in _noted))
        return len(_noted)
    finally:
        gc.enable()
        _noted.clear()


def _record_a_cycle() -> None:
    """A graph that goes back and forth between two workers, in the forward pass and in three derivatives."""
    a = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = _saving(rpc.rpc_sync("worker1", _saving, args=(_saving(a),))).sum()
        for _ in range(2):
            autograd.backward(context_id, [loss], create_graph=True)
            loss = autograd.get_gradients(context_id)[a].sum()
        autograd.grad(context_id, loss, a, create_graph=True)
        del loss


def test_what_recorded_passes_saved_is_freed_with_the_context(workers: Cluster) -> None:
    workers.run(0, _record_a_cycle)
    for rank in range(2):
        assert workers.run(rank, _all_are_freed) >= 3


# Failures of workers, and other kinds of jobs


def _dies_in_the_second_pass() -> None:
    a = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", _cube, args=(a,))
        z = rpc.rpc_sync("worker2", _deadly, args=(y,))
        (first,) = autograd.grad(context_id, z.pow(2).sum(), a, create_graph=True)
        with pytest.raises(ConnectionLostError):
            autograd.grad(context_id, first.sum(), a)
        y = rpc.rpc_sync("worker1", _cube, args=(a,))
        assert torch.equal(autograd.grad(context_id, y.sum(), a)[0], torch.full((2,), 3.0))


class _Deadly(torch.autograd.Function):
    """Differentiable once. The second time it ends the process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return g.AtGate.apply(gradient * 2, "death")  # type: ignore[no-any-return,no-untyped-call]


def _deadly(x: Tensor) -> Tensor:
    return _Deadly.apply(x * x)  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.one_transport
def test_a_worker_that_dies_in_a_pass_through_a_recorded_one() -> None:
    with cluster(3, check=False) as job:
        job.run(0, _dies_in_the_second_pass)
        job.wait(2)
