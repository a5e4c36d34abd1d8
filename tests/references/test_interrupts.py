"""Ctrl-C during a call: no worker keeps a value whose reference the program never got, and shutdown works."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

import farprop.rpc as rpc
from farprop.runtime.agent_registry import current_agent
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import all_empty, become_empty, wait_until
from tests.support.workers import Cluster

Call = Callable[[rpc.RRef[Any]], object]

_CALLS: dict[str, Call] = {
    "sync": lambda rref: rpc.rpc_sync("worker1", repr, args=(rref,)),
    "async": lambda rref: rpc.rpc_async("worker1", repr, args=(rref,)),
    "remote": lambda rref: rpc.remote("worker1", g.Chain, args=(rref,)),
}


@contextmanager
def _interrupt_before_sending() -> Iterator[None]:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    room = current_agent().peers.connect("worker1")._room
    with mock.patch.object(room, "most_outbox", -1), mock.patch.object(room, "wait", interrupted):
        yield


@contextmanager
def _interrupt_after_sending() -> Iterator[None]:
    connection = current_agent().peers.connect("worker1")._connection
    send = connection.send

    def interrupted(*message: Any) -> None:
        send(*message)
        raise KeyboardInterrupt

    with mock.patch.object(connection, "send", interrupted):
        yield


_MOMENTS = {"before": _interrupt_before_sending, "after": _interrupt_after_sending}


def _interrupted_call(moment: str, kind: str, name: str) -> None:
    rref = rpc.RRef(g.Thing(name))
    with _MOMENTS[moment](), pytest.raises(KeyboardInterrupt):
        _CALLS[kind](rref)
    del rref
    assert rpc.rpc_sync("worker1", f.add, args=(1,)) == 2


def _is_freed(name: str) -> None:
    gc.collect()
    wait_until(lambda: not g.things(name), "the value is freed")
    become_empty()


@pytest.mark.one_transport
@pytest.mark.parametrize("kind", _CALLS)
@pytest.mark.parametrize("moment", _MOMENTS)
def test_references_in_an_interrupted_call_are_released(workers: Cluster, moment: str, kind: str) -> None:
    workers.run(0, _interrupted_call, moment, kind, f"{moment} {kind}")
    all_empty(workers)
    workers.run(0, _is_freed, f"{moment} {kind}")


def _interrupted_remote(moment: str) -> None:
    with _MOMENTS[moment](), pytest.raises(KeyboardInterrupt):
        rpc.remote("worker1", g.Thing, args=("never got",))


@pytest.mark.parametrize("moment", _MOMENTS)
def test_the_value_of_an_interrupted_remote_is_freed(workers: Cluster, moment: str) -> None:
    workers.run(0, _interrupted_remote, moment)
    all_empty(workers)
    workers.run(1, _is_freed, "never got")
