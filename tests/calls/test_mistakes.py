"""Mistakes in calls raise errors that say what to write instead."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import farprop.rpc as rpc
from farprop.nn import RemoteModule
from tests.calls import functions as f
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport


@dataclass
class Batch:
    data: list[Any]
    lock: Any = field(default_factory=threading.Lock)


def batches() -> list[Any]:
    return [1, Batch([])]


def stream_of_batches() -> Iterator[Any]:
    yield 1
    yield batches()


async def async_stream_of_batches() -> AsyncIterator[Any]:
    for item in stream_of_batches():
        yield item


async def coroutine_function() -> None: ...


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def method(self, *args: Any) -> None: ...


def _wrong_args() -> None:
    x = torch.ones(2)
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        for wrong in (x, "ab", {"a": 1}, 3, "", {}, range(2), (n for n in range(2))):
            with pytest.raises(TypeError, match=r"args should be a tuple .* but is a \w+\. .*args=\(x,\)"):
                call("worker1", f.identity, args=wrong)  # type: ignore[call-overload]
        for wrong in ([1], "ab", x, 3):
            with pytest.raises(TypeError, match="kwargs should be a dict"):
                call("worker1", f.identity, kwargs=wrong)  # type: ignore[call-overload]
    for wrong in (x, "ab", {}):
        with pytest.raises(TypeError, match=r"args should be a tuple"):
            rpc.stream("worker1", iter, args=wrong)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=r"args should be a tuple"):
            rpc.broadcast(["worker1"], f.identity, args=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^list_of_args\[1\] should be a tuple .* \(x,\) is a tuple"):
            rpc.map(["worker1"], f.identity, [(1,), wrong])  # type: ignore[list-item]
    future = rpc.rpc_async("worker1", f.identity, args=(1,))
    for no_futures in (future, [future, rpc.RRef(1)], {"worker1": 3}, rpc.remote("worker1", f.identity, args=(1,))):
        with pytest.raises(TypeError, match=r"^rpc\.gather waits for futures: .*to_here\(\)"):
            rpc.gather(no_futures)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"args should be a tuple .* a Tensor"):
        rpc.rpc_sync("worker1", f.identity, args=x, retry=rpc.Retry(2))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"args should be a tuple .* an? int"):
        RemoteModule("worker1", nn.Linear, args=(2))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="kwargs should be a dict"):
        RemoteModule("worker1", nn.Linear, kwargs=("in_features", 2))  # type: ignore[call-overload]
    # What torch takes, too.
    assert rpc.rpc_sync("worker1", f.identity, args=[3]) == 3
    assert rpc.rpc_sync("worker1", f.identity, args=torch.Size((3,))) == 3
    assert rpc.rpc_sync("worker1", f.identity, args=None, kwargs={"value": 3}) == 3


def _unsendable_arguments() -> None:
    lock, sent = threading.Lock(), {"x": torch.ones(20_000)}
    itself: list[Any] = [sent]
    itself += [itself, [lock]]

    def closure() -> Any:
        return lock

    for args, kwargs, path in (
        ((sent, {"lock": lock}), {}, r"args\[1\]\['lock'\]"),
        ((1, [(0, Batch([1]))]), {}, r"args\[1\]\[0\]\[1\]\.lock"),
        ((Slotted({3: {lock}}),), {}, r"args\[0\]\.inner\[3\] \(the element <unlocked"),
        ((), {"value": [sent, lock]}, r"kwargs\['value'\]\[1\]"),
        ((itself,), {}, r"args\[0\]\[2\]\[0\]"),
        ((closure,), {}, r"args\[0\] \(its variable lock\)"),
        ((Slotted(lock).method,), {}, r"args\[0\]\.__self__\.inner"),
    ):
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(
                TypeError, match=rf"^{path}.* \(a _thread\.lock\) can't be sent to worker1: cannot pickle"
            ):
                call("worker1", f.identity, args, kwargs)
    with pytest.raises(TypeError, match=r"^func \(its variable lock\) \(a _thread\.lock\) can't be sent to worker1"):
        rpc.rpc_sync("worker1", lambda: lock)
    for args, kwargs, path in (
        ((sent, {"lock": lock}), {}, r"args\[1\]\['lock'\]"),
        ((), {"value": [lock]}, r"kwargs\['value'\]\[0\]"),
    ):
        with pytest.raises(TypeError, match=rf"^{path} \(a _thread\.lock\) can't be sent to worker1"):
            rpc.stream("worker1", iter, args, kwargs)
        with pytest.raises(TypeError, match=rf"^{path} \(a _thread\.lock\) can't be sent to worker1"):
            RemoteModule("worker1", nn.Linear, args, kwargs)
        with pytest.raises(TypeError, match=rf"^{path} \(a _thread\.lock\) can't be sent to other workers"):
            rpc.broadcast(["worker1", "worker0"], f.identity, args, kwargs)
    with pytest.raises(TypeError, match=r"^func \(its variable lock\) \(a _thread\.lock\) can't be sent to worker1"):
        rpc.stream("worker1", lambda: iter([lock]))
    rref = rpc.remote("worker1", f.identity, args=([],))
    with pytest.raises(TypeError, match=r"^args\[0\]\[1\] \(a _thread\.lock\)"):
        rref.rpc_sync().append([1, lock])
    with pytest.raises(
        TypeError, match=r"^args\[0\] \(a generator\) can't be sent .* list of its items, or .* rpc\.stream"
    ):
        rpc.rpc_sync("worker1", f.identity, args=(stream_of_batches(),))
    coroutine = coroutine_function()
    with pytest.raises(TypeError, match=r"^args\[0\] \(a coroutine\) can't be sent .* Await it"):
        rpc.rpc_sync("worker1", f.identity, args=(coroutine,))
    coroutine.close()
    with pytest.raises(RuntimeError, match="Can not pickle") as caught_future:
        rpc.rpc_sync("worker1", f.identity, args=([rpc.rpc_async("worker1", f.noop)],))
    assert "Args[0][0] (a " in caught_future.value.__notes__[0]
    assert "future.wait()" in caught_future.value.__notes__[0]
    # What is wrong is said by its own exception, and where by a note.
    with pytest.raises(ZeroDivisionError) as caught:
        rpc.rpc_sync("worker1", f.identity, args=([1, Refuses()],))
    assert any(note.startswith("Args[0][1] (a ") for note in caught.value.__notes__)


class Refuses:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("not today")


def _unsendable_results() -> None:
    with pytest.raises(
        TypeError, match=r"^result\[1\]\.lock \(a _thread\.lock\) can't be sent to worker0: cannot"
    ) as caught:
        rpc.rpc_sync("worker1", batches)
    assert "worker1 could not encode" in "".join(caught.value.__notes__)
    with pytest.raises(TypeError, match=r"^result\[1\]\.lock"):
        rpc.remote("worker1", batches).to_here()
    for generator in (stream_of_batches, async_stream_of_batches):
        with pytest.raises(TypeError, match=r"^result \(an? \w*generator\) can't be sent to worker0: .* rpc\.stream"):
            rpc.rpc_sync("worker1", generator)
        items = rpc.stream("worker1", generator)
        assert next(items) == 1
        with pytest.raises(
            TypeError, match=r"^item\[1\]\.lock \(a _thread\.lock\) can't be sent to worker0: cannot"
        ) as caught:
            next(items)
        assert "worker1 could not encode an item" in "".join(caught.value.__notes__)


def test_mistakes_are_explained(env: dict[str, str]) -> None:
    with cluster(2, env) as job:
        for mistakes in (_wrong_args, _unsendable_arguments, _unsendable_results):
            job.run(0, mistakes)


def _restricted() -> None:
    with pytest.raises(
        TypeError, match=r"^args\[0\]\['lock'\] \(a _thread\.lock\) can't be sent to worker0: A _thread"
    ):
        rpc.rpc_sync("worker0", "f", args=({"lock": threading.Lock()},))


def test_what_is_no_data_is_named_in_a_restricted_job(env: dict[str, str]) -> None:
    with cluster(1, env | {"FARPROP_RESTRICTED": "1"}) as job:
        job.run(0, _restricted)
