"""``rpc.broadcast``, ``rpc.map`` and ``rpc.gather``: on one host, over TCP, between hosts, and when workers fail.

Over TCP alone each worker counts as a host of its own, so the parcel goes from worker to worker.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import farprop.autograd as autograd
import farprop.rpc as rpc
from farprop.errors import (
    CallCancelledError,
    ConnectionLostError,
    GatherError,
    OverloadedError,
    RpcTimeoutError,
    UsageError,
)
from farprop.runtime import chunk_sender, parcels
from farprop.runtime.agent_registry import current_agent
from farprop.transport.shared_copies import SharedCopies
from farprop.transport.shared_memory import ShmSender
from tests.calls import functions as f
from tests.references.looking import wait_until
from tests.support.hosts import Hosts
from tests.support.workers import Cluster, cluster

OTHERS = ["worker1", "worker2", "worker3"]
ALL = ["worker0", *OTHERS]
LARGE = 1_500_000  # floats: a parcel of several chunks
_kept: list[Any] = []


def _scribble(tensor: torch.Tensor) -> tuple[str, list[float]]:
    tensor[::100_000] += 1
    _kept.append(tensor)
    return f.own_name(), [float(tensor.min()), float(tensor.max())]


def _scribbled() -> tuple[float, float]:
    return min(float(tensor.min()) for tensor in _kept), max(float(tensor.max()) for tensor in _kept)


def _forget() -> None:
    _kept.clear()
    f.noted().clear()


def _has_nothing() -> bool:
    gc.collect()
    agent = current_agent()
    return agent.parcels.is_empty and not agent.parcels._here and not agent._server.active


def _note_sum(tensor: torch.Tensor) -> float:
    f.note(float(tensor.sum()))
    return float(tensor.sum())


def _raise_on(worker: str, tensor: torch.Tensor) -> str:
    if f.own_name() == worker:
        raise ValueError(f"no, says {worker}")
    return f.own_name()


def _wait_on(worker: str, tensor: torch.Tensor) -> str:
    return f.wait_for_gate() if f.own_name() == worker else f.own_name()


def _fetch(reference: Any, tensor: torch.Tensor) -> float:
    return float(reference.to_here()) + float(tensor[0])


def _scaled(weights: torch.Tensor, by: float) -> torch.Tensor:
    return (weights * by).sum()


# One job for all that works


def _results() -> None:
    x = torch.ones(LARGE)
    sums = rpc.gather(rpc.broadcast(ALL, f.add, (x,), {"c": 1.0}))
    assert list(sums) == ALL
    for tensor in sums.values():
        assert torch.equal(tensor, torch.full((LARGE,), 3.0))
    small = rpc.gather(rpc.broadcast(OTHERS, f.add, (1, 2)))
    assert small == dict.fromkeys(OTHERS, 3)
    assert rpc.gather(rpc.broadcast([3, rpc.get_worker_info("worker1")], f.own_name)) == {
        "worker3": "worker3",
        "worker1": "worker1",
    }
    numbers = list(range(300_000))  # nothing but a long pickle
    assert rpc.gather(rpc.broadcast(OTHERS, len, (numbers,))) == dict.fromkeys(OTHERS, 300_000)
    assert rpc.gather(rpc.broadcast(OTHERS, lambda a: float(a[-1]), (x,))) == dict.fromkeys(OTHERS, 1.0)
    state = {f"layer{i}": torch.full((50_000 + i,), float(i)) for i in range(8)}
    state["view"] = state["layer3"][10:20]
    for name, back in rpc.gather(rpc.broadcast(OTHERS, f.identity, (state,))).items():
        assert all(torch.equal(back[key], value) for key, value in state.items()), name
    assert rpc.broadcast([], f.own_name) == {}
    assert rpc.gather({}) == {}
    assert rpc.gather([]) == []


def _each_has_its_own() -> None:
    x = torch.zeros(LARGE)
    for _ in range(2):  # the second time, memory is used again that nobody has any more
        found = rpc.gather(rpc.broadcast(ALL, _scribble, (x,)))
        assert found == {name: (name, [0.0, 1.0]) for name in ALL}
    assert rpc.gather(rpc.broadcast(ALL, _scribbled)) == dict.fromkeys(ALL, (0.0, 1.0))
    twice = rpc.gather(rpc.map(["worker1", "worker2"], _scribble, [(x,)] * 4))
    assert twice == [(name, [0.0, 1.0]) for name in ("worker1", "worker2")] * 2
    assert not x.any()
    rpc.gather(rpc.broadcast(ALL, _forget))


def _map() -> None:
    x = torch.ones(LARGE)
    own = [torch.full((100_000,), float(i)) for i in range(7)]
    futures = rpc.map(OTHERS, _weigh, [(x, own[i], i) for i in range(7)], {"more": 0.5})
    expected = [(OTHERS[i % 3], LARGE + i * 100_000.0 + i + 0.5) for i in range(7)]
    assert rpc.gather(futures) == expected
    assert rpc.gather(rpc.map(OTHERS, f.add, [(1,)])) == [2]
    assert rpc.map(OTHERS, f.add, []) == []


def _weigh(x: torch.Tensor, own: torch.Tensor, number: int, more: float) -> tuple[str, float]:
    return f.own_name(), float(x.sum()) + float(own.sum()) + number + more


def _errors() -> None:
    x = torch.ones(LARGE)
    with pytest.raises(GatherError, match="1 of 3 calls failed: worker2: ValueError: no, says worker2") as caught:
        rpc.gather(rpc.broadcast(OTHERS, _raise_on, ("worker2", x)))
    assert list(caught.value.errors) == ["worker2"]
    assert caught.value.results == {"worker1": "worker1", "worker3": "worker3"}
    matching = caught.value.subgroup(ValueError)
    assert isinstance(matching, GatherError)
    assert list(matching.errors) == ["worker2"]
    outcomes = rpc.gather(rpc.map(OTHERS, _raise_on, [("worker1", x)] * 3), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ValueError, str, str]
    futures = rpc.broadcast(OTHERS, _wait_on, ("worker3", x), timeout=2)
    assert futures["worker1"].wait() == "worker1"
    with pytest.raises(RpcTimeoutError, match="worker3"):
        futures["worker3"].wait()
    rpc.rpc_sync("worker3", f.open_gate)
    for workers, text in (
        (["worker1", "worker1"], "worker1 is given twice"),
        (["worker1", 1], "worker1 is given twice"),
        (["worker1", "nobody"], "could not find destination 'nobody'"),
        ("worker1", r"such as \['worker1'\]"),
    ):
        with pytest.raises(UsageError, match=text):
            rpc.broadcast(workers, f.note, (x,))
    with pytest.raises(TypeError, match=r"is a Tensor.*args=\(x,\)"):
        rpc.broadcast(OTHERS, f.note, x)
    with pytest.raises(UsageError, match="no workers"):
        rpc.map([], f.note, [(1,)])
    with pytest.raises(TypeError, match=r"args\[1\]\['lock'\] \(a _thread.lock\) can't be sent to other workers"):
        rpc.broadcast(OTHERS, f.note, (x, {"lock": threading.Lock()}))
    assert not any(rpc.gather(rpc.broadcast(ALL, f.noted)).values()), "something was sent nevertheless"


def _references() -> None:
    x = torch.ones(LARGE)
    for owner in ("worker0", "worker2"):
        reference = rpc.remote(owner, torch.tensor, args=(41.0,))
        assert rpc.gather(rpc.broadcast(ALL, _fetch, (reference, x))) == dict.fromkeys(ALL, 42.0)
    del reference


def _gradients() -> None:
    weights = torch.rand(LARGE, requires_grad=True)
    with autograd.context() as context_id:
        losses = rpc.gather(rpc.broadcast(OTHERS, _scaled, (weights, 2.0)))
        losses |= {"mapped": sum(rpc.gather(rpc.map(OTHERS, _scaled, [(weights, float(i)) for i in range(3)])))}
        autograd.backward(context_id, [sum(losses.values())])
        gradient = autograd.get_gradients(context_id)[weights]
    assert torch.equal(gradient, torch.full((LARGE,), 3 * 2.0 + 0 + 1 + 2))


@pytest.mark.without_tls_too
def test_what_works(transport: str) -> None:
    with cluster(4) as job:
        for part in (_results, _each_has_its_own, _map, _errors, _references, _gradients):
            job.run(0, part)
        for rank in range(4):
            wait_until(lambda rank=rank: job.run(rank, _has_nothing))
        # The memory is free again, and is used again.
        if transport == "auto":
            wait_until(lambda: job.run(0, _holders) == [])


def _holders() -> list[int]:
    gc.collect()
    copies = current_agent()._copies
    while copies.returned:
        copies.returned.popleft().release()
    return [copy.holders for copy in copies._free if copy.holders]


# Workers that fail. Over TCP: the parcel goes from worker1 to worker2, and from there to worker3


_futures: dict[str, Any] = {}


def _start_broadcast(stall: float, timeout: float) -> None:
    chunk_sender.STALL_SECONDS = stall
    _futures.update(rpc.broadcast(OTHERS, _note_sum, (torch.ones(LARGE),), timeout=timeout))


def _result(name: str) -> float:
    return float(_futures[name].wait())


def _greet_each_other() -> None:
    """Dial, so that nobody has to while another one has stopped."""
    for name in ALL:
        rpc.rpc_sync(name, f.noop)


def _fails(name: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        _futures[name].wait()


def _check_once(job: Cluster, ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        assert job.run(rank, f.noted) == [float(LARGE)]
        wait_until(lambda rank=rank: job.run(rank, _has_nothing))


@pytest.mark.one_transport
@pytest.mark.parametrize("dead", [1, 2])
def test_those_behind_a_dead_worker_get_their_calls(dead: int) -> None:
    with cluster(4, {"FARPROP_TRANSPORT": "tcp"}) as job:
        for rank in range(4):
            job.run(rank, _greet_each_other)
        job.signal(dead, signal.SIGSTOP)  # so that it has not done anything when it dies
        job.run(0, _start_broadcast, 60.0, 60.0)
        job.kill(dead)
        job.run(0, _fails, f"worker{dead}", ConnectionLostError)
        others = tuple(rank for rank in (1, 2, 3) if rank != dead)
        for rank in others:
            assert job.run(0, _result, f"worker{rank}") == LARGE
        _check_once(job, others)


@pytest.mark.one_transport
def test_those_behind_a_stopped_worker_get_their_calls_and_so_does_it_when_it_goes_on() -> None:
    with cluster(4, {"FARPROP_TRANSPORT": "tcp"}) as job:
        for rank in range(4):
            job.run(rank, _greet_each_other)
        job.signal(1, signal.SIGSTOP)
        job.run(0, _start_broadcast, 0.3, 60.0)
        for name in ("worker2", "worker3"):
            assert job.run(0, _result, name) == LARGE
        job.signal(1, signal.SIGCONT)
        assert job.run(0, _result, "worker1") == LARGE
        _check_once(job, (1, 2, 3))


@pytest.mark.one_transport
def test_a_caller_that_dies_leaves_nothing() -> None:
    with cluster(4, {"FARPROP_TRANSPORT": "tcp"}) as job:
        for rank in range(4):
            job.run(rank, _greet_each_other)
        job.signal(2, signal.SIGSTOP)
        job.run(0, _start_broadcast, 60.0, 60.0)
        wait_until(lambda: job.run(1, f.noted) == [float(LARGE)])
        job.kill(0)
        job.signal(2, signal.SIGCONT)
        for rank in (1, 2, 3):
            wait_until(lambda rank=rank: job.run(rank, _has_nothing))


# Without shared memory


def _scribble_twice() -> None:
    x = torch.zeros(LARGE)
    for _ in range(2):
        assert rpc.gather(rpc.broadcast(ALL, _scribble, (x,))) == {name: (name, [0.0, 1.0]) for name in ALL}
    assert rpc.gather(rpc.map(OTHERS, _scribble, [(x,)] * 6)) == [(name, [0.0, 1.0]) for name in OTHERS] * 2
    rpc.gather(rpc.broadcast(ALL, _forget))


def _without_descriptors() -> None:
    with mock.patch.object(ShmSender, "lend_copy", return_value=None):
        _scribble_twice()


def _without_memory() -> None:
    with mock.patch.object(SharedCopies, "make", return_value=None):
        _scribble_twice()


@pytest.mark.one_transport
def test_there_is_no_shared_memory_and_parcels_that_nobody_claims_are_dropped() -> None:
    with cluster(4) as job:
        job.run(0, _without_descriptors)
        job.run(0, _without_memory)
        job.run(0, _share_for_nothing)
        wait_until(lambda: job.run(1, _has_nothing))


def _share_for_nothing() -> None:
    rpc.rpc_sync("worker1", _drop_soon)
    agent = current_agent()
    copy = agent._copies.make(LARGE)
    assert copy is not None
    agent.parcels.share(parcels.ParcelId(0, 5), parcels.Stop(1, 1), copy)
    copy.release()


def _drop_soon() -> None:
    parcels._UNCLAIMED_SECONDS = 0.1


# Too many at once


def _hold(_: torch.Tensor) -> str:
    return f.wait_for_gate()


def _map_too_much() -> None:
    _futures["held"] = rpc.map(["worker0", "worker1"], _hold, [(torch.ones(LARGE),)] * 8)
    refused: set[str] = set()
    while len(refused) < 2:
        for worker, future in rpc.broadcast(["worker0", "worker1"], _hold, (torch.ones(LARGE),)).items():
            if future.done():
                with pytest.raises(OverloadedError):
                    future.wait()
                refused.add(worker)
            else:
                _futures["held"].append(future)


def _gather_held() -> list[type]:
    return [type(outcome) for outcome in rpc.gather(_futures["held"], return_exceptions=True)]


@pytest.mark.one_transport
def test_calls_that_are_refused_leave_no_parcel() -> None:
    env = {"FARPROP_WHEN_FULL": "raise", "FARPROP_IN_FLIGHT_BYTES": str(6 * LARGE)}
    with cluster(2, env) as job:
        job.run(0, _map_too_much)
        for rank in (0, 1):
            job.run(rank, f.open_gate)
        outcomes = job.run(0, _gather_held)
        assert outcomes[:2] == [str, str]
        assert OverloadedError in outcomes
        for rank in (0, 1):
            wait_until(lambda rank=rank: job.run(rank, _has_nothing))


# Between hosts


def _received_bytes() -> int:
    """What this host has received."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0" in line)
    return int(line.split(":")[1].split()[0])


