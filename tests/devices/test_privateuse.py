"""``privateuseone``, torch's device for backends written in Python: one device, and a thread of the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import farprop.autograd as autograd
import farprop.rpc as rpc
from tests.devices import functions as fn
from tests.devices import standin
from tests.devices.jobs import init
from tests.support.workers import run_workers

NAME = "lent"
DEVICE = f"{NAME}:0"


def _make_device() -> Any:
    _setup_privateuseone_for_python_backend(NAME)
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("empty.memory_format", standin._empty, "PrivateUse1")
    kernels.impl("empty_strided", standin._empty_strided, "PrivateUse1")
    return kernels


def _worker(rank: int) -> None:
    kernels = _make_device()
    init(rank, 2, {"worker1": {DEVICE: DEVICE}} if rank == 0 else {})
    if rank == 0:
        _forth_and_back()
        _skip_connection()
    rpc.shutdown()
    del kernels


def _leaf() -> torch.Tensor:
    return torch.arange(3.0).to(DEVICE).requires_grad_()


def _forth_and_back() -> None:
    a = _leaf()
    with autograd.context() as context_id:
        out = rpc.rpc_sync("worker1", fn.double, (a,))
        assert str(out.device) == DEVICE
        autograd.backward(context_id, [out.sum()])
        gradient = autograd.get_gradients(context_id)[a]
        assert gradient.device == a.device
        assert gradient.cpu().tolist() == [2.0, 2.0, 2.0]


def _skip_connection() -> None:
    """The sent tensor is used here as well: its node waits for both gradients, so nodes are run one at a time."""
    a = _leaf()
    with autograd.context() as context_id:
        h = a * 3
        out = rpc.rpc_sync("worker1", fn.double, (h,)) + h * 5
        autograd.backward(context_id, [out.sum()])
        assert autograd.get_gradients(context_id)[a].cpu().tolist() == [21.0, 21.0, 21.0]


def test_gradients_on_the_privateuseone_device() -> None:
    run_workers(_worker, 2)
