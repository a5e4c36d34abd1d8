"""``farprop.testing``: a fault plan makes messages fail, get lost, arrive late or cut the connection."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, InjectedFaultError, RpcTimeoutError, UsageError
from farprop.testing import FaultPlan, faults
from farprop.transport.fault_injection import FaultAction
from farprop.wire.fast_codec import encode_call
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import all_empty, become_empty, owned, wait_until
from tests.support.workers import Cluster, run_workers


def _decisions(plan: FaultPlan, count: int, worker: str = "worker1") -> list[FaultAction | None]:
    """The decisions of the plan for ``count`` small calls."""
    message = encode_call(None, (1,), {})
    message.name = b"tests.calls.functions:add"
    found = [plan.decide(worker, message) for _ in range(count)]
    return [None if decision is None else decision.action for decision in found]


@pytest.mark.parametrize(
    "rule",
    [
        lambda plan: plan.fail(types=["NO_SUCH_CALL"]),
        lambda plan: plan.lose(types=["PYTHON_CALL", "RREF"]),
        lambda plan: plan.delay(1.0, types="PYTHON_CALL"),
        lambda plan: plan.fail(probability=1.5),
        lambda plan: plan.lose(probability=-0.1),
        lambda plan: plan.delay(0.1, probability=float("nan")),
        lambda plan: plan.delay(-1.0),
        lambda plan: plan.delay(float("nan")),
        lambda plan: plan.fail_at("worker1", 0),
        lambda plan: plan.fail_at("worker1", -1),
        lambda plan: plan.cut_at("worker1", 0),
        lambda plan: plan.lose(sends=0),
    ],
)
def test_invalid_rules_raise(rule: Callable[[FaultPlan], None]) -> None:
    plan = FaultPlan()
    for _ in range(2):
        with pytest.raises(ValueError):
            rule(plan)
        assert _decisions(plan, 5) == [None] * 5  # no rule was added
    assert not plan.counts


def test_a_plan_needs_a_worker() -> None:
    with pytest.raises(UsageError, match="has not been initialized"), faults.inject():
        pass


def test_the_same_seed_gives_the_same_faults() -> None:
    def with_seed(seed: int) -> tuple[list[FaultAction | None], dict[str, int]]:
        plan = FaultPlan(seed)
        plan.fail(probability=0.2)
        plan.lose(types=["PYTHON_CALL"], probability=0.2)
        plan.delay(0.5, worker="worker1", probability=0.5)
        return _decisions(plan, 500), dict(plan.counts)

    actions, counted = with_seed(3)
    assert (actions, counted) == with_seed(3)
    assert actions != with_seed(4)[0]
    assert 60 < actions.count(FaultAction.FAIL) < 140
    assert 40 < actions.count(FaultAction.LOSE) < 120
    assert 100 < actions.count(FaultAction.DELAY) < 220
    assert counted == {
        "fail PYTHON_CALL": actions.count(FaultAction.FAIL),
        "lose PYTHON_CALL": actions.count(FaultAction.LOSE),
        "delay PYTHON_CALL": actions.count(FaultAction.DELAY),
    }


def test_rules_select_by_worker_count_and_order() -> None:
    plan = FaultPlan()
    assert _decisions(plan, 2) == [None, None]
    plan.fail_at("worker1", 2)
    plan.cut_at("worker1", 2)  # the first rule that fits decides
    plan.cut_at("worker1", 4)
    plan.lose(worker="worker2")
    assert _decisions(plan, 5) == [None, FaultAction.FAIL, None, FaultAction.CUT, None]
    assert _decisions(plan, 2, "worker2") == [FaultAction.LOSE, FaultAction.LOSE]
    assert _decisions(plan, 2, "worker0") == [None, None]
    assert plan.counts == {"fail PYTHON_CALL": 1, "cut PYTHON_CALL": 1, "lose PYTHON_CALL": 2}


def _fail() -> None:
    rref = rpc.remote("worker1", f.add, args=(1,))
    assert rref.to_here() == 2
    with faults.inject() as plan:
        plan.fail_at("worker1", 3)
        assert [rpc.rpc_sync("worker1", f.add, args=(i,)) for i in range(2)] == [1, 2]
        with pytest.raises(InjectedFaultError, match="worker1"):
            rpc.rpc_sync("worker1", f.add, args=(3,))
        assert rpc.rpc_sync("worker1", f.add, args=(4,)) == 5
        assert plan.counts == {"fail PYTHON_CALL": 1}
    kinds: dict[str, Callable[[], Any]] = {
        "PYTHON_CALL": lambda: rpc.rpc_sync("worker1", f.noop),
        "SCRIPT_CALL": lambda: rpc.rpc_async("worker1", torch.add, args=(torch.ones(1), 1)).wait(),
        "PYTHON_REMOTE_CALL": lambda: rpc.remote("worker1", f.noop).to_here(),
        "SCRIPT_REMOTE_CALL": lambda: rpc.remote("worker1", f.scripted, args=(torch.ones(1), torch.ones(1))).to_here(),
        "PYTHON_RREF_FETCH_CALL": rref.to_here,
    }
    for kind in kinds:
        with faults.inject() as plan:
            plan.fail(types=[kind])
            for other, use in kinds.items():
                if other == kind:
                    with pytest.raises(InjectedFaultError):
                        use()
                    continue
                try:
                    use()
                except InjectedFaultError:
                    assert kind == "PYTHON_RREF_FETCH_CALL"  # a part of the other uses
                    assert "REMOTE" in other
        assert plan.counts[f"fail {kind}"] >= 1
        use()  # the plan is over


def _lose() -> None:
    with faults.inject() as plan:
        plan.lose(types=["PYTHON_CALL"])
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", g.note, args=("lost",), timeout=0.1)
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_async("worker1", g.note, args=("lost",), timeout=0.1).wait()
        assert torch.equal(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)), torch.full((1,), 2.0))
    assert plan.counts == {"lose PYTHON_CALL": 2}
    assert "lost" not in rpc.rpc_sync("worker1", g.noted)


def _delay() -> None:
    rpc.rpc_sync("worker1", f.noop)
    with faults.inject() as plan:
        plan.delay(0.3, types=["PYTHON_CALL"])
        began = time.monotonic()
        late = rpc.rpc_async("worker1", f.add, args=(1,))
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))  # overtakes it
        assert not late.done()
        assert late.wait() == 2
        assert time.monotonic() - began >= 0.3
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", f.noop, timeout=0.1)
    assert plan.counts == {"delay PYTHON_CALL": 2}


def _cut() -> None:
    rref = rpc.remote("worker1", f.add, args=(1,))
    rref._get_future().wait()
    with faults.inject() as plan:
        plan.cut_at("worker1", 1)
        with pytest.raises(ConnectionLostError):
            rpc.rpc_sync("worker1", f.noop)
        assert rpc.rpc_sync("worker1", f.add, args=(1,)) == 2  # on a new connection, with the same plan
        plan.cut_at("worker1", 1)
        assert rref.to_here() == 2  # which retries
    assert plan.counts["cut PYTHON_CALL"] == 1
    assert plan.counts["cut PYTHON_RREF_FETCH_CALL"] == 1


def _nested() -> None:
    with faults.inject() as outer:
        outer.fail(types=["PYTHON_CALL"])
        with faults.inject() as inner:
            rpc.rpc_sync("worker1", f.noop)
        with pytest.raises(InjectedFaultError):
            rpc.rpc_sync("worker1", f.noop)
    rpc.rpc_sync("worker1", f.noop)
    assert not inner.counts


def _operations_are_repeated() -> None:
    """Each batch fails twice. All operations are still executed, later."""
    with faults.inject() as plan:
        plan.fail(types=["RREF_USER_DELETE", "RREF_CHILD_ACCEPT", "RREF_FORK_REQUEST"], sends=2)
        thing = rpc.remote("worker1", g.Thing, args=("repeated",))
        mine = rpc.rpc_sync("worker1", g.own, args=("repeated",))
        third = rpc.rpc_sync("worker2", f.identity, args=(thing,))
        assert third.rpc_sync().plus(1) == 1
        del thing, mine, third
        wait_until(lambda: rpc.rpc_sync("worker1", g.things, args=("repeated",)) == 0)
    assert plan.counts["fail RREF_USER_DELETE"] >= 2
    assert plan.counts["fail RREF_CHILD_ACCEPT"] >= 2
    assert plan.counts["fail RREF_FORK_REQUEST"] >= 2


@pytest.mark.parametrize(
    "body", [_fail, _lose, _delay, _cut, _nested, _operations_are_repeated], ids=lambda body: body.__name__
)
def test_injected_faults(workers: Cluster, body: Any) -> None:
    workers.run(0, body)
    all_empty(workers)


def _with_faulty_backend(rank: int, options: dict[str, Any], body: Any) -> None:
    import farprop.rpc._testing  # noqa: F401 - registers the backend

    backend = rpc.backend_registry.BackendType["FAULTY_TENSORPIPE"]
    made = rpc.construct_rpc_backend_options(backend, init_method="env://", num_worker_threads=4, **options)
    rpc.init_rpc(f"worker{rank}", backend, rank, 2, made)
    if rank == 0:
        body()
        with faults.inject():  # replaces the backend's plan
            rpc.rpc_sync("worker1", g.open_gate, args=("end",))
    else:
        g.at_gate("end")
    with faults.inject():
        rpc.shutdown()


def _references_still_work() -> None:
    rref = rpc.remote("worker1", f.add, args=(1,))
    assert rpc.rpc_sync("worker1", f.identity, args=(rref,)).to_here() == 2
    mine = rpc.rpc_sync("worker1", f.identity, args=(rpc.RRef(5),))
    assert mine.to_here() == 5
    del rref, mine
    become_empty()
    wait_until(lambda: rpc.rpc_sync("worker1", owned) == 0)


def test_the_faulty_backend_repeats_operations() -> None:
    options = {"messages_to_fail": ["RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE"], "num_fail_sends": 3}
    run_workers(_with_faulty_backend, 2, (options, _references_still_work))


def _calls_fail() -> None:
    with pytest.raises(InjectedFaultError):
        rpc.rpc_sync("worker1", f.noop)
    rref = rpc.remote("worker1", f.add, args=(torch.ones(1),))
    with pytest.raises(InjectedFaultError, match="RRef creation"):
        rref.to_here()
    began = time.monotonic()
    assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)) == 2
    assert time.monotonic() - began >= 0.3
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1), timeout=0.1)
    with faults.inject() as plan:
        rpc.rpc_sync("worker1", f.noop)
    assert not plan.counts
    with pytest.raises(InjectedFaultError):  # the backend's own plan holds again
        rpc.rpc_sync("worker1", f.noop)


def test_the_faulty_backend_fails_and_delays_calls() -> None:
    options = {
        "messages_to_fail": ["PYTHON_CALL", "PYTHON_REMOTE_CALL"],
        "messages_to_delay": {"SCRIPT_CALL": 0.3},
        "num_fail_sends": 1,
    }
    run_workers(_with_faulty_backend, 2, (options, _calls_fail))


def _wrong_options(rank: int) -> None:
    import farprop.rpc._testing  # noqa: F401

    backend = rpc.backend_registry.BackendType["FAULTY_TENSORPIPE"]
    with pytest.raises(TypeError, match="FaultyTensorPipeRpcBackendOptions"):
        rpc.init_rpc("worker0", backend, 0, 1, rpc.TensorPipeRpcBackendOptions())
    made = rpc.construct_rpc_backend_options(backend, messages_to_fail=["NOTHING"], num_fail_sends=1)
    with pytest.raises(ValueError, match="NOTHING"):
        rpc.init_rpc("worker0", backend, 0, 1, made)


def test_wrong_options_of_the_faulty_backend() -> None:
    run_workers(_wrong_options, 1)
