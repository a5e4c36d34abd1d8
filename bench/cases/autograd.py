"""Distributed autograd."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from bench.cases import Api, Sample, case


def _hops_alone(count: int) -> Callable[[], Sample]:
    def prepare() -> Sample:
        a, b = torch.rand(3, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)

        def iterate() -> None:
            x = a
            for _ in range(count):
                x = torch.add(x, b)
            x.sum().backward()

        return iterate

    return prepare


@case(
    "backward-1",
    "forward and backward, 1 hop",
    goal=3.5,
    samples=200,
    warmup=20,
    floor="unix",
    alone=_hops_alone(1),
    round_trips=2,
)
def one_hop(api: Api, peer: str) -> Sample:
    return _hops(api, peer, 1)


@case(
    "backward-8",
    "forward and backward, 8 hops",
    goal=3.5,
    samples=60,
    warmup=10,
    floor="unix",
    alone=_hops_alone(8),
    round_trips=16,
)
def eight_hops(api: Api, peer: str) -> Sample:
    return _hops(api, peer, 8)


def _hops(api: Api, peer: str, count: int) -> Sample:
    call, autograd = api.rpc.rpc_sync, api.autograd
    a, b = torch.rand(3, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)

    def iterate() -> dict[torch.Tensor, torch.Tensor]:
        with autograd.context() as context:
            x = a
            for _ in range(count):
                x = call(peer, torch.add, args=(x, b))
            autograd.backward(context, [x.sum()])
            return autograd.get_gradients(context)

    gradients = iterate()
    if not torch.equal(gradients[a], torch.ones(3, 3)) or not torch.equal(gradients[b], torch.full((3, 3), count)):
        raise AssertionError(f"{api.package} gave wrong gradients")
    return iterate


def _backward_alone() -> Sample:
    a, b = torch.rand(3, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)
    loss = torch.add(a, b).sum()
    return lambda: loss.backward(retain_graph=True)


@case(
    "backward-alone",
    "backward alone, 1 hop, retain_graph",
    goal=3.5,
    samples=300,
    warmup=20,
    floor="unix",
    alone=_backward_alone,
)
def backward_alone(api: Api, peer: str) -> Sample:
    autograd = api.autograd
    a, b = torch.rand(3, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)
    made: list[tuple[int, torch.Tensor]] = []

    def forward() -> None:
        made.append(
            (autograd._new_context()._context_id(), api.rpc.rpc_sync(peer, torch.add, args=(a, b)).sum()),
        )

    # On its own thread: a context stays current for the thread until it ends, and the other cases need none.
    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    ((context, loss),) = made
    autograd.backward(context, [loss], retain_graph=True)
    if not torch.equal(autograd.get_gradients(context)[a], torch.ones(3, 3)):
        raise AssertionError(f"{api.package} gave wrong gradients")
    return lambda: autograd.backward(context, [loss], retain_graph=True)
