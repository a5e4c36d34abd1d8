"""How fast calls to a worker are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

import farprop.rpc as rpc
from farprop.protocol.roster import Entry
from farprop.runtime.agent_registry import current_agent

BYTES = 10_000_000
_SECONDS = 20.0  # the timeout of each call
_CALLS, _WARM_UP, _TENSORS = 100, 5, 5
_ENOUGH = 0.5  # seconds that are spent on samples of one kind, if they are slow


@dataclass(frozen=True)
class Speed:
    """Of calls to one worker."""

    transport: str
    call: float  # the median of an empty call, in seconds
    call_p99: float
    rate: float  # bytes a second, of a tensor of 10 MB that is sent


@rpc.expose
def nothing() -> None:
    """What an empty call runs."""


@rpc.expose
def count(tensor: torch.Tensor) -> int:
    """What a call with a large tensor runs."""
    return tensor.numel()


def measure(to: str, transport: str) -> Speed:
    """Call a worker, again and again.

    Args:
        to: its name.
        transport: how it is reached, for the result.

    Raises:
        FarpropError: it can't be called.
    """
    for _ in range(_WARM_UP):
        rpc.rpc_sync(to, nothing, timeout=_SECONDS)
    calls = sorted(_timed(lambda: rpc.rpc_sync(to, nothing, timeout=_SECONDS), _CALLS))
    tensor = torch.ones(BYTES // 4)
    tensors = _timed(lambda: rpc.rpc_sync(to, count, (tensor,), timeout=_SECONDS), _TENSORS)
    return Speed(transport, median(calls), calls[int(0.99 * (len(calls) - 1))], BYTES / median(tensors))


def _timed(call: Callable[[], object], most: int) -> list[float]:
    taken: list[float] = []
    while len(taken) < most and sum(taken) < _ENOUGH:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return taken


def transport_to(worker: str) -> str:
    """How a worker is reached from this one."""
    membership = current_agent().membership
    own, other = membership.find(rpc.get_worker_info().name), membership.find(worker)
    assert own is not None
    assert other is not None
    return _transport(own, other)


def _transport(own: Entry, other: Entry) -> str:
    if own.instance == other.instance:
        return "to itself"
    if own.unix and other.unix and own.net == other.net:
        return "shared memory"
    return "TCP with TLS" if own.tls else "TCP"


def seconds_text(seconds: float) -> str:
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def rate_text(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"
