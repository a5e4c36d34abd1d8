"""A program as data: tuples, which are fast to send to a worker and easy to shrink."""

from __future__ import annotations

from typing import Any, NamedTuple

# (kind, registers that it sets, registers that it reads, more)
#
# leaf     more = number of a leaf of this worker
# op       more = (name, parameters), see `operators`
# call     more = (worker, block, packing): rpc_sync, and the results
# start    the same with rpc_async; sets a handle
# wait     reads a handle; sets the results
# remote   the same with remote; sets a reference
# here     to_here() of a reference; sets the results
# owned    local_value() of a reference on its owner; sets the results
# wrap     sets a reference to the tensors that it reads, RRef(...)
# off      more = block, which runs here, with grad off
# hook     more = (number of the hook, kind, factor), see `hooks`
Step = tuple[str, tuple[int, ...], tuple[int, ...], Any]


class Leaf(NamedTuple):
    worker: int
    shape: tuple[int, ...]
    kind: str  # "tensor", "parameter", "turned" (not contiguous), "single" (float32)
    has_grad: bool  # .grad has a value before the passes, which must not change
    hooks: tuple[tuple[int, str, int], ...]


class Block(NamedTuple):
    """A function: registers 0 to ``inputs - 1`` are its arguments."""

    inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


class Pass(NamedTuple):
    roots: tuple[int, ...]  # indices of the outputs of the main block
    keep: bool
    where: str  # "here", or "owner": RRef.backward of the one root


class Higher(NamedTuple):
    """Derivatives of higher order. The last pass is recorded; from its gradients, scalars are computed where the
    gradients are, and differentiated in turn.

    With ``inputs``, nothing is accumulated: ``grad`` computes the gradients of these leaves, and of the outputs of the
    main block at ``between``.
    """

    order: int  # 2 or 3
    inputs: tuple[int, ...]
    between: tuple[int, ...]


class Program(NamedTuple):
    seed: int
    workers: int
    exact: bool  # all numbers are small integers, so sums are the same in any order
    mode: str
    leaves: tuple[Leaf, ...]
    blocks: tuple[Block, ...]  # the first is the main one
    passes: tuple[Pass, ...]
    higher: Higher | None = None


def size(program: Program) -> int:
    return sum(len(block.steps) for block in program.blocks) + sum(len(leaf.hooks) for leaf in program.leaves)


def prunes(program: Program) -> bool:
    """Whether passes compute only some gradients. They may retain more than torch's, so each is looked at by itself."""
    return program.higher is not None and bool(program.higher.inputs)


def text(program: Program) -> str:
    """The blocks that the main block reaches, as readable text."""
    lines = [f"seed {program.seed}, {program.workers} workers, {program.mode}, exact={program.exact}"]
    lines += [f"  leaf {number}: {leaf}" for number, leaf in enumerate(program.leaves) if leaf_used(program, number)]
    for number in sorted(reachable(program)):
        block = program.blocks[number]
        lines.append(f"  block {number}({', '.join(f'r{i}' for i in range(block.inputs))}):")
        for kind, sets, reads, more in block.steps:
            left = ", ".join(f"r{r}" for r in sets)
            lines.append(f"    {left or '-'} = {kind} ({', '.join(f'r{r}' for r in reads)}) {more}")
        lines.append(f"    return {', '.join(f'r{r}' for r in block.outputs)}")
    lines += [f"  {one}" for one in (*program.passes, *([program.higher] if program.higher else []))]
    return "\n".join(lines)


def inner(step: Step) -> int | None:
    """The block that a step runs."""
    if step[0] in ("call", "start", "remote"):
        return step[3][1]  # type: ignore[no-any-return]
    return step[3] if step[0] == "off" else None


def reachable(program: Program) -> set[int]:
    found, todo = {0}, [0]
    while todo:
        for step in program.blocks[todo.pop()].steps:
            block = inner(step)
            if block is not None and block not in found:
                found.add(block)
                todo.append(block)
    return found


def leaf_used(program: Program, number: int) -> bool:
    blocks = (program.blocks[b] for b in reachable(program))
    return any(step[0] == "leaf" and step[3] == number for block in blocks for step in block.steps)
