"""Calls from functions that ``torch.compile`` has compiled."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

import farprop.autograd as autograd
import farprop.jit
import farprop.rpc as rpc
from farprop.errors import UsageError
from tests.jit import models as m
from tests.support.workers import Cluster, cluster

# The compiler.
IMPORTED_IN_WORKERS = ("torch._dynamo",)

_needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++, which is not here")
_BACKENDS = ["eager", pytest.param("inductor", marks=[_needs_compiler, pytest.mark.timeout(400)])]


def _losses(backend: str) -> None:
    from torch._dynamo.utils import counters

    model: m.Ends = m.Calling()
    wanted = m.losses(model, model)
    model = m.Calling()
    found = m.losses(model, torch.compile(model, backend=backend))
    assert found == pytest.approx(wanted, rel=1e-4)
    # One graph break, and nothing of farprop's in a graph.
    assert sum(counters["graph_break"].values()) == 1
    assert counters["stats"]["unique_graphs"] == 2
    model = m.Operating()
    found = m.losses(model, torch.compile(model, backend=backend, fullgraph=True))
    assert found == pytest.approx(wanted, rel=1e-4)
    assert counters["stats"]["unique_graphs"] == 3
    model = m.Operating()
    assert m.losses(model, model) == pytest.approx(wanted, rel=1e-4)


# Torch's compiler leaves processes and threads running.
@pytest.mark.parametrize("backend", _BACKENDS)
def test_a_compiled_split_model_trains_like_an_uncompiled_one(backend: str, tmp_path: object) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with cluster(2, env, timeout=300, check=False) as job:
        job.run(0, _losses, backend)


def _gradients() -> None:
    """No argument of the first call requires grad; the second calls another worker; the third's result is unused."""
    for worker in ("worker1", "worker2"):
        rpc.rpc_sync(worker, m.reset)
    x = torch.rand(3, 8, generator=torch.Generator().manual_seed(3))
    scale = torch.rand(8, generator=torch.Generator().manual_seed(4)).requires_grad_()

    def calling(x: Tensor) -> Tensor:
        h = rpc.rpc_sync("worker1", m.middle, args=(x,)) * scale
        h = h + rpc.rpc_sync("worker1", m.middle_further_on, args=(h,))
        rpc.rpc_sync("worker2", m.middle, args=(h,))
        return h.sum()

    def operating(x: Tensor) -> Tensor:
        h = m.operator_of_middle("worker1", x) * scale
        h = h + m.operator_further_on("worker1", h)
        m.operator_of_middle("worker2", h)
        return h.sum()

    wanted = _gradients_of(calling, x, scale)
    assert all(gradient.abs().sum() > 0 for gradient in wanted)
    for function in (operating, torch.compile(operating, backend="aot_eager", fullgraph=True)):
        for ours, theirs in zip(_gradients_of(function, x, scale), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


def _gradients_of(function: object, x: Tensor, scale: Tensor) -> list[Tensor]:
    with autograd.context() as context_id:
        loss = function(x)  # type: ignore[operator]
        autograd.backward(context_id, [loss], retain_graph=True)
        autograd.backward(context_id, [loss])
        own = autograd.get_gradients(context_id)
        assert set(own) == {scale}
        others = [rpc.rpc_sync(worker, _gradients_here, args=(context_id,)) for worker in ("worker1", "worker2")]
        return [own[scale], *others[0], *others[1]]


def _gradients_here(context_id: int) -> list[Tensor]:
    gradients = autograd.get_gradients(context_id)
    return [gradients[parameter] for parameter in m._middle.parameters()]


def test_operators_have_the_gradients_of_calls() -> None:
    with cluster(3, check=False) as job:
        job.run(0, _gradients)


def _misused() -> None:
    x = torch.rand(3, 8, requires_grad=True)
    outside = m.operator_of_middle("worker1", x).sum()
    with pytest.raises(UsageError, match=r"outside a context(.|\n)*farprop\.autograd\.context\(\)"):
        outside.backward()
    with autograd.context(), pytest.raises(UsageError, match=r"farprop\.autograd\.backward\(context_id"):
        m.operator_of_middle("worker1", x).sum().backward()
    with autograd.context(), torch.no_grad():
        assert not m.operator_of_middle("worker1", x).requires_grad
        assert not autograd._current_context()._send_functions()
    with pytest.raises(UsageError, match="Define it at the top level of a module"):
        farprop.jit.operator(lambda x: x, torch.empty_like)
    with pytest.raises(UsageError, match="_a_number returned a int on worker1"):
        _number("worker1", x)
    with pytest.raises(ValueError, match="on purpose"):
        _fails("worker1", x)


def _a_number(x: Tensor) -> Tensor:
    return 3  # type: ignore[return-value]


def _failing(x: Tensor) -> Tensor:
    raise ValueError("on purpose")


_number = farprop.jit.operator(_a_number, torch.empty_like)
_fails = farprop.jit.operator(_failing, torch.empty_like)


def test_misused_operators_raise(workers: Cluster) -> None:
    workers.run(0, _misused)


def _kept() -> int:
    from farprop.jit.operators import _calls

    return sum(map(len, _calls.values()))


def _graph_ends_with_context() -> None:
    x = torch.rand(3, 8, requires_grad=True)
    before = _kept()
    with autograd.context() as context_id:
        autograd.backward(context_id, [m.operator_of_middle("worker1", x).sum()])
        assert _kept() == before + 1
    assert _kept() == before


def test_the_graphs_of_operators_end_with_their_context(workers: Cluster) -> None:
    workers.run(0, _graph_ends_with_context)


def _call_blocking_functions() -> None:
    """Calls the other functions that block on workers."""
    from torch._dynamo.utils import counters

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        rref = rpc.remote("worker1", torch.add, args=(x, 1))
        future = rpc.rpc_async("worker1", torch.neg, args=(x,))
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.sum, args=(x,))])
            gradient = autograd.get_gradients(context_id)[x]
        return rref.to_here() + future.wait() + rref.rpc_sync().mul(2) + gradient

    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        assert torch.equal(compiled(x), torch.full((2,), 6.0))
    assert counters["stats"]["unique_graphs"] < 8


def test_blocking_functions_are_not_compiled() -> None:
    with cluster(2, check=False) as job:
        job.run(0, _call_blocking_functions)
