"""The straight way of a pass: two workers in one process, with a network that is a function call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farprop.protocol.passes import PassId
from farprop.runtime.gradients.contexts import Context, take_head
from farprop.runtime.gradients.local import LocalPass
from farprop.runtime.gradients.performing import Performer
from farprop.runtime.gradients.post import answer
from farprop.runtime.gradients.roots import backward_from
from farprop.runtime.gradients.space import GradientSpace
from farprop.wire.codec import decode_call, encode_call
from farprop.wire.dialect import PICKLES
from farprop.wire.frames import ANSWER, Frame


class Network:
    """One end of it."""

    rpc_timeout = 60.0
    dialect = PICKLES

    def __init__(self) -> None:
        self.other: GradientSpace
        self.messages: list[str] = []
        self.cleaned: list[int] = []

    def blocked(self) -> Any:
        raise AssertionError("nothing has to wait here")

    def call_own(self, rank: int, name: bytes, encoded: Any, timeout: float, system: bool) -> Frame:
        method = name.decode().rpartition(":")[2]
        self.messages.append(method)
        args, _ = decode_call(encoded.meta, encoded.buffers, encoded.flags)
        if method == "propagate":
            made = self.other.propagate(args[0], args[1], tuple(args[2:]))
        else:
            assert method == "abort", method
            made = answer(PICKLES, [])
        return Frame(ANSWER, made.flags, 1, 0.0, b"", made.meta, tuple(made.buffers), [])

    def clean_up(self, rank: int, context_id: int) -> None:
        self.cleaned.append(rank)


class _Message:
    def __init__(self, meta: Any) -> None:
        self.meta = meta


def _carry(made: Any, sender: int, to: GradientSpace) -> tuple[Context, Any]:
    frame = _Message(made.meta)
    head = take_head(frame)
    context = to.contexts.meet(head.context_id)
    assert context is not None
    return context, context.receive(sender, head, decode_call, frame.meta, made.buffers, made.flags)[0]


class Two:
    """Worker 0 calls worker 1."""

    def __init__(self) -> None:
        self.networks = Network(), Network()
        self.here, self.there = (GradientSpace(rank, network) for rank, network in enumerate(self.networks))
        self.networks[0].other, self.networks[1].other = self.there, self.here
        self.context = self.here.contexts.new()

    def call(self, function: Any, *tensors: torch.Tensor) -> torch.Tensor:
        made = self.context.send(1, lambda graph: encode_call(None, tensors, {}, graph))
        there, args = _carry(made, 0, self.there)
        result = function(*args)
        made = there.send(0, lambda graph: encode_call(None, (result,), {}, graph))
        return _carry(made, 1, self.here)[1][0]  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        settings = {"retain_graph": False, "fast": False, "timeout": 60.0, **options}
        backward_from(self.here, self.context.id, [loss], **settings)


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The actions that the long way took."""
    names: list[str] = []
    perform = Performer.perform

    def noting(self: Performer, local: LocalPass, actions: list[Any], *args: Any, **kwargs: Any) -> Any:
        names.extend(type(action).__name__ for action in actions)
        return perform(self, local, actions, *args, **kwargs)

    monkeypatch.setattr(Performer, "perform", noting)
    return names


def test_a_chain_of_calls_needs_no_machine(performed: list[str]) -> None:
    two = Two()
    a, b = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    x = a
    for _ in range(3):
        x = two.call(torch.mul, x, b)
    two.backward(x.sum())
    assert performed == ["Ended"]
    assert two.networks[0].messages == ["propagate"] * 3
    expected = torch.autograd.grad((a * b * b * b).sum(), (a, b))
    torch.testing.assert_close(two.context.gradients[a], expected[0])
    torch.testing.assert_close(two.context.gradients[b], expected[1])


def test_what_is_shared_takes_the_long_way_with_the_same_result(performed: list[str]) -> None:
    two = Two()
    a = torch.rand(3, requires_grad=True)
    shared = a * 2
    loss = (two.call(torch.sin, shared) + shared).sum()
    two.backward(loss)
    assert "Run" in performed
    x = a * 2
    torch.testing.assert_close(two.context.gradients[a], *torch.autograd.grad((torch.sin(x) + x).sum(), a))


def test_a_leaf_with_a_hook_gets_all_of_its_gradient_at_once(performed: list[str]) -> None:
    two = Two()
    a = torch.rand(3, requires_grad=True)
    seen: list[list[float]] = []
    a.register_hook(lambda gradient: seen.append(gradient.tolist()))
    two.backward((two.call(torch.neg, a) + a * 3).sum())
    assert seen == [[2.0, 2.0, 2.0]]
    assert "Run" in performed


def test_two_calls_side_by_side_leave_the_straight_way_at_the_fork(performed: list[str]) -> None:
    two = Two()
    a, b = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    sends: list[str] = []
    two.networks[0].send_own = lambda rank, name, encoded, call, system: sends.append(  # type: ignore[attr-defined]
        call.finish(two.networks[0].call_own(rank, name, encoded, 60.0, system), None)
    )
    two.backward((two.call(torch.neg, a) * two.call(torch.sin, b)).sum())
    assert performed.count("Send") == 2
    assert len(sends) == 2
    expected = torch.autograd.grad((torch.neg(a) * torch.sin(b)).sum(), (a, b))
    torch.testing.assert_close(two.context.gradients[a], expected[0])
    torch.testing.assert_close(two.context.gradients[b], expected[1])


def test_a_fast_pass_and_a_watched_one_go_the_long_way(performed: list[str]) -> None:
    two = Two()
    a = torch.rand(3, requires_grad=True)
    loss = two.call(torch.neg, a).sum()
    two.backward(loss, retain_graph=True, fast=True)
    assert "Run" in performed
    performed.clear()
    with torch.autograd.profiler.profile():
        two.backward(loss, retain_graph=True)
    assert "Run" in performed
    performed.clear()
    two.backward(loss)
    assert performed == ["Ended"]
    assert two.context.gradients[a].tolist() == [-3.0] * 3


def test_gradients_that_come_twice_are_refused() -> None:
    two = Two()
    a = torch.rand(3, requires_grad=True)
    two.backward(two.call(torch.neg, a).sum(), retain_graph=True)
    there = two.there.contexts.find(two.context.id)
    (pair,) = there.sends
    local = there.passes[PassId(0, 1)]
    assert local.straight(pair) is None


def test_an_error_on_the_straight_way_undoes_the_pass() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("this backward always fails")

    two = Two()
    a, b = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    inner = two.call(Fails.apply, a)
    loss = (two.call(torch.add, inner, b)).sum()
    with pytest.raises(RuntimeError, match="Error on Node 1: this backward always fails"):
        two.backward(loss)
    assert two.context.gradients == {}


def test_clean_up_does_not_go_back_to_whoever_sent_it() -> None:
    two = Two()
    two.call(torch.neg, torch.rand(3, requires_grad=True))
    two.here.release(two.context.id)
    assert two.networks[0].cleaned == [1]
    two.there.contexts.find(two.context.id).known.add(2)
    two.there.release(two.context.id, told_by=0)
    assert two.networks[1].cleaned == [2]
    two.there.release(two.context.id, told_by=0)  # again
    assert two.networks[1].cleaned == [2]
