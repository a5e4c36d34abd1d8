"""Restricted mode: the features that work in it, and that nothing is unpickled."""

from __future__ import annotations

import asyncio
import os
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import farprop.autograd as dist_autograd
import farprop.distributed  # noqa: F401
import farprop.rpc as rpc
from farprop.errors import (
    ConnectionLostError,
    NotDataError,
    NotExposedError,
    ProtocolError,
    RemoteError,
    RendezvousError,
    UsageError,
)
from farprop.nn import RemoteModule
from farprop.optim import DistributedOptimizer
from farprop.rpc import rref_proxy
from farprop.runtime.agent_registry import current_agent
from farprop.wire import codec
from farprop.wire import fast_codec as plain
from farprop.wire.message import Message, Method, ParcelPart
from tests.security import functions as f
from tests.support.workers import run_workers

pytestmark = pytest.mark.one_transport


class _Forbidden:
    """Replaces the unpickler. It is a class, because torch derives one from pickle's on first use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was unpickled")


def _forbid_unpickling() -> None:
    for module, name in (
        (pickle, "loads"),
        (pickle, "load"),
        (pickle, "Unpickler"),
        (pickle, "_loads"),
        (pickle, "_load"),
        (pickle, "_Unpickler"),
        (cloudpickle, "loads"),
        (cloudpickle, "load"),
        (torch, "load"),
        (torch.jit, "load"),
        (codec, "_loads"),  # the same, under names that were bound before
        (plain, "_loads"),
    ):
        setattr(module, name, _Forbidden)


def _start(rank: int, size: int, restricted: bool = True) -> None:
    _forbid_unpickling()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, restricted=restricted)


def _run_job(rank: int, size: int, program: Any) -> Any:
    _start(rank, size)
    result = program() if rank == 0 else None
    rpc.shutdown()
    return result


def _in_job(program: Any, size: int = 2) -> Any:
    return run_workers(_run_job, size, (size, program))[0]


# Calls


def _calls() -> None:
    assert rpc.rpc_sync("worker1", f.add, (1,)) == 2
    assert rpc.rpc_sync("worker1", f.add, (1,), {"right": 5}) == 6
    assert rpc.rpc_sync("worker1", "times", (3, 4)) == 12
    assert rpc.rpc_sync("worker1", f.multiply, (3, 4)) == 12
    assert rpc.rpc_async("worker1", "tests.security.functions:add", (1,)).wait() == 2
    assert rpc.rpc_sync("worker1", f.add_later, (1, 2)) == 3
    assert rpc.rpc_sync("worker1", f.add_in_a_coroutine, (1, 2)) == 3
    assert rpc.rpc_sync("worker1", f.Counter.double, (4,)) == 8
    assert rpc.rpc_sync("worker1", f.Counter.named, (4,)) == "Counter4"
    assert rpc.rpc_sync("worker1", torch.mul, (torch.ones(2), 3)).tolist() == [3, 3]
    assert rpc.rpc_sync("worker0", f.add, (1,)) == 2
    assert rpc.remote("worker1", f.add, (1,)).to_here() == 2


def test_calls_of_exposed_functions() -> None:
    _in_job(_calls)


def _awaited_and_cancelled_calls() -> None:
    async def awaits() -> None:
        assert await rpc.rpc_async("worker1", f.add, (1,)) == 2
        assert await rpc.remote("worker1", f.add, (1,)) == 2

    asyncio.run(awaits())
    waiting = rpc.rpc_async("worker1", f.wait_until_cancelled)
    while rpc.rpc_sync("worker1", f.last_note) != "begun":
        pass
    assert waiting.cancel()
    while rpc.rpc_sync("worker1", f.last_note) != "cancelled":
        pass


def test_calls_are_awaited_and_cancelled() -> None:
    _in_job(_awaited_and_cancelled_calls)


def _streams() -> None:
    assert list(rpc.stream("worker1", f.count, (40,))) == list(range(40))
    assert list(rpc.stream("worker1", "counted", kwargs={"to": 4})) == [0, 1, 2, 3]
    internal = "farprop.rpc.api:_gather_to_leader"
    for function in (f.hidden_count, "tests.security.functions:hidden_count", "builtins:range", internal):
        with pytest.raises(NotExposedError, match="worker1|which is not exposed"):
            list(rpc.stream("worker1", function, (3,)))
    # A dataclass that can be called is data, and not a function.
    with pytest.raises(NotExposedError):
        list(rpc.stream("worker1", f.CallablePoint(1, 2)))  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="returned a int"):
        list(rpc.stream("worker1", f.add, (1,)))
    agent = current_agent()
    for args in ((1, 2), ("1", 2, f.count), (1, 2, 3), (1, 2, None)):
        with pytest.raises(ProtocolError):
            agent.call_sync("worker1", Method.STREAM_OPEN, args, {}, 10.0)


def test_streams_of_exposed_functions() -> None:
    _in_job(_streams)


def _calls_to_many() -> None:
    large = torch.ones(300, 300)
    names = ["worker0", "worker1"]
    for sent in rpc.gather(rpc.broadcast(names, f.echo, (large,))).values():
        assert torch.equal(sent, large)
    assert rpc.gather(rpc.map(names, "times", [(2, n) for n in range(4)])) == [0, 2, 4, 6]
    outcomes = rpc.gather(rpc.broadcast(names, "tests.security.functions:hidden"), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes.values()} == {NotExposedError}
    # There are no parcels, by which a worker could change what another one sends.
    agent = current_agent()
    message = agent.dialect.encode_call(None, (0, 1, 1), {})
    with pytest.raises(NotExposedError, match="restricted jobs don't have"):
        raise agent.dialect.decode_failure(
            agent.peers.call_method(1, Method.PARCEL_DROP, message, 10.0, system=True).payload
        )
    request = Message(b"", [ParcelPart(1, 0, 1000)], name=b"tests.security.functions:echo")
    with pytest.raises(ConnectionLostError):
        agent.peers.connect("worker1").call_sync(request, 10.0)
    assert rpc.rpc_sync("worker1", f.add, (1,)) == 2


def test_calls_to_many_workers_have_no_parcels() -> None:
    _in_job(_calls_to_many)


def _values() -> None:
    large = torch.randn(300, 300)
    values = [
        *(None, True, -5, 2**70, -(2**90), 1.5, 2 + 3j, "text", b"bytes", bytearray(b"more")),
        *([1, [2]], (1, (2,)), {"a": 1, (1, 2): [3], None: 4}, {1, 2}, frozenset((1, "2"))),
        *(torch.Size((2, 3)), torch.float16, torch.device("cuda:1"), f.Point(1, [2, f.Point(3)])),
    ]
    for value in values:
        came = rpc.rpc_sync("worker1", f.echo, (value,))
        assert type(came) is type(value)
        assert came == value
    came = rpc.rpc_sync("worker1", f.echo, (large, large, torch.ones(2, requires_grad=True)))
    assert torch.equal(came[0], large)
    assert came[0] is came[1]
    assert came[2].requires_grad
    for value in (object(), lambda: 1, torch.nn.Linear(1, 1), f.Unknown(1), torch.futures.Future()):
        with pytest.raises(NotDataError):
            rpc.rpc_sync("worker1", f.echo, (value,))
    for kind in ("object", "module", "lambda"):
        with pytest.raises(NotDataError, match="can't be sent"):
            rpc.rpc_sync("worker1", f.object_of, (kind,))
    with pytest.raises(ValueError, match="no 13"):
        rpc.rpc_sync("worker1", "tests.security.functions:Point", (13,))


def test_values_of_all_kinds_round_trip() -> None:
    _in_job(_values)


def _refusals() -> None:
    for function in (f.hidden, f.called, torch.add, "os:system", "builtins:eval", "no.such.module:thing"):
        with pytest.raises(NotExposedError, match="worker1"):
            rpc.rpc_sync("worker1", function)
    with pytest.raises(NotExposedError, match="does not expose 'tests.security.functions:hidden'") as caught:
        rpc.rpc_sync("worker1", f.hidden)
    assert "@farprop.rpc.expose on worker1" in str(caught.value)
    with pytest.raises(NotDataError, match="has no name"):
        rpc.rpc_sync("worker1", lambda: 1)
    with pytest.raises(NotExposedError):
        rpc.remote("worker1", f.hidden).to_here()
    with pytest.raises(NotExposedError, match="called by a name"):
        rpc.rpc_sync("worker1", "")
    with pytest.raises(TypeError, match="callable"):
        rpc.rpc_sync("worker1", 5)  # type: ignore[arg-type]
    with torch.autograd.profiler_legacy.profile(), pytest.raises(UsageError, match="profile"):
        rpc.rpc_sync("worker1", f.add, (1,))


def test_other_functions_are_refused() -> None:
    _in_job(_refusals)


def _failures() -> None:
    with pytest.raises(ValueError, match="what was wrong") as caught:
        rpc.rpc_sync("worker1", f.fail, ("value",))
    assert caught.value.args == ("what was wrong",)
    assert "worker1" in caught.value.__notes__[-1]
    with pytest.raises(KeyError) as missing:
        rpc.rpc_sync("worker1", f.fail, ("key",))
    assert missing.value.args == ("a key",)
    for kind, name in (("own", "tests.security.functions.MyError"), ("other", "builtins.UnicodeDecodeError")):
        with pytest.raises(RemoteError, match="was raised on worker1") as remote:
            rpc.rpc_sync("worker1", f.fail, (kind,))
        assert (remote.value.worker, remote.value.type_name) == ("worker1", name)
    with pytest.raises(ValueError, match="what was wrong"):
        rpc.remote("worker1", f.fail, ("value",)).to_here()


def test_failures_are_sent_as_type_and_text() -> None:
    _in_job(_failures)


# References


def _references() -> None:
    counter = rpc.remote("worker1", f.Counter, (5,))
    assert counter.rpc_sync().add(1) == 6
    assert counter.rpc_async().add_later(1).wait() == 7
    assert counter.remote().add(1).to_here() == 8
    for method in ("reset", "__init__", "__class__", "__dict__", "__reduce__", "value", "no_such_thing"):
        with pytest.raises(NotExposedError, match=f"worker1 does not expose '{method}' of a Counter"):
            rref_proxy._invoke_rpc(counter, rpc.rpc_sync, method, -1.0)
    with pytest.raises(NotDataError, match="Counter can't be sent"):
        counter.to_here()
    assert rpc.rpc_sync("worker1", f.make_doubled).rpc_sync().add(2) == 4
    own = rpc.RRef(torch.ones(2))
    assert rpc.rpc_sync("worker1", f.value_behind, (own,)).tolist() == [1, 1]
    assert rpc.rpc_sync("worker1", f.pass_on, (own, "worker2")).tolist() == [1, 1]
    assert rpc.rpc_sync("worker1", f.value_behind, (rpc.remote("worker2", f.add, (1,)),)) == 2
    here = rpc.RRef(f.Counter())
    assert here.rpc_sync().add(3) == 3
    with pytest.raises(NotExposedError, match="worker0"):
        here.rpc_sync().reset()
    rpc.api._barrier({"worker0"})


def test_references() -> None:
    _in_job(_references, 3)


# Training


def _split_learning() -> list[float]:
    """The optimizers run where the parameters are."""
    halves = [rpc.remote("worker1", f.Half, (4, 8)), rpc.remote("worker2", f.Half, (8, 1))]
    parameters = [rref for half in halves for rref in half.rpc_sync().parameter_rrefs()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5)
    scheduler = optimizer.lr_scheduler(torch.optim.lr_scheduler.StepLR, 100)
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    y = x.sum(1, keepdim=True).tanh()
    losses = []
    for _ in range(10):
        with dist_autograd.context() as context:
            loss = ((halves[1].rpc_sync().forward(halves[0].rpc_sync().forward(x)) - y) ** 2).mean()
            losses.append(loss.item())
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        scheduler.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert scheduler.get_last_lr() == [0.5]
    return losses


def _train_in_one_process() -> list[float]:
    halves = [f.Half(4, 8), f.Half(8, 1)]
    optimizer = torch.optim.SGD([p for half in halves for p in half.parameters()], lr=0.5)
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    y = x.sum(1, keepdim=True).tanh()
    losses = []
    for _ in range(10):
        loss = ((halves[1](halves[0](x)) - y) ** 2).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def test_restricted_training_gives_the_same_losses_as_one_process() -> None:
    losses = _in_job(_split_learning, 3)
    assert losses == pytest.approx(_train_in_one_process(), rel=1e-4)
    assert losses[-1] < losses[0]


def _remote_module() -> None:
    module = RemoteModule("worker1", torch.nn.Linear, (3, 2))
    module.train()
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    before = module(torch.ones(3))
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [module(torch.ones(3)).sum()])
        optimizer.step(context)
    assert not torch.equal(before, module(torch.ones(3)))
    with pytest.raises(NotExposedError, match="GRU"):
        RemoteModule("worker1", torch.nn.GRU, (3, 2)).remote_parameters()
    with pytest.raises(NotExposedError, match="Adagrad"):
        DistributedOptimizer(torch.optim.Adagrad, module.remote_parameters())
    # The parameters of this class are not exposed.
    half = RemoteModule("worker1", f.Half, (3, 2))
    assert half(torch.ones(3)).shape == (2,)
    for use in (half.remote_parameters, half.train):
        with pytest.raises(NotExposedError, match="of a Half"):
            use()
    value = rpc.remote("worker1", f.add, (torch.ones(2, requires_grad=True), 1))
    with dist_autograd.context() as context:
        value = rpc.remote("worker1", f.add, (torch.ones(2, requires_grad=True), torch.ones(2)))
        total = rpc.remote("worker1", torch.mul, (rpc.rpc_sync("worker1", f.value_behind, (value,)).sum(), 2.0))
        total.backward(context)


def test_remote_modules_and_optimizers_of_exposed_classes() -> None:
    _in_job(_remote_module)


# Process groups


def _collectives(rank: int, path: str) -> None:
    _start(rank, 2)
    dist.init_process_group("farprop", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 1000
    with pytest.raises(UsageError, match="Collectives of objects"):
        dist.all_gather_object([None, None], {"rank": rank})
    if rank:
        with pytest.raises(UsageError, match="Collectives of objects"):
            dist.broadcast_object_list([None], 0)
    else:
        dist.broadcast_object_list([1], 0)
    dist.barrier()
    dist.destroy_process_group()
    rpc.shutdown()


def test_process_groups_send_tensors_and_unpickle_nothing(tmp_path: Path) -> None:
    run_workers(_collectives, 2, (str(tmp_path / "store"),))


# The job


def _start_or_say(rank: int, modes: list[bool], world_size: int | None) -> str:
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=20)
    try:
        rpc.init_rpc(
            f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options, restricted=modes[rank]
        )
    except RendezvousError as error:
        return str(error)
    rpc.shutdown()
    return "joined"


def test_mix_of_restricted_and_unrestricted_workers_is_refused() -> None:
    said = run_workers(_start_or_say, 2, ([True, False], 2))
    assert all("worker0 is in restricted mode, and worker1 is not" in text for text in said)
    assert all("restricted=True to init_rpc on every worker" in text for text in said)
    assert run_workers(_start_or_say, 2, ([True, False], 2), env={"FARPROP_RESTRICTED": "1"}) == ["joined"] * 2


def _join_after_another(rank: int) -> str:
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0)
    options = rpc.TensorPipeRpcBackendOptions(init_method=store)
    if rank:
        store.wait(["first"])
    try:
        rpc.init_rpc(f"worker{rank}", rank=rank, rpc_backend_options=options, restricted=rank == 0)
    except RendezvousError as error:
        return str(error)
    finally:
        store.set("first" if rank == 0 else "second", "x")
    store.wait(["second"])
    rpc.shutdown()
    return "joined"


def test_unrestricted_worker_cannot_join_a_restricted_job_later() -> None:
    first, second = run_workers(_join_after_another, 2)
    assert first == "joined"
    assert "worker0 is in restricted mode, and worker1 is not" in second


def _start_with_device_maps(rank: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"worker0": {"cpu": "cpu"}})
    with pytest.raises(UsageError, match="device_maps"):
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options, restricted=True)


def test_device_maps_are_refused() -> None:
    run_workers(_start_with_device_maps, 1)
