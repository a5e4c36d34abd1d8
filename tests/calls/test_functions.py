"""The kinds of functions that can be called on another worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from tests.calls import functions as f
from tests.support.openmp import threads_for_operators
from tests.support.workers import cluster, run_workers

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def _all_kinds() -> None:
    a, b = torch.rand(3, 3), torch.rand(3, 3)
    call: Any = lambda fn, *args, **kwargs: rpc.rpc_sync("worker1", fn, args=args, kwargs=kwargs)  # noqa: E731
    assert torch.equal(call(torch.add, a, b), a + b)
    assert torch.equal(call(torch.add, a, b, alpha=2), a + 2 * b)
    assert torch.equal(call(torch.nn.functional.relu, -a), torch.zeros(3, 3))
    assert torch.equal(call(torch.linalg.norm, a), torch.linalg.norm(a))
    assert torch.equal(call(torch.Tensor.mul, a, b), a * b)
    assert call(min, 3, 2) == 2
    assert call(f.add, 1, c=5) == 7
    assert call(f.Counter(5).plus, 2) == 7
    assert call(f.Counter, 9).value == 9
    assert call(f.Counter.of_class, 1) == 101
    assert call(f.Counter.of_nobody, 1) == -1
    assert torch.equal(call(f.coroutine, a), a + 1)
    assert torch.equal(call(f.scripted, a, b), a * b + 1)
    module = torch.jit.script(f.ScriptedModule())
    assert torch.equal(call(module.forward, torch.ones(2)), torch.full((2,), 3.0))
    assert torch.equal(call(module.twice, torch.ones(2)), torch.full((2,), 6.0))
    assert torch.equal(call(f.identity, module)(torch.ones(2)), torch.full((2,), 3.0))
    assert call(lambda x: x * 2, 4) == 8
    factor = 5
    assert call(lambda x: x * factor, 4) == 20
    assert call("{}-{}".format, 1, 2) == "1-2"
    # by rank and by WorkerInfo
    assert rpc.rpc_sync(1, f.own_name) == "worker1"
    assert rpc.rpc_sync(rpc.get_worker_info("worker1"), f.own_name) == "worker1"


def test_every_kind_of_callable(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _all_kinds)


def _async_kinds() -> None:
    futures = [rpc.rpc_async("worker1", f.add, args=(i,)) for i in range(100)]
    assert all(isinstance(future, torch.futures.Future) for future in futures)
    assert torch.futures.wait_all(futures) == [i + 1 for i in range(100)]
    chained = rpc.rpc_async("worker1", f.add, args=(1,)).then(lambda done: done.value() + 10)
    assert chained.wait() == 12
    both = torch.futures.collect_all([rpc.rpc_async("worker1", f.noop), rpc.rpc_async("worker1", f.noop)])
    assert [future.wait() for future in both.wait()] == [None, None]


def test_futures(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _async_kinds)


def _async_functions_free_their_thread() -> None:
    waiting = [rpc.rpc_async("worker1", f.later, args=(i,)) for i in range(20)]
    waiting += [rpc.rpc_async("worker1", f.coroutine_at_gate, args=(20 + i,)) for i in range(20)]
    # There is one worker thread and forty calls wait; other calls still run.
    assert rpc.rpc_sync("worker1", f.add, args=(1,)) == 2
    assert not any(future.done() for future in waiting)
    rpc.rpc_sync("worker1", f.open_gate)
    assert torch.futures.wait_all(waiting) == list(range(40))
    with pytest.raises(RuntimeError, match="must return a torch.futures.Future object"):
        rpc.rpc_sync("worker1", f.later_not_a_future)
    with pytest.raises(KeyError, match="from a coroutine"):
        rpc.rpc_sync("worker1", f.coroutine_that_raises)


def test_async_functions_occupy_no_thread_while_they_wait(env: dict[str, str]) -> None:
    with cluster(2, env, options={"num_worker_threads": 1}) as c:
        c.run(0, _async_functions_free_their_thread)


def _rebind_add() -> None:
    f.add = lambda a, b=1: "rebound"  # type: ignore[assignment]


def _delete_add() -> None:
    del f.Counter


def _call_rebound_and_deleted() -> None:
    assert rpc.rpc_sync("worker1", f.add, args=(1,)) == 2
    rpc.rpc_sync("worker1", _rebind_add)
    assert rpc.rpc_sync("worker1", f.add, args=(1,)) == "rebound"
    assert rpc.rpc_sync("worker1", f.Counter, args=(3,)) is not None
    rpc.rpc_sync("worker1", _delete_add)
    with pytest.raises(RuntimeError, match="RPC pickler does not serialize"):
        rpc.rpc_sync("worker1", f.Counter, args=(3,))


def test_functions_are_looked_up_by_name_at_each_call() -> None:
    with cluster(2) as c:
        c.run(0, _call_rebound_and_deleted)


def _bad_arguments() -> None:
    with pytest.raises(TypeError, match="callable"):
        rpc.rpc_sync("worker1", 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Cannot get WorkerInfo"):
        rpc.rpc_sync(1.5, f.noop)  # type: ignore[arg-type]
    with pytest.raises(
        RuntimeError, match="could not find destination 'nobody'. Workers of this job: worker0, worker1"
    ):
        rpc.rpc_sync("nobody", f.noop)
    with pytest.raises(RuntimeError, match="could not find destination"):
        rpc.rpc_async(7, f.noop)
    with pytest.raises(RuntimeError, match="failed to match any schema"):
        rpc.rpc_sync("worker1", torch.add, args=())
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        rpc.rpc_sync("worker1", f.add)


def test_wrong_arguments_raise() -> None:
    with cluster(2) as c:
        c.run(0, _bad_arguments)


def test_calls_raise_before_init_and_after_shutdown() -> None:
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized: .* Call farprop.rpc.init_rpc first"):
        rpc.rpc_sync("worker1", f.noop)
    with pytest.raises(RuntimeError, match="has not been initialized"):
        rpc.shutdown()


def _call_own_worker(env: dict[str, str]) -> None:
    tensor = torch.ones(3)
    rpc.rpc_sync("worker0", f.fill, args=(tensor, 5.0))
    assert tensor[0] == 1  # the callee gets a copy, as on any other worker
    assert rpc.rpc_sync("worker0", f.own_name) == "worker0"
    assert rpc.rpc_async("worker0", f.chain, args=(10, "worker0", "worker0", "sync")).wait() == 10


def test_calls_to_the_own_worker(env: dict[str, str]) -> None:
    with cluster(1, env, options={"num_worker_threads": 2}) as c:
        c.run(0, _call_own_worker, env)


class DoublingPickler(rpc.internal._InternalRPCPickler):
    def serialize(self, obj: Any) -> Any:
        return super().serialize(obj._replace(args=tuple(2 * arg for arg in obj.args)))


def _custom_pickler() -> None:
    with rpc._use_rpc_pickler(DoublingPickler()):
        assert rpc.rpc_sync("worker1", f.add, args=(10, 20)) == 60
    assert rpc.rpc_sync("worker1", f.add, args=(10, 20)) == 30


def test_a_custom_pickler() -> None:
    with cluster(2) as c:
        c.run(0, _custom_pickler)


async def _threads_of_a_coroutine() -> int:
    return threads_for_operators()


def _calls_with_three_threads(rank: int) -> None:
    torch.set_num_threads(3)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        for to in ("worker1", "worker0"):
            assert rpc.rpc_sync(to, threads_for_operators) == 3
            assert rpc.rpc_sync(to, _threads_of_a_coroutine) == 3
        done = rpc.rpc_async("worker1", f.noop).then(lambda _: threads_for_operators())
        assert done.wait() == 3
    rpc.shutdown()


def test_operators_of_called_functions_use_the_threads_that_torch_was_told_to_use() -> None:
    run_workers(_calls_with_three_threads, 2)
