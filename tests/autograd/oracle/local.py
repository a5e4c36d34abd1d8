"""A program in one process, with torch's own backward passes."""

from __future__ import annotations

from typing import Any

import torch

from tests.autograd.oracle.interpreter import Interpreter
from tests.autograd.oracle.outcome import Outcome
from tests.autograd.oracle.program import Program

Tensor = torch.Tensor


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


def run_locally(program: Program) -> Outcome:
    interpreters = make_interpreters(program)
    results = interpreters[0].run(0, [])
    roots = [result.values[0] if isinstance(result, LocalReference) else result for result in results]
    for one in program.passes:
        torch.autograd.backward([roots[r] for r in one.roots], retain_graph=one.keep)
        # Torch may let .grad of two leaves share memory; the next pass would then add to both twice.
        for leaf in (leaf for interpreter in interpreters for leaf in interpreter.leaves.values()):
            leaf.grad = None if leaf.grad is None else leaf.grad.clone()
    outcome = Outcome()
    for interpreter in interpreters:
        outcome.add(
            Outcome(
                {number: leaf.grad for number, leaf in interpreter.leaves.items() if leaf.grad is not None},
                {number: tensor.grad for number, tensor in interpreter.kept if number >= 0},
                interpreter.log,
            )
        )
    return outcome
