"""Anomaly mode across workers: the error shows which line of the forward pass made the node that fails."""

from __future__ import annotations

import pytest
import torch

import farprop.autograd as autograd
import farprop.rpc as rpc
from farprop.errors import BackwardError
from tests.autograd import functions as g
from tests.support.workers import Cluster


def _makes_nan(x: torch.Tensor) -> torch.Tensor:
    return (torch.sqrt(x - x) * 0).sum()  # the line to be found


def _call_makes_nan(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", _makes_nan, args=(x,))  # type: ignore[no-any-return]


def _find_nan(detect: bool) -> str:
    a = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        if not detect:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", _call_makes_nan, args=(a,))])
            assert autograd.get_gradients(context_id)[a].isnan().all()
            return ""
        with autograd.detect_anomaly(), pytest.raises(BackwardError, match="Error on Node 2: .*nan") as raised:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", _call_makes_nan, args=(a,))])
    return "\n".join(raised.value.__notes__)


def test_the_error_shows_the_line_that_makes_nan_and_the_calls_to_it(workers: Cluster) -> None:
    text = workers.run(0, _find_nan, True)
    assert "SqrtBackward0, which is of this line of the forward pass on worker 2" in text
    assert "# the line to be found" in text
    assert text.index("called from worker 0") < text.index("called from worker 1")
    assert "args=(x,))  # type: ignore[no-any-return]" in text
    assert "/farprop/runtime/" not in text.partition("Raised on")[0]


def test_nan_is_no_error_without_anomaly_mode(workers: Cluster) -> None:
    workers.run(0, _find_nan, False)
    assert not any(workers.run(rank, torch.is_anomaly_enabled) for rank in range(3))


def _local_error() -> str:
    g.set_error("mine")
    a = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id, autograd.detect_anomaly(), pytest.raises(ValueError, match="mine") as raised:
        autograd.backward(context_id, [g.Raising.apply(a).sum()])  # type: ignore[no-untyped-call]
    return "\n".join(raised.value.__notes__)


def test_an_error_in_the_local_graph_names_its_node(workers: Cluster) -> None:
    assert "It happened in RaisingBackward, which is of this line" in workers.run(0, _local_error)
