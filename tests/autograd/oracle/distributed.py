"""A program on real workers, with farprop's backward passes. These functions run in the workers."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import UsageError
from tests.autograd.oracle.interpreter import Interpreter, as_list, as_result
from tests.autograd.oracle.outcome import Outcome
from tests.autograd.oracle.program import Program

_numbers = itertools.count()
_interpreters: dict[str, WorkerInterpreter] = {}


class WorkerInterpreter(Interpreter):
    """This worker. Rank 0 of a program is the worker that runs it; the others have the ranks after it."""

    def __init__(self, program: Program, rank: int, key: str, names: tuple[str, ...]) -> None:
        super().__init__(program, rank)
        self._key = key
        self._names = names
        self._created: list[Any] = []
        self.keeps_nodes = any(step[0] in ("start", "remote") for block in program.blocks for step in block.steps)
        self._old: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what .grad was, and a copy

    def call(self, worker: int, block: int, packing: str, values: list[Any]) -> list[Any]:
        return as_list(self._call(rpc.rpc_sync, worker, block, packing, values))

    def start(self, worker: int, block: int, packing: str, values: list[Any]) -> Any:
        return self._call(rpc.rpc_async, worker, block, packing, values)

    def wait(self, handle: Any) -> list[Any]:
        return as_list(handle.wait())

    def remote(self, worker: int, block: int, packing: str, values: list[Any]) -> Any:
        reference = self._call(rpc.remote, worker, block, packing, values)
        self._created.append(reference._get_future())
        return reference

    def settle(self) -> int:
        """Wait for this worker's calls that the program does not wait for; return their number."""
        created, self._created = self._created, []
        for future in created:
            future.wait()
        return len(created)

    def here(self, reference: Any) -> list[Any]:
        return as_list(reference.to_here())

    def owned(self, reference: Any) -> list[Any]:
        return as_list(reference.local_value())

    def wrap(self, values: list[Any]) -> Any:
        return rpc.RRef(as_result(values))

    def leaf(self, number: int) -> torch.Tensor:
        leaf = super().leaf(number)
        with self._lock:
            if self.program.leaves[number].has_grad and number not in self._old:
                leaf.grad = torch.full_like(leaf, 7, requires_grad=False)
                self._old[number] = leaf.grad, leaf.grad.clone()
        return leaf

    def _call(self, how: Callable[..., Any], worker: int, block: int, packing: str, values: list[Any]) -> Any:
        """Make a call; ``packing`` says where in its arguments the values are."""
        key, to = self._key, self._names[worker]
        if packing == "list":
            return how(to, _run, args=(key, block, values))
        if packing == "dict":
            return how(to, _run, args=(key, block, {f"v{i:02}": value for i, value in enumerate(values)}))
        if packing == "names":
            return how(to, _run, args=(key, block), kwargs={f"v{i:02}": value for i, value in enumerate(values)})
        if packing == "closure":
            return how(to, lambda: _run(key, block, *values))
        return how(to, _run, args=(key, block, *values))

    def outcome(self, context_id: int) -> Outcome:
        """This worker's part of the outcome, after the passes."""
        found = Outcome(log=self.log, retained={number: tensor.grad for number, tensor in self.kept if number >= 0})
        try:
            gradients = dist_autograd.get_gradients(context_id)
        except UsageError:
            gradients = {}  # the program did not use this worker
        numbers = {leaf: number for number, leaf in self.leaves.items()}
        storages: set[int] = set()
        for leaf, gradient in gradients.items():
            if leaf not in numbers:
                found.problems.append(f"a gradient of shape {tuple(gradient.shape)} for a leaf of nobody's")
                continue
            found.gradients[numbers[leaf]] = gradient
            if gradient.requires_grad:
                found.problems.append(f"the gradient of leaf {numbers[leaf]} requires grad")
            if gradient.layout is torch.strided and gradient.numel() > 1:  # torch, too, shares single elements
                if gradient.untyped_storage().data_ptr() in storages:
                    found.problems.append(f"the gradient of leaf {numbers[leaf]} shares memory with another")
                storages.add(gradient.untyped_storage().data_ptr())
        for number, leaf in self.leaves.items():
            old = self._old.get(number)
            if leaf.grad is not (old and old[0]) or (old and not torch.equal(*old)):
                found.problems.append(f".grad of leaf {number} has changed")
        return found


def _run(key: str, block: int, *values: Any, **named: Any) -> Any:
    if named or (len(values) == 1 and isinstance(values[0], list | dict)):
        values = tuple(as_list(named or values[0]))
    results = _interpreters[key].run(block, values)
    if len(results) > 1 and block % 3 == 0:
        return {f"v{i:02}": result for i, result in enumerate(results)}
    return as_result(results) if block % 3 == 1 or len(results) == 1 else tuple(results)


def _begin(key: str, data: bytes, rank: int, names: tuple[str, ...]) -> None:
    _interpreters[key] = WorkerInterpreter(pickle.loads(data), rank, key, names)


def _settle(key: str) -> int:
    return _interpreters[key].settle()


def _end(key: str, context_id: int) -> Outcome:
    return _interpreters.pop(key).outcome(context_id)


def run_distributed(program: Program, world: int) -> Outcome:
    """Run a program from this worker."""
    me = rpc.get_worker_info().id
    names = tuple(f"worker{(me + i) % world}" for i in range(program.workers))
    key = f"{me}:{next(_numbers)}"
    data = pickle.dumps(program)
    for begin in [rpc.rpc_async(name, _begin, args=(key, data, i, names)) for i, name in enumerate(names)]:
        begin.wait()
    total = Outcome()
    with dist_autograd.context() as context_id:
        try:
            roots = _interpreters[key].run(0, [])
            # Without hooks, calls that nobody waits for may run at the same time as the passes.
            if program.seed % 2 or any(step[0] == "hook" for block in program.blocks for step in block.steps):
                _settle_all(key, names)
            _run_passes(program, context_id, roots)
        finally:
            _settle_all(key, names)
            for end in [rpc.rpc_async(name, _end, args=(key, context_id)) for name in names]:
                total.add(end.wait())
    return total


def _settle_all(key: str, names: tuple[str, ...]) -> None:
    while sum(rpc.rpc_sync(name, _settle, args=(key,)) for name in names):
        pass


def _run_passes(program: Program, context_id: int, roots: list[Any]) -> None:
    for one in program.passes:
        chosen = [roots[r] for r in one.roots]
        if isinstance(chosen[0], rpc.RRef):
            chosen[0].backward(context_id, one.keep)
        else:
            dist_autograd.backward(context_id, chosen, one.keep, mode=program.mode)
