"""Items of a generator on another worker, one after the other.

With torch, the generator is kept in an RRef, and each item is a call of its own: that is what a program can do there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.cases import Api, Sample, case

SMALL = 1000
LARGE = 50
_END = object()


def numbers() -> Iterator[int]:
    yield from range(SMALL)


def tensors() -> Iterator[torch.Tensor]:
    x = torch.arange(1 << 18, dtype=torch.float32)
    for _ in range(LARGE):
        yield x


def next_of(rref: Any) -> tuple[Any, ...]:
    """The next item, or nothing at the end."""
    item = next(rref.local_value(), _END)
    return () if item is _END else (item,)


def _iterate(api: Api, peer: str, generator: Any) -> Iterator[Any]:
    if api.package == "farprop":
        yield from api.rpc.stream(peer, generator)
        return
    rref = api.rpc.remote(peer, generator)
    while found := api.rpc.rpc_sync(peer, next_of, args=(rref,)):
        yield found[0]


@case("stream-small", "stream of 1,000 ints, an item", goal=10, samples=5, warmup=1, calls=SMALL)
def stream_small(api: Api, peer: str) -> Sample:
    if list(_iterate(api, peer, numbers)) != list(range(SMALL)):
        raise AssertionError(f"{api.package} gave other items")
    return lambda: sum(1 for _ in _iterate(api, peer, numbers))


@case("stream-1mb", "stream of 50 tensors of 1 MB, an item", goal=3, samples=5, warmup=1, calls=LARGE)
def stream_1mb(api: Api, peer: str) -> Sample:
    expected = next(tensors())
    if not all(torch.equal(item, expected) for item in _iterate(api, peer, tensors)):
        raise AssertionError(f"{api.package} gave other items")
    return lambda: sum(1 for _ in _iterate(api, peer, tensors))
