"""The fast path of a backward pass, where nothing is shared: two workers in one process, with a simulated network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farprop.protocol.backward import PassId
from farprop.runtime.autograd import engine
from farprop.runtime.autograd.context_cleanup import ContextCleanup
from farprop.runtime.autograd.contexts import Context
from farprop.runtime.autograd.driver import _BUNDLE_BYTES, BackwardDriver
from farprop.runtime.autograd.engine import LocalPass
from farprop.wire.dialect import PICKLES
from farprop.wire.fast_codec import decode_call, encode_call, encode_value
from farprop.wire.message import ANSWER, Message, Method


def _arrived(buffers: list[Any]) -> list[Any]:
    """The buffers of a message at its receiver."""
    return [memoryview(bytearray(buffer)) for buffer in buffers]


class Network:
    """One worker of the simulated network."""

    label = "worker (rank 0)"
    rpc_timeout = 60.0
    dialect = PICKLES
    is_static = True

    def __init__(self) -> None:
        self.other: BackwardDriver
        self.messages: list[Method] = []
        self.cleaned: list[int] = []

    def blocked(self) -> Any:
        raise AssertionError("nothing has to wait here")

    def call_method(self, rank: int, method: Method, message: Message, timeout: float, system: bool) -> Message:
        self.messages.append(method)
        args, _ = decode_call(message.payload, _arrived(message.buffers), message.flags)
        if method is Method.GRADIENTS:
            answer = self.other.on_gradients(1 - rank, *args)
        else:
            assert method is Method.ABORT, method
            answer = encode_value([])
        answer.kind = ANSWER
        answer.buffers = _arrived(answer.buffers)
        return answer

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)

    def clean_up(self, rank: int, context_id: int) -> None:
        self.cleaned.append(rank)

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        pass  # the test sends what is to be sent


def _deliver(message: Message, sender: int, to: BackwardDriver) -> tuple[Context, Any]:
    head = message.autograd
    assert head is not None
    context = to.contexts.meet(head.context_id)
    assert context is not None
    received = context.receive(sender, head, (), decode_call, message.payload, message.buffers, message.flags)
    return context, received[0]


def _message(context: Context, to: int, tensors: tuple[torch.Tensor, ...]) -> Message:
    graph: list[torch.Tensor] = []
    message = encode_call(None, tensors, {}, graph)
    context.attach(message, to, graph)
    return message


class TwoWorkers:
    """Worker 0 calls worker 1."""

    def __init__(self) -> None:
        self.networks = Network(), Network()
        self.here, self.there = (BackwardDriver(rank, network) for rank, network in enumerate(self.networks))
        self.networks[0].other, self.networks[1].other = self.there, self.here
        self.cleanups = [
            ContextCleanup(driver.own_rank, network, driver.contexts, driver.aborter)  # type: ignore[arg-type]
            for driver, network in zip((self.here, self.there), self.networks, strict=True)
        ]
        self.context = self.here.contexts.new()

    def call(self, function: Any, *tensors: torch.Tensor) -> torch.Tensor:
        there, args = _deliver(_message(self.context, 1, tensors), 0, self.there)
        result = function(*args)
        return _deliver(_message(there, 0, (result,)), 1, self.here)[1][0]  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        settings = {"keep_graph": False, "fast": False, "timeout": 60.0, **options}
        self.here.backward(self.context.id, [loss], **settings)


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the actions that were performed without the fast path."""
    names: list[str] = []
    perform = BackwardDriver._perform

    def noting(self: BackwardDriver, local: LocalPass, actions: list[Any], *args: Any, **kwargs: Any) -> Any:
        names.extend(type(action).__name__ for action in actions)
        return perform(self, local, actions, *args, **kwargs)

    monkeypatch.setattr(BackwardDriver, "_perform", noting)
    return names


def test_chain_of_calls_does_not_use_the_state_machine(performed: list[str]) -> None:
    two = TwoWorkers()
    a, b = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    x = a
    for _ in range(3):
        x = two.call(torch.mul, x, b)
    two.backward(x.sum())
    assert performed == ["Ended"]
    assert two.networks[0].messages == [Method.GRADIENTS] * 3
    expected = torch.autograd.grad((a * b * b * b).sum(), (a, b))
    torch.testing.assert_close(two.context.gradients[a], expected[0])
    torch.testing.assert_close(two.context.gradients[b], expected[1])