@pytest.mark.one_transport
def test_each_link_is_crossed_once(hosts: Hosts) -> None:
    with cluster(6, hosts.environments([0, 0, 1, 1, 2, 2])) as job:
        for rank in range(6):
            job.run(rank, _greet_all, 6)
        before = [job.run(rank, _received_bytes) for rank in (2, 4)]
        assert job.run(0, _broadcast_to_all, 6) == {f"worker{rank}": float(LARGE) for rank in range(1, 6)}
        after = [job.run(rank, _received_bytes) for rank in (2, 4)]
        size = LARGE * 4
        for came, had in zip(after, before, strict=True):
            assert size < came - had < 1.5 * size
        # The workers of a host have the same memory: whoever writes to it changes nothing for the others.
        job.run(0, _scribble_everywhere, 6)


def _greet_all(size: int) -> None:
    for rank in range(size):
        rpc.rpc_sync(f"worker{rank}", f.noop)


def _broadcast_to_all(size: int) -> dict[str, float]:
    names = [f"worker{rank}" for rank in range(1, size)]
    return rpc.gather(rpc.broadcast(names, _note_sum, (torch.ones(LARGE),)))


def _scribble_everywhere(size: int) -> None:
    names = [f"worker{rank}" for rank in range(size)]
    for _ in range(2):
        found = rpc.gather(rpc.broadcast(names, _scribble, (torch.zeros(LARGE),)))
        assert found == {name: (name, [0.0, 1.0]) for name in names}
    assert rpc.gather(rpc.broadcast(names, _scribbled)) == dict.fromkeys(names, (0.0, 1.0))
    rpc.gather(rpc.broadcast(names, _forget))


