"""Calls that compiled code makes."""

# TorchScript reads these annotations.
# ruff: noqa: UP006, UP035

from __future__ import annotations

import io
from typing import Any, Dict, List, Tuple

import pytest
import torch
from torch import Tensor

import farprop
import farprop.rpc as rpc
from farprop.errors import UsageError
from farprop.rpc import rpc_async
from tests.jit import functions as f
from tests.support.workers import Cluster, run_workers


def _every_way() -> None:
    @torch.jit.script
    def every_way(to: str, x: Tensor) -> List[Tensor]:
        later = rpc.rpc_async(to, f.add, (x, x))
        found = [rpc.rpc_sync(to, f.add, (x, x)), rpc_async(to, f.add, args=(x, x)).wait()]
        found.append(farprop.rpc.rpc_sync(timeout=30, to=to, func=f.add, args=(x, x)))
        found.append(rpc.remote(to, f.add, (x, x)).to_here())
        several = [rpc.rpc_async(to, f.add, (x, x), timeout=30.0) for _ in range(3)]
        for one in several:
            found.append(one.wait())
        found.append(later.wait())
        found.append(torch.jit._wait(later))
        return found

    for to in ("worker1", "worker0"):
        found = every_way(to, torch.ones(2))
        assert len(found) == 9
        assert all(torch.equal(one, torch.full((2,), 2.0)) for one in found)


def test_every_way_to_call(workers: Cluster) -> None:
    workers.run(0, _every_way)


def _arguments() -> None:
    @torch.jit.script
    def arguments(to: str, x: Tensor) -> List[Tuple[Tensor, str]]:
        kwargs: Dict[str, Any] = {"name": "y", "factor": 4.0}
        return [
            rpc.rpc_sync(to, f.scaled, (x,)),
            rpc.rpc_sync(to, f.scaled, (x, 3.0)),
            rpc.rpc_sync(to, f.scaled, (x,), kwargs),
            rpc.rpc_async(to, f.scaled, args=(x, 5.0), kwargs={"name": "z"}).wait(),
        ]

    found = [(value.item(), name) for value, name in arguments("worker1", torch.ones(()))]
    assert found == [(2.0, "x!"), (3.0, "x!"), (4.0, "y!"), (5.0, "z!")]


def test_arguments_by_position_and_by_name(workers: Cluster) -> None:
    workers.run(0, _arguments)


def _types() -> None:
    @torch.jit.script
    def types(to: str) -> Tuple[bool, int, int]:
        absent = rpc.rpc_sync(to, f.lists, (-1,))
        empty = rpc.rpc_async(to, f.lists, (0,)).wait()
        future = rpc.rpc_async(to, f.lists, (3,))
        full = future.wait()
        rpc.rpc_sync(to, f.nothing)
        assert empty is not None
        assert full is not None
        empty["new"] = [torch.ones(1)]
        return absent is None, len(empty), full["2"][0].numel()

    assert types("worker1") == (True, 1, 2)


def test_results_have_the_types_of_the_function(workers: Cluster) -> None:
    workers.run(0, _types)


def _objects() -> None:
    @torch.jit.script
    def objects(to: str, x: Tensor) -> Tuple[Tensor, f.Point, f.Pair]:
        pair = rpc.rpc_sync(to, f.grown, (f.Pair(x, 3),))
        point = rpc.rpc_sync(to, f.moved, (f.Point(x, 1),))
        return pair.total(), point, pair

    value, point, pair = objects("worker1", torch.ones(()))
    assert (value.item(), point.x.item(), point.y, pair.right) == (6.0, 2.0, 2, 4)
    came = rpc.rpc_sync("worker1", f.grown, args=(pair,))
    assert (came.left.item(), came.right, came.total().item()) == (4.0, 5, 9.0)


def test_script_classes_and_named_tuples_as_arguments(workers: Cluster) -> None:
    workers.run(0, _objects)