def test_shared_nodes_use_the_state_machine(performed: list[str]) -> None:
    two = TwoWorkers()
    a = torch.rand(3, requires_grad=True)
    shared = a * 2
    loss = (two.call(torch.sin, shared) + shared).sum()
    two.backward(loss)
    assert "Run" in performed
    x = a * 2
    torch.testing.assert_close(two.context.gradients[a], *torch.autograd.grad((torch.sin(x) + x).sum(), a))


def test_hook_of_a_leaf_runs_once_with_the_whole_gradient(performed: list[str]) -> None:
    two = TwoWorkers()
    a = torch.rand(3, requires_grad=True)
    seen: list[list[float]] = []
    a.register_hook(lambda gradient: seen.append(gradient.tolist()))
    two.backward((two.call(torch.neg, a) + a * 3).sum())
    assert seen == [[2.0, 2.0, 2.0]]
    assert "Run" in performed


@pytest.fixture
def engine_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the number of roots of each run of the engine."""
    runs: list[int] = []
    run = engine._run_engine

    def noting(roots: Any, *args: Any) -> Any:
        runs.append(len(roots))
        return run(roots, *args)

    monkeypatch.setattr(engine, "_run_engine", noting)
    return runs


def test_parallel_calls_take_one_message_and_one_run_on_each_side(performed: list[str], engine_runs: list[int]) -> None:
    two = TwoWorkers()
    a, b = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    two.backward((two.call(torch.neg, a * 2) * two.call(torch.sin, b * 2)).sum())
    assert two.networks[0].messages == [Method.GRADIENTS]
    assert engine_runs == [1, 2, 2]  # the roots, then both calls there, then both arguments here
    assert "Run" not in performed
    expected = torch.autograd.grad((torch.neg(a * 2) * torch.sin(b * 2)).sum(), (a, b))
    torch.testing.assert_close(two.context.gradients[a], expected[0])
    torch.testing.assert_close(two.context.gradients[b], expected[1])


def test_parallel_calls_that_share_a_leaf_there_run_together() -> None:
    two = TwoWorkers()
    a, weight = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    x, y = two.call(lambda t: t * weight, a.sin()), two.call(lambda t: t + weight, a.cos())
    two.backward((x * y).sum())
    assert two.networks[0].messages == [Method.GRADIENTS]
    expected = torch.autograd.grad((a.sin() * weight * (a.cos() + weight)).sum(), (a, weight))
    torch.testing.assert_close(two.context.gradients[a], expected[0])
    torch.testing.assert_close(two.there.contexts.find(two.context.id).gradients[weight], expected[1])


def test_large_gradients_travel_alone() -> None:
    two = TwoWorkers()
    large = [torch.rand(_BUNDLE_BYTES // 4, requires_grad=True) for _ in range(3)]
    small = [torch.rand(3, requires_grad=True) for _ in range(3)]

    def send(rank: int, method: Method, message: Message, call: Any, system: bool) -> None:
        call.finish(two.networks[0].call_method(rank, method, message, 60.0, system), None)

    two.networks[0].send_method = send  # type: ignore[attr-defined]
    loss = torch.stack([two.call(torch.neg, leaf).sum() for leaf in (*large, *small)]).sum()
    two.backward(loss)
    assert len(two.networks[0].messages) == 4
    for leaf in (*large, *small):
        assert two.context.gradients[leaf].eq(-1.0).all()


class Pipeline:
    """Worker 0 has the loss, workers 1 and 2 a stage each. Messages arrive at once."""

    class Peers(Network):
        def __init__(self, pipeline: Pipeline, rank: int) -> None:
            super().__init__()
            self.pipeline = pipeline
            self.rank = rank

        def blocked(self) -> Any:
            return contextlib.nullcontext()

        def call_method(self, rank: int, method: Method, message: Message, timeout: float, system: bool) -> Message:
            self.pipeline.messages.append((self.rank, rank, method))
            args, _ = decode_call(message.payload, _arrived(message.buffers), message.flags)
            answer = encode_value(self.pipeline.drivers[rank].methods()[method](self.rank, *args))
            answer.kind = ANSWER
            return answer

        def send_method(self, rank: int, method: Method, message: Message, call: Any, system: bool) -> None:
            call.finish(self.call_method(rank, method, message, 60.0, system), None)

    def __init__(self) -> None:
        self.messages: list[tuple[int, int, Method]] = []
        self.drivers = [BackwardDriver(rank, self.Peers(self, rank)) for rank in range(3)]  # type: ignore[arg-type]
        self.context = self.drivers[0].contexts.new()

    def send(self, sender: int, to: int, tensor: torch.Tensor) -> torch.Tensor:
        context = self.drivers[sender].contexts.find(self.context.id)
        return _deliver(_message(context, to, (tensor,)), sender, self.drivers[to])[1][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("fast", [False, True])
def test_pipeline_takes_one_message_to_the_last_stage_and_one_with_credit(fast: bool) -> None:
    pipe = Pipeline()
    weights = [torch.rand(3, requires_grad=True) for _ in range(2)]
    pipe.drivers[1].contexts.meet(pipe.context.id)
    outputs = []
    for number in range(4):
        between = pipe.send(1, 2, weights[0] * number)
        outputs.append(pipe.send(2, 0, (between * weights[1]).sin()))
    pipe.drivers[0].backward(pipe.context.id, [torch.cat(outputs).sum()], False, fast, 60.0)
    gradients, credit = Method.GRADIENTS, Method.RETURN_CREDIT
    if not fast:
        assert pipe.messages == [(0, 2, gradients), *[(2, 1, gradients)] * 4, (1, 0, credit)]
    else:
        assert pipe.messages.count((0, 2, gradients)) == 1
    loss = torch.cat([(weights[0] * number * weights[1]).sin() for number in range(4)]).sum()
    for rank, expected in enumerate(torch.autograd.grad(loss, weights), 1):
        found = pipe.drivers[rank].contexts.find(pipe.context.id).gradients
        torch.testing.assert_close(found[weights[rank - 1]], expected)


def test_fast_mode_and_profiled_passes_use_the_state_machine(performed: list[str]) -> None:
    two = TwoWorkers()
    a = torch.rand(3, requires_grad=True)
    loss = two.call(torch.neg, a).sum()
    two.backward(loss, keep_graph=True, fast=True)
    assert "Run" in performed
    performed.clear()
    with torch.autograd.profiler.profile():
        two.backward(loss, keep_graph=True)
    assert "Run" in performed
    performed.clear()
    two.backward(loss)
    assert performed == ["Ended"]
    assert two.context.gradients[a].tolist() == [-3.0] * 3


def test_duplicate_gradients_are_refused() -> None:
    two = TwoWorkers()
    a = torch.rand(3, requires_grad=True)
    two.backward(two.call(torch.neg, a).sum(), keep_graph=True)
    there = two.there.contexts.find(two.context.id)
    (message_id,) = there.sends
    local = there.passes[PassId(0, 1)]
    assert local.start_unshared(message_id) is None


def test_error_on_the_fast_path_undoes_the_pass() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("this backward always fails")

    two = TwoWorkers()
    a, b = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    inner = two.call(Fails.apply, a)
    loss = (two.call(torch.add, inner, b)).sum()
    with pytest.raises(RuntimeError, match="Error on Node 1: this backward always fails"):
        two.backward(loss)
    assert two.context.gradients == {}


def test_clean_up_is_not_sent_back_to_its_sender() -> None:
    two = TwoWorkers()
    two.call(torch.neg, torch.rand(3, requires_grad=True))
    here, there = two.cleanups
    here.release(two.context.id)
    assert here.ended.for_request(1) == (two.context.id,)
    two.there.contexts.find(two.context.id).known.add(2)
    there.release(two.context.id, told_by=0)
    there.release(two.context.id, told_by=0)  # again
    assert there.ended.for_request(2) == (two.context.id,)
    assert there.ended.for_request(0) == ()