@pytest.mark.one_transport
def test_those_behind_a_host_that_vanishes_get_their_calls_soon(hosts: Hosts) -> None:
    # The parcel goes from worker1 to worker2, and from there to worker3.
    with cluster(4, hosts.environments([0, 1, 2, 0], FARPROP_TRANSPORT="tcp")) as job:
        for rank in range(4):
            job.run(rank, _greet_each_other)
        job.signal(2, signal.SIGSTOP)
        began = time.monotonic()
        job.run(0, _start_broadcast, 60.0, 60.0)
        hosts.cut(2)
        job.run(0, _fails, "worker2", ConnectionLostError)
        assert job.run(0, _result, "worker3") == LARGE
        assert time.monotonic() - began < 15  # dialling the lost host takes 20 s
        job.kill(2)


@pytest.mark.one_transport
def test_nothing_stays_of_calls_that_end_while_their_arguments_are_on_the_way(hosts: Hosts) -> None:
    with cluster(5, hosts.environments([0, 1, 1, 2, 2])) as job:
        for rank in range(5):
            job.run(rank, _greet_all, 5)
        for timeout in (0.0, 0.3):
            job.signal(1, signal.SIGSTOP)  # the relay: all others wait for what it should bring
            job.run(0, _end_early, timeout)
            job.signal(1, signal.SIGCONT)
            for rank in range(1, 5):
                job.run(rank, _wait_for_nothing)
                if rank > 1 or not timeout:  # the time of a worker that has stopped begins when it goes on
                    assert job.run(rank, f.noted) == []
                job.run(rank, _forget)


