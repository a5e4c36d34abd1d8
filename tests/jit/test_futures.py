"""Futures that cross between Python and compiled code."""

# TorchScript reads these annotations. They must not be strings.
# ruff: noqa: UP006, UP035

from typing import List

import pytest
import torch
from torch import Tensor
from torch.futures import Future

import farprop.rpc as rpc
from tests.jit import functions as f
from tests.support.workers import Cluster


@torch.jit.script
def _plus_one(future: Future[Tensor]) -> Tensor:
    return future.wait() + 1


@torch.jit.script
def _start(to: str, x: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(to, f.add, (x, x))


@torch.jit.script
def _start_to_fail(to: str) -> Future[Tensor]:
    return rpc.rpc_async(to, f.failing, ("a reason",))


@torch.jit.ignore
def _start_in_python(x: Tensor) -> Future[Tensor]:
    return rpc.rpc_async("worker1", torch.add, args=(x, x))


@torch.jit.script
def _wait_for_python(x: Tensor) -> Tensor:
    return _start_in_python(x).wait() + 1


@torch.jit.script
def _wait_for_others(to: str, x: Tensor) -> Tensor:
    started = _start(to, x)
    many: List[Future[Tensor]] = [started, _start(to, x)]
    found = _plus_one(started)
    for future in many:
        found = found + future.wait()
    return found


def _both_ways() -> None:
    x = torch.ones(())
    assert _plus_one(rpc.rpc_async("worker1", f.add, args=(x, x))).item() == 3.0
    assert _plus_one(_start("worker1", x)).item() == 3.0
    assert _start("worker1", x).then(lambda done: done.value() * 5).wait().item() == 10.0
    assert _wait_for_python(x).item() == 3.0
    assert _wait_for_others("worker1", x).item() == 7.0
    done = Future()
    done.set_result(x)
    assert _plus_one(done).item() == 2.0


def test_values_of_futures_cross_between_python_and_compiled_code(workers: Cluster) -> None:
    workers.run(0, _both_ways)


def _errors() -> None:
    with pytest.raises(RuntimeError, match="a reason"):
        _plus_one(rpc.rpc_async("worker1", f.failing, args=("a reason",)))
    with pytest.raises(RuntimeError, match="a reason"):
        _plus_one(_start_to_fail("worker1"))
    with pytest.raises(RuntimeError, match="a reason"):
        _start_to_fail("worker1").wait()
    seen = []
    _start_to_fail("worker1").then(lambda done: seen.append(_raises(done))).wait()
    assert seen == [True]


def _raises(future: Future[Tensor]) -> bool:
    try:
        future.value()
    except RuntimeError:
        return True
    return False


def test_errors_of_futures_cross_between_python_and_compiled_code(workers: Cluster) -> None:
    workers.run(0, _errors)
