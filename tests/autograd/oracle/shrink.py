"""Reduces a failing program to the steps that make it fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.autograd.oracle.local import LocalInterpreter, make_interpreters
from tests.autograd.oracle.program import Block, Program, Step, leaf_used, reachable

Fails = Callable[[Program], bool]


def shrunk(program: Program, fails: Fails) -> Program:
    """The smallest program found that still fails. Removes one step at a time until none can be removed."""
    while True:
        for trial in _smaller(program):
            if fails(trial):
                program = trial
                break
        else:
            return program


def _smaller(program: Program) -> Iterator[Program]:
    if program.mode == "fast":
        yield program._replace(mode="smart")
    for number in range(len(program.passes)):
        if len(program.passes) > 1:
            yield program._replace(passes=program.passes[:number] + program.passes[number + 1 :])
        one = program.passes[number]
        for root in one.roots if len(one.roots) > 1 else ():
            fewer = one._replace(roots=tuple(r for r in one.roots if r != root))
            yield program._replace(passes=(*program.passes[:number], fewer, *program.passes[number + 1 :]))
    for number, leaf in enumerate(program.leaves):
        if leaf_used(program, number):
            simpler = [leaf._replace(hooks=tuple(h for h in leaf.hooks if h != hook)) for hook in leaf.hooks]
            if leaf.kind != "tensor" or leaf.has_grad:
                simpler.append(leaf._replace(kind="tensor", has_grad=False))
            for one_leaf in simpler:
                yield program._replace(leaves=(*program.leaves[:number], one_leaf, *program.leaves[number + 1 :]))
    shapes = _shapes(program)
    for number in sorted(reachable(program)):
        block = program.blocks[number]
        for index, step in enumerate(block.steps):
            without = block.steps[:index] + block.steps[index + 1 :]
            if not set(step[1]) & _read(block):
                yield _with(program, number, block._replace(steps=without))
            elif step[0] != "const" and all(shapes.get((number, r)) is not None for r in step[1]):
                constant: Step = ("const", step[1], (), tuple(shapes[number, r] for r in step[1]))
                steps = (*block.steps[:index], constant, *block.steps[index + 1 :])
                yield _with(program, number, block._replace(steps=steps))


def _with(program: Program, number: int, block: Block) -> Program:
    return program._replace(blocks=(*program.blocks[:number], block, *program.blocks[number + 1 :]))


def _read(block: Block) -> set[int]:
    return {r for _, _, reads, _ in block.steps for r in reads} | set(block.outputs)


class _Noting(LocalInterpreter):
    """Records the shape of every tensor of every block."""

    shapes: dict[tuple[int, int], torch.Size | None]

    def run(self, block: int, values: object) -> list[object]:  # type: ignore[override]
        code = self.program.blocks[block]
        registers = dict(enumerate(values))  # type: ignore[call-overload]
        for kind, sets, reads, more in code.steps:
            registers.update(zip(sets, self.step(kind, [registers[r] for r in reads], more), strict=True))
        for register, value in registers.items():
            self.shapes[block, register] = value.shape if isinstance(value, torch.Tensor) else None
        return [registers[r] for r in code.outputs]


def _shapes(program: Program) -> dict[tuple[int, int], torch.Size | None]:
    interpreters = make_interpreters(program, hooked=False, kind=_Noting)
    shapes: dict[tuple[int, int], torch.Size | None] = {}
    for interpreter in interpreters:
        interpreter.shapes = shapes  # type: ignore[attr-defined]
    interpreters[0].run(0, [])
    return shapes
