"""A program on real workers, with farprop's backward passes. These functions run in the workers."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import UsageError
from farprop.optim import clip_grad_norm_
from tests.autograd.oracle import wrappers
from tests.autograd.oracle.interpreter import Interpreter, as_list, as_result, scalar_of
from tests.autograd.oracle.outcome import Outcome
from tests.autograd.oracle.program import Program, prunes

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
        self._is_checkpointed = wrappers.is_checkpointed(program)

    def call(self, worker: int, block: int, packing: str, values: list[Any]) -> list[Any]:
        if self._is_checkpointed:
            return wrappers.checkpointed(partial(self._call_now, worker, block, packing), block, values)
        return self._call_now(worker, block, packing, values)

    def _call_now(self, worker: int, block: int, packing: str, values: list[Any]) -> list[Any]:
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
        found = Outcome(log=self.log, retained=self.retained)
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
            found.gradients[numbers[leaf]] = gradient.detach()
            if gradient.requires_grad and self.program.higher is None:
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


def _scalar_in_context(key: str, context_id: int) -> torch.Tensor | None:
    found = dist_autograd.get_gradients(context_id)
    return scalar_of([found.get(leaf) for leaf in _interpreters[key].leaves.values()])


def _scalar_of_references(references: list[Any]) -> torch.Tensor | None:
    return scalar_of([reference.local_value() for reference in references])


def _reference(key: str, number: int) -> Any:
    leaf = _interpreters[key].leaves.get(number)
    return None if leaf is None else rpc.RRef(leaf)


def _leaf_references(key: str) -> list[rpc.RRef[torch.Tensor]]:
    return [rpc.RRef(leaf) for leaf in _interpreters[key].leaves.values() if leaf.numel()]


def _take_retained(key: str, passes: int) -> None:
    _interpreters[key].take_retained(passes)


def _take_all_retained(program: Program, key: str, names: tuple[str, ...], passes: int) -> None:
    kinds = {step[3][1] for block in program.blocks for step in block.steps if step[0] == "hook"}
    if "retain" in kinds:
        for name in names:
            rpc.rpc_sync(name, _take_retained, args=(key, passes))


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
            with wrappers.autocast_of(program):
                roots = _interpreters[key].run(0, [])
            # Without hooks, calls that nobody waits for may run at the same time as the passes.
            has_hooks = any(step[0] == "hook" for block in program.blocks for step in block.steps)
            if program.seed % 2 or has_hooks or program.higher is not None:
                _settle_all(key, names)
            _run_passes(program, context_id, roots, key, names, total)
            if wrappers.is_clipped(program):
                leaves = [leaf for name in names for leaf in rpc.rpc_sync(name, _leaf_references, args=(key,))]
                clip_grad_norm_(context_id, leaves, wrappers.MAX_NORM, float("inf"))
                del leaves
        finally:
            _settle_all(key, names)
            for end in [rpc.rpc_async(name, _end, args=(key, context_id)) for name in names]:
                total.add(end.wait())
    return total


def _settle_all(key: str, names: tuple[str, ...]) -> None:
    while sum(rpc.rpc_sync(name, _settle, args=(key,)) for name in names):
        pass


def _run_passes(
    program: Program, context_id: int, roots: list[Any], key: str, names: tuple[str, ...], total: Outcome
) -> None:
    higher = program.higher
    for number, one in enumerate(program.passes if higher is None else program.passes[:-1], 1):
        chosen = [roots[r] for r in one.roots]
        if isinstance(chosen[0], rpc.RRef):
            chosen[0].backward(context_id, one.keep)
        else:
            dist_autograd.backward(context_id, chosen, one.keep, mode=program.mode)
        if prunes(program):
            _take_all_retained(program, key, names, number)
    if higher is not None:
        chosen = [roots[r] for r in program.passes[-1].roots]
        if higher.inputs:
            _grads(program, context_id, chosen, roots, key, names, total)
        else:
            _recorded_passes(program, context_id, chosen, key, names)
    if not prunes(program):
        _take_all_retained(program, key, names, 0)


def _recorded_passes(program: Program, context_id: int, roots: list[Any], key: str, names: tuple[str, ...]) -> None:
    assert program.higher is not None
    for order in range(program.higher.order):
        # Gradients of a linear function need no gradients: FAST would wait for them.
        mode = program.mode if order == 0 else "smart"
        dist_autograd.backward(context_id, roots, create_graph=order < program.higher.order - 1, mode=mode)
        calls = [rpc.rpc_async(name, _scalar_in_context, args=(key, context_id)) for name in names]
        roots = [root for call in calls if (root := call.wait()) is not None]
        if not roots:
            return


def _grads(
    program: Program,
    context_id: int,
    roots: list[Any],
    outputs: list[Any],
    key: str,
    names: tuple[str, ...],
    total: Outcome,
) -> None:
    assert program.higher is not None
    order, numbers, between = program.higher
    inputs: list[Any] = []
    owners: list[int] = []
    for number in numbers:
        worker = program.leaves[number].worker
        if worker == 0:
            item = _interpreters[key].leaves.get(number)
        else:
            item = rpc.rpc_sync(names[worker], _reference, args=(key, number))
        if item is not None:
            inputs.append(item)
            owners.append(worker)
    inputs += [outputs[index] for index in between]
    owners += [0] * len(between)
    if not inputs:
        return
    for derivative in range(1, order + 1):
        more = derivative < order
        gradients = dist_autograd.grad(
            context_id, roots, inputs, create_graph=more, retain_graph=True, allow_unused=True
        )
        _take_all_retained(program, key, names, len(program.passes) - 1 + derivative)
        here = [gradient.to_here() if isinstance(gradient, rpc.RRef) else gradient for gradient in gradients]
        total.derivatives.append([None if gradient is None else gradient.detach() for gradient in here])
        roots = []
        for worker, name in enumerate(names):
            mine = [g for g, owner in zip(gradients, owners, strict=True) if owner == worker and g is not None]
            if mine and (worker == 0 or derivative % 2):
                mine = [g if isinstance(g, torch.Tensor) else g.to_here() for g in mine]
                root = scalar_of(mine)
            else:
                root = rpc.rpc_sync(name, _scalar_of_references, args=(mine,)) if mine else None
            roots += [] if root is None else [root]
        if not roots:
            return
