"""A program in one process, with torch's own backward passes."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tests.autograd.oracle import wrappers
from tests.autograd.oracle.interpreter import Interpreter, scalar_of
from tests.autograd.oracle.outcome import Outcome
from tests.autograd.oracle.program import Program, prunes

Tensor = torch.Tensor
SPARSE_ERROR = "add(sparse, dense) is not supported"


class LocalReference:
    def __init__(self, owner: int, values: list[Any]) -> None:
        self.owner = owner
        self.values = values


class LocalInterpreter(Interpreter):
    """A simulated worker. A message copies its values, and callees don't see their callers' modes."""

    interpreters: list[LocalInterpreter]

    def call(self, worker: int, block: int, packing: str, values: list[Any]) -> list[Any]:
        return self.copied(self._run(worker, block, values))

    def start(self, worker: int, block: int, packing: str, values: list[Any]) -> Any:
        return self.copied(self._run(worker, block, values))

    def wait(self, handle: Any) -> list[Any]:
        return handle  # type: ignore[no-any-return]

    def remote(self, worker: int, block: int, packing: str, values: list[Any]) -> Any:
        return LocalReference(worker, self._run(worker, block, values))

    def here(self, reference: Any) -> list[Any]:
        return reference.values if reference.owner == self.rank else self.copied(reference.values)

    def owned(self, reference: Any) -> list[Any]:
        assert reference.owner == self.rank
        return reference.values  # type: ignore[no-any-return]

    def wrap(self, values: list[Any]) -> Any:
        return LocalReference(self.rank, values)

    def _run(self, worker: int, block: int, values: list[Any]) -> list[Any]:
        copies = self.copied(values, as_sent=True)
        with torch.enable_grad():
            return self.interpreters[worker].run(block, copies)

    def copied(self, values: list[Any], as_sent: bool = False) -> list[Any]:
        """The values as the receiver gets them. With grad off, a sent tensor may still be a leaf at the receiver."""
        copies: dict[int, Any] = {}
        for value in values:
            if not isinstance(value, Tensor):
                copies[id(value)] = value
            elif torch.is_grad_enabled():
                copies[id(value)] = value.clone()
            else:
                copies[id(value)] = value.detach().clone().requires_grad_(as_sent and value.requires_grad)
        return [copies[id(value)] for value in values]


def make_interpreters(
    program: Program, hooked: bool = True, kind: type[LocalInterpreter] = LocalInterpreter
) -> list[LocalInterpreter]:
    interpreters = [kind(program, rank, hooked) for rank in range(program.workers)]
    for interpreter in interpreters:
        interpreter.interpreters = interpreters
    return interpreters


def _run_sparse_first(roots: list[Tensor]) -> None:
    """Have torch's engine run nodes with sparse gradients, those in front and those behind, before others if it can."""
    users: dict[Any, list[Any]] = {}
    seen: set[Any] = set()
    todo = [root.grad_fn for root in roots]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            for following, _ in node.next_functions:
                users.setdefault(following, []).append(node)
                todo.append(following)
    first: set[Any] = set()
    sparse = [node for node in seen if getattr(node, "_saved_sparse", False)]
    for neighbours in (users, {node: [n for n, _ in node.next_functions if n is not None] for node in seen}):
        todo = [following for node in sparse for following in neighbours.get(node, ())]
        while todo:
            node = todo.pop()
            if node not in first:
                first.add(node)
                todo += neighbours.get(node, ())
    first.update(sparse)
    for node in seen:
        if node.next_functions:  # not those of leaves, which come last in any case
            node._set_sequence_nr(int(node in first))


def _backward(interpreters: list[LocalInterpreter], roots: list[Tensor], keep_graph: bool, create_graph: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward")  # of cycles, which end with the run
        torch.autograd.backward(roots, retain_graph=keep_graph, create_graph=create_graph)
    # Torch may let .grad of two leaves share memory; the next pass would then add to both twice.
    for leaf in (leaf for interpreter in interpreters for leaf in interpreter.leaves.values()):
        leaf.grad = None if leaf.grad is None else leaf.grad.clone()


def _grads(
    program: Program,
    interpreters: list[LocalInterpreter],
    roots: list[Tensor],
    outputs: list[Any],
    outcome: Outcome,
    sparse_first: bool,
) -> None:
    assert program.higher is not None
    order, numbers, between = program.higher
    places = {number: program.leaves[number].worker for number in numbers}
    leaves = {n: interpreters[worker].leaves[n] for n, worker in places.items() if n in interpreters[worker].leaves}
    inputs = [*leaves.values(), *[outputs[index] for index in between]]
    if not inputs:
        return
    for derivative in range(1, order + 1):
        more = derivative < order
        if sparse_first:
            _run_sparse_first(roots)
        gradients = torch.autograd.grad(roots, inputs, create_graph=more, retain_graph=True, allow_unused=True)
        outcome.derivatives.append(list(gradients))
        _take_retained(interpreters, len(program.passes) - 1 + derivative)
        by_worker = [
            [g for n, g in zip(leaves, gradients, strict=False) if places[n] == w] for w in range(len(interpreters))
        ]
        by_worker[0] += gradients[len(leaves) :]
        roots = [scalar.clone() for scalar in map(scalar_of, by_worker) if scalar is not None]
        if not roots:
            return


def _take_retained(interpreters: list[LocalInterpreter], passes: int) -> None:
    for interpreter in interpreters:
        interpreter.take_retained(passes)


def may_add_dense_to_sparse(program: Program) -> bool:
    """Whether torch's own passes of a program fail if they add gradients in another order.

    In grad mode, torch's engine adds a sparse gradient to a dense one, but fails to add a dense one to a sparse one.
    Which comes first depends on the order in which it runs nodes, and that is another one on workers.
    """
    try:
        run_locally(program, sparse_first=True)
    except RuntimeError as error:
        return SPARSE_ERROR in str(error)
    return False


def run_locally(program: Program, sparse_first: bool = False) -> Outcome:
    interpreters = make_interpreters(program)
    with wrappers.autocast_of(program):
        results = interpreters[0].run(0, [])
    roots = [result.values[0] if isinstance(result, LocalReference) else result for result in results]
    outcome = Outcome()
    higher = program.higher
    *earlier, last = program.passes
    for number, one in enumerate(earlier, 1):
        _backward(interpreters, [roots[r] for r in one.roots], one.keep, create_graph=False)
        if prunes(program):
            _take_retained(interpreters, number)
    chosen = [roots[r] for r in last.roots]
    if higher is None:
        _backward(interpreters, chosen, last.keep, create_graph=False)
    elif higher.inputs:
        _grads(program, interpreters, chosen, roots, outcome, sparse_first)
    else:
        for order in range(higher.order):
            is_last = order == higher.order - 1
            if sparse_first:
                _run_sparse_first(chosen)
            _backward(interpreters, chosen, not is_last, not is_last)
            scalars = [scalar_of([leaf.grad for leaf in i.leaves.values()]) for i in interpreters]
            chosen = [scalar.clone() for scalar in scalars if scalar is not None]
            if not chosen:
                break
    if not prunes(program):
        _take_retained(interpreters, 0)
    if wrappers.is_clipped(program):
        wrappers.clip(leaf for interpreter in interpreters for leaf in interpreter.leaves.values())
    for interpreter in interpreters:
        outcome.add(
            Outcome(
                {n: leaf.grad.detach() for n, leaf in interpreter.leaves.items() if leaf.grad is not None},
                interpreter.retained,
                interpreter.log,
            )
        )
        for leaf in interpreter.leaves.values():
            leaf.grad = None
    return outcome