def _end_early(timeout: float) -> None:
    """Make calls that wait for their arguments, and end them: by a timeout, or without one by ``cancel``."""
    futures = rpc.broadcast([f"worker{rank}" for rank in range(1, 5)], _note_sum, (torch.ones(LARGE),), None, timeout)
    if not timeout:
        for rank in range(2, 5):
            rpc.rpc_sync(f"worker{rank}", _wait_for_a_held_request)
        for future in futures.values():
            assert future.cancel()
    for future in futures.values():
        with pytest.raises((CallCancelledError, RpcTimeoutError)):
            future.wait()


def _wait_for_a_held_request() -> None:
    wait_until(lambda: current_agent().parcels.held())


def _wait_for_nothing() -> None:
    wait_until(_has_nothing)


@pytest.mark.one_transport
def test_a_relay_dies_and_its_host_gets_the_calls_from_another_one(hosts: Hosts) -> None:
    with cluster(4, hosts.environments([0, 1, 1, 1])) as job:
        for rank in range(4):
            job.run(rank, _greet_each_other)
        job.signal(1, signal.SIGSTOP)
        job.run(0, _start_broadcast, 60.0, 60.0)
        job.kill(1)
        job.run(0, _fails, "worker1", ConnectionLostError)
        for name in ("worker2", "worker3"):
            assert job.run(0, _result, name) == LARGE
        _check_once(job, (2, 3))