class _Calling(torch.nn.Module):
    def __init__(self, to: str) -> None:
        super().__init__()
        self.to_worker = to
        self.weight = torch.nn.Parameter(torch.full((2,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.helped(x) + rpc.rpc_sync(self.to_worker, f.add, (x, self.weight))

    def helped(self, x: Tensor) -> Tensor:
        future = rpc.rpc_async(self.to_worker, f.add, (x, self.weight))
        return _plain(self.to_worker, future.wait())


def _plain(to: str, x: Tensor) -> Tensor:
    """Compiled because a compiled method calls it."""
    return rpc.rpc_sync(to, f.add, (x, x))


@torch.jit.script
class _Caller:
    def __init__(self, to: str):
        self.to = to

    def call(self, x: Tensor) -> Tensor:
        future = rpc.rpc_async(self.to, f.add, (x, x))
        return future.wait() + 1


def _methods() -> None:
    module = torch.jit.script(_Calling("worker1"))
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 12.0))

    @torch.jit.script
    def with_class(x: Tensor) -> Tensor:
        return _Caller("worker1").call(x)

    assert torch.equal(with_class(torch.ones(2)), torch.full((2,), 3.0))


def test_methods_of_modules_and_classes_call(workers: Cluster) -> None:
    workers.run(0, _methods)


def _own_names() -> None:
    @torch.jit.script
    def own_names(rpc: Tensor, remote: Tensor) -> Tensor:
        rpc_async = rpc + remote
        return rpc_async

    assert own_names(torch.ones(()), torch.ones(())).item() == 2.0

    @torch.jit.script
    def no_calls(x: Tensor) -> Tensor:
        future = torch.jit._fork(_doubled, x)
        return future.wait() + 1

    assert no_calls(torch.ones(())).item() == 3.0

    module = torch.jit.script(_Forking())
    assert module(torch.ones(())).item() == 6.0
    torch.jit.save(module, io.BytesIO())


class _Forking(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        many = [torch.jit.fork(_doubled, x) for _ in range(3)]
        found = torch.zeros_like(x)
        for one in many:
            found = found + torch.jit.wait(one)
        return found


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def test_code_without_calls_is_compiled_as_before(workers: Cluster) -> None:
    workers.run(0, _own_names)


def _errors() -> None:
    @torch.jit.script
    def fail(to: str, message: str, timeout: float) -> Tensor:
        return rpc.rpc_sync(to, f.failing, (message,), timeout=timeout)

    @torch.jit.script
    def fail_later(to: str, message: str) -> Tensor:
        future = rpc.rpc_async(to, f.failing, (message,))
        return future.wait()

    @torch.jit.script
    def start_to_fail(to: str, message: str) -> torch.futures.Future[Tensor]:
        return rpc.rpc_async(to, f.failing, (message,))

    with pytest.raises(RuntimeError, match="a reason"):
        fail("worker1", "a reason", 30.0)
    with pytest.raises(RuntimeError, match="a reason"):
        fail_later("worker1", "a reason")
    started = start_to_fail("worker1", "a reason")
    with pytest.raises(RuntimeError, match="a reason"):
        started.wait()
    with pytest.raises(RuntimeError, match="no worker.*nobody|nobody"):
        fail("nobody", "a reason", 30.0)
    with pytest.raises(RuntimeError, match="timeout"):
        fail("worker1", "a reason", -3.0)


def test_compiled_code_raises_the_errors_of_calls(workers: Cluster) -> None:
    workers.run(0, _errors)


def _refusals() -> None:
    @torch.jit.script
    def local(x: Tensor) -> Tensor:
        return x

    def call_operator(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", torch.neg, (x,))

    def call_variable(x: Tensor) -> Tensor:
        chosen = x
        return rpc.rpc_sync("worker1", chosen, (x,))

    def too_many(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", f.add, (x, x, x))

    def too_few(x: Tensor) -> Tensor:
        args = (x,)
        return rpc.rpc_async("worker1", f.add, args).wait()

    def starred(x: Tensor) -> Tensor:
        call = ("worker1", f.add, (x, x))
        return rpc.rpc_sync(*call)

    def misspelt(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", f.add, argz=(x, x))

    def retried(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", f.add, (x, x), retry=rpc.Retry(3))

    for function, message in (
        (call_operator, "torch.neg.*not the name of a script function"),
        (call_variable, "chosen.*not the name of a script function"),
        (too_many, "at most 2 arguments but found 3 positional(.|\n)*test_calls.py"),
        (too_few, "Argument b not provided(.|\n)*test_calls.py"),
        (starred, r"arguments with \*"),
        (misspelt, "argz"),
        (retried, "compiled code can't pass 'retry'"),
    ):
        with pytest.raises(UsageError, match=message):
            torch.jit.script(function)

    @torch.jit.script
    def call_local(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", local, (x,))

    @torch.jit.script
    def call_uncompiled(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", f.uncompiled_neg, (x,))

    with pytest.raises(RuntimeError, match=r"undefined function local.*@torch\.jit\.script"):
        call_local(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"undefined function uncompiled_neg.*@torch\.jit\.script"):
        call_uncompiled(torch.ones(1))


def test_functions_that_cannot_be_called_raise(workers: Cluster) -> None:
    workers.run(0, _refusals)


def _before_init(rank: int) -> None:
    @torch.jit.script
    def call(x: Tensor) -> Tensor:
        return rpc.rpc_sync("worker1", f.add, (x, x))

    with pytest.raises(RuntimeError, match=r"Call farprop\.rpc\.init_rpc first"):
        call(torch.ones(1))


def test_a_call_before_init_rpc_raises() -> None:
    run_workers(_before_init, 1)


def _asynchronous_execution() -> None:
    @torch.jit.script
    def call(x: Tensor) -> Tensor:
        future = rpc.rpc_async("worker1", f.add_elsewhere, ("worker2", x, x))
        return future.wait() + rpc.rpc_sync("worker1", f.add_elsewhere, ("worker2", x, x))

    assert call(torch.ones(())).item() == 4.0
    assert rpc.rpc_sync("worker1", f.add_elsewhere, args=("worker2", torch.ones(()), torch.ones(()))).item() == 2.0


def test_async_execution_of_a_script_function(workers: Cluster) -> None:
    workers.run(0, _asynchronous_execution)
