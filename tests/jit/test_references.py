"""References in compiled code."""

# TorchScript reads these annotations. They must not be strings.
# ruff: noqa: UP006, UP035

import io
from typing import Dict, List, Tuple

import pytest
import torch
from torch import Tensor

import farprop.rpc as rpc
from farprop.rpc import RRef
from tests.jit import functions as f
from tests.references.looking import wait_until
from tests.support.workers import Cluster, cluster


def _made_and_passed() -> None:
    @torch.jit.script
    def make_and_pass(x: Tensor) -> Tuple[Tensor, RRef[Tensor]]:
        made = rpc.remote("worker1", f.add, (x, x))
        many: List[RRef[Tensor]] = [made, made]
        by_name: Dict[str, RRef[Tensor]] = {"made": many[1]}
        same = by_name["made"]
        here = f.total(made, 1)
        there = rpc.rpc_sync("worker1", f.total, (same, 10))
        elsewhere = rpc.rpc_sync("worker2", f.total, (many[0], 100))
        return here + there + elsewhere, same

    found, rref = make_and_pass(torch.ones(2))
    assert found.item() == 444.0
    assert isinstance(rref, RRef)
    assert rref.owner_name() == "worker1"
    assert torch.equal(rref.to_here(), torch.full((2,), 2.0))
    assert f.total(rref, 1).item() == 4.0


def test_references_are_created_and_passed(workers: Cluster) -> None:
    workers.run(0, _made_and_passed)


def _make_and_drop() -> None:
    @torch.jit.script
    def make(x: Tensor) -> Tensor:
        return rpc.remote("worker1", f.add, (x, x)).to_here()

    for _ in range(10):
        make(torch.ones(2))
    rref = rpc.remote("worker1", f.add, args=(torch.ones(2), torch.ones(2)))
    for _ in range(10):
        f.total(rref, 1)
    del rref


def _owned() -> int:
    return len([one for one in rpc.live_references() if one.role == "owner"])


def test_compiled_code_frees_references() -> None:
    with cluster(2) as job:  # a job of its own, because references of other tests may be freed later
        job.run(0, _make_and_drop)
        wait_until(lambda: job.run(1, _owned) == 0)


def _owner() -> None:
    @torch.jit.script
    def owner_of(rref: RRef[Tensor]) -> Tuple[str, int, str, bool]:
        owner = rref.owner()
        return owner.name, owner.id, rref.owner_name(), rref.is_owner()

    @torch.jit.script
    def sum_on_owner(rref: RRef[Tensor]) -> Tensor:
        return rpc.rpc_sync(rref.owner(), f.total, (rref, 1))

    rref = rpc.remote("worker1", f.add, args=(torch.ones(2), torch.ones(2)))
    assert owner_of(rref) == ("worker1", 1, "worker1", False)
    assert sum_on_owner(rref).item() == 4.0
    assert owner_of(RRef(torch.ones(1))) == ("worker0", 0, "worker0", True)


def test_the_owner(workers: Cluster) -> None:
    workers.run(0, _owner)


def _values() -> None:
    @torch.jit.script
    def local(rref: RRef[Tensor]) -> Tensor:
        return rref.local_value() + 1

    assert local(RRef(torch.ones(()))).item() == 2.0
    assert local(RRef(3)).item() == 4.0  # a number where a tensor is declared
    there = rpc.remote("worker1", f.add, args=(torch.ones(2), torch.ones(2)))
    with pytest.raises(RuntimeError, match=r"Can't call RRef\.local_value\(\) on a non-owner.*on worker1"):
        local(there)
    with pytest.raises(RuntimeError, match="Tensor"):
        local(RRef("no tensor"))
    with pytest.raises(RuntimeError, match="only allowed inside RPC calls"):
        _save(there)


@torch.jit.script
def _save(rref: RRef[Tensor]) -> None:
    torch.save(rref, "never written")


def test_values(workers: Cluster) -> None:
    workers.run(0, _values)


def _containers() -> None:
    made = rpc.remote("worker1", f.numbers, args=(2,))
    assert rpc.rpc_sync("worker1", f.append, args=(made, 7)) == 3
    assert rpc.rpc_sync("worker1", f.append, args=(made, 8)) == 4
    assert made.to_here() == [0, 1, 7, 8]
    made.rpc_sync().append(9)
    assert made.to_here() == [0, 1, 7, 8, 9]
    empty = rpc.remote("worker1", f.numbers, args=(0,))
    assert rpc.rpc_sync("worker1", f.append, args=(empty, 7)) == 1
    assert empty.to_here() == [7]
    table = rpc.remote("worker1", f.table)
    rpc.rpc_sync("worker1", f.put, args=(table, "a", torch.ones(2)))
    found = table.to_here()
    assert list(found) == ["a"]
    assert torch.equal(found["a"], torch.ones(2))


def test_compiled_code_changes_lists_and_dicts_of_references(workers: Cluster) -> None:
    workers.run(0, _containers)


def _modules() -> None:
    layer = rpc.remote("worker1", f.make_layer)
    assert rpc.rpc_sync("worker1", f.run_layer, args=(layer, torch.ones(()))).item() == 2.0
    with pytest.raises(RuntimeError, match="It can't be sent through RPC from owner"):
        f.run_layer(layer, torch.ones(()))
    own = RRef(torch.jit.script(f.Double()), f.Layer)
    assert f.run_layer(own, torch.ones(())).item() == 2.0
    with pytest.raises(RuntimeError, match="must provide its ModuleInterface type hint"):
        RRef(torch.jit.script(f.Double()))


def test_references_to_compiled_modules(workers: Cluster) -> None:
    workers.run(0, _modules)


class _Holding(torch.nn.Module):
    def __init__(self, one: RRef[Tensor], many: List[RRef[Tensor]], named: Dict[str, RRef[Tensor]]) -> None:
        super().__init__()
        self.one = one
        self.many = many
        self.named = named

    def forward(self) -> Tensor:
        found = self.one.to_here() + self.named["a"].to_here()
        for rref in self.many:
            found = found + rref.to_here()
        return found


class _Declaring(torch.nn.Module):
    pair: RRef[f.Pair]

    def __init__(self, pair: RRef[f.Pair]) -> None:
        super().__init__()
        self.pair = pair

    def forward(self) -> Tensor:
        return self.pair.to_here().total()


class _Undeclared(torch.nn.Module):
    def __init__(self, held: RRef[object]) -> None:
        super().__init__()
        self.held = held

    def forward(self) -> str:
        return self.held.owner_name()


def _attributes() -> None:
    rref = rpc.remote("worker1", f.add, args=(torch.ones(()), torch.ones(())))
    module = torch.jit.script(_Holding(rref, [rref, rref], {"a": rref}))
    assert module().item() == 8.0
    with pytest.raises(RuntimeError):
        torch.jit.save(module, io.BytesIO())
    assert torch.jit.script(_Declaring(RRef(f.Pair(torch.ones(()), 2))))().item() == 3.0
    with pytest.raises(RuntimeError, match=r"Declare the type of the attribute"):
        torch.jit.script(_Undeclared(RRef(object())))


def test_attributes_of_modules(workers: Cluster) -> None:
    workers.run(0, _attributes)
