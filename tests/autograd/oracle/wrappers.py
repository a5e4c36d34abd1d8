"""What training programs wrap around autograd, around some of the programs: checkpoints, autocast, clipping.

The seed decides. Checkpoints are there on workers only, because they must not change anything, and for derivatives of
any order. Autocast changes the operator ``mixed``, and clipping all gradients, so these are there in one process, too;
they are for programs with first derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.autograd.oracle.program import Program

MAX_NORM = 0.75


def is_checkpointed(program: Program) -> bool:
    """Whether calls are made inside of checkpoints. Hooks of a block that runs again would be registered again."""
    has_hooks = any(step[0] == "hook" for block in program.blocks for step in block.steps)
    return program.seed % 3 == 1 and not has_hooks


def checkpointed(call: Callable[..., list[Any]], number: int, values: list[Any]) -> list[Any]:
    """Make a call inside of a checkpoint, with something that has to be computed again after it."""
    requires_grad = any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)

    def region(*given: Any) -> tuple[Any, ...]:
        return tuple(_each_once(_same, call(list(given))))

    # Copies, because a checkpoint needs its inputs again, and the program may change its tensors in place meanwhile.
    inputs = _each_once(_copied, values)
    # Without an input that requires grad, torch's reentrant kind computes no gradients at all.
    return list(checkpoint(region, *inputs, use_reentrant=requires_grad and number % 2 == 1))


def _each_once(change: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    """Change each value. One that is there twice stays one."""
    changed = {id(value): change(value) for value in values}
    return [changed[id(value)] for value in values]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(result: Any) -> Any:
    """The same tensor, by an operator that saves its inputs and whose gradients are exact."""
    if isinstance(result, torch.Tensor) and result.layout is torch.strided and not result.is_complex():
        return torch.maximum(result, result)
    return result


def autocast_of(program: Program) -> AbstractContextManager[Any]:
    """The mode that the blocks of a program run in."""
    if program.seed % 4 == 2 and program.higher is None:
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    return nullcontext()


def warm_up() -> None:
    """The first checkpoint of a process imports torch's compiler, which may take longer than a call may."""
    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)


def is_clipped(program: Program) -> bool:
    return program.seed % 5 == 3 and program.higher is None


def clip(leaves: Iterable[torch.Tensor]) -> None:
    """Clip the gradients of leaves in this process by their largest element: that norm is exact in any order."""
    found = [leaf for leaf in leaves if leaf.grad is not None and leaf.grad.numel()]
    largest = max((float(_dense(leaf.grad).abs().max()) for leaf in found), default=0.0)
    factor = MAX_NORM / (largest + 1e-6)
    if factor < 1:
        for leaf in found:
            leaf.grad = leaf.grad * factor  # type: ignore[operator]


def _dense(gradient: Any) -> torch.Tensor:
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient  # type: ignore[no-any-return]
