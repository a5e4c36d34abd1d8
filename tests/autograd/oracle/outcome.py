"""What a program leaves behind, and the differences between one process and workers."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from tests.autograd.oracle.interpreter import Call, Retained
from tests.autograd.oracle.program import Program, prunes


@dataclass
class Outcome:
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # by leaf
    retained: dict[Retained, torch.Tensor | None] = field(default_factory=dict)
    log: list[Call] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    derivatives: list[list[torch.Tensor | None]] = field(default_factory=list)  # of grad, by order

    def add(self, other: Outcome) -> None:
        self.gradients.update(other.gradients)
        self.retained.update(other.retained)
        self.log += other.log
        self.problems += other.problems
        self.derivatives += other.derivatives


_TOLERANCE = 1e-9
_WITH_NONE = {"silent", "picky"}  # operators that return None as a gradient
_EXACT_UP_TO = 2.0**40


def differences(program: Program, expected: Outcome, found: Outcome) -> list[str]:
    is_exact = program.exact and program.higher is None and _largest(expected) < _EXACT_UP_TO
    lines = list(found.problems)
    lines += _derivatives(expected.derivatives, found.derivatives, has_none(program))
    if has_none(program):
        # For an undefined gradient, torch runs nodes and hooks with None or zeros; farprop runs nothing.
        expected, found = _without_none(expected), _without_none(found)
    if prunes(program):
        found = _without_unneeded(expected, found)
    for number in sorted(expected.gradients.keys() | found.gradients.keys()):
        theirs, ours = expected.gradients.get(number), found.gradients.get(number)
        if problem := _tensors(theirs, ours, is_exact):
            lines.append(f"gradient of leaf {number}: {problem}")
    for one in sorted(expected.retained.keys() | found.retained.keys()):
        theirs, ours = expected.retained.get(one), found.retained.get(one)
        if problem := _tensors(theirs, ours, is_exact):
            lines.append(f"gradient retained by {one.hook} after pass {one.passes}: {problem}")
    return lines + _hooks(program, expected.log, found.log, is_exact)


def _derivatives(
    expected: list[list[torch.Tensor | None]], found: list[list[torch.Tensor | None]], zero_is_none: bool
) -> list[str]:
    lines = []
    if len(expected) != len(found):
        return [f"expected derivatives up to order {len(expected)}, found up to {len(found)}"]
    for order, (theirs, ours) in enumerate(zip(expected, found, strict=True), 1):
        if len(theirs) != len(ours):
            lines.append(f"derivative {order}: expected {len(theirs)} inputs, found {len(ours)}")
        for number, (a, b) in enumerate(zip(theirs, ours, strict=False)):
            if zero_is_none and not any(x is not None and bool(_dense(x).any()) for x in (a, b)):
                continue
            if problem := _tensors(a, b, is_exact=False):
                lines.append(f"derivative {order} of input {number}: {problem}")
    return lines


def has_none(program: Program) -> bool:
    return any(step[0] == "op" and step[3][0] in _WITH_NONE for block in program.blocks for step in block.steps)


def _without_none(outcome: Outcome) -> Outcome:
    """Drop gradients that are zero, and calls of hooks that saw only None or zeros."""
    return Outcome(
        {number: g for number, g in outcome.gradients.items() if bool(_dense(g).any())},
        {number: g for number, g in outcome.retained.items() if g is not None and bool(_dense(g).any())},
        [call for call in outcome.log if any(call.seen)],
    )


def _without_unneeded(expected: Outcome, found: Outcome) -> Outcome:
    """Drop what torch does not compute. ``grad`` prunes the graph by messages, and torch by tensors: hooks of tensors
    that were sent together with needed ones run in addition, and see gradients where torch has None.
    """
    due = _by_hook(expected.log)
    log: list[Call] = []
    for call in found.log:
        left = due[call.hook]
        if left and _same_call(left[0], _like(left[0], call), is_exact=False):
            log.append(left.pop(0))
    if any(due.values()):
        log = found.log
    retained = {n: g if expected.retained.get(n) is not None else None for n, g in found.retained.items()}
    return Outcome(found.gradients, retained, log)


def _like(expected: Call, found: Call) -> Call:
    """A call of a hook, with None where None is expected."""
    if len(expected.seen) != len(found.seen):
        return found
    pairs = zip(expected.seen, found.seen, strict=True)
    return found._replace(seen=tuple(None if a is None else b for a, b in pairs))


def _largest(outcome: Outcome) -> float:
    values = [abs(seen) for call in outcome.log for seen in call.seen if seen is not None]
    values += [float(_dense(g).abs().max()) for g in outcome.gradients.values() if g.numel()]
    return max(values, default=0.0)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _tensors(expected: torch.Tensor | None, found: torch.Tensor | None, is_exact: bool) -> str:
    if expected is None or found is None:
        return "" if expected is found else f"expected {_shown(expected)}, found {_shown(found)}"
    if (expected.layout, expected.dtype, expected.shape) != (found.layout, found.dtype, found.shape):
        return (
            f"expected {expected.layout} {expected.dtype} {tuple(expected.shape)}, "
            f"found {found.layout} {found.dtype} {tuple(found.shape)}"
        )
    theirs, ours = _dense(expected), _dense(found)
    if is_exact:
        same = torch.equal(theirs, ours)
    else:
        # Sums of float32 differ by more if the order differs.
        tolerance = _TOLERANCE if theirs.dtype in (torch.float64, torch.complex128) else 1e-3
        same = torch.allclose(theirs, ours, rtol=tolerance, atol=tolerance)
    return "" if same else f"expected {_shown(theirs)}, found {_shown(ours)}"


def _shown(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    return str(tensor.tolist()) if tensor.numel() <= 16 else f"{tuple(tensor.shape)} with sum {float(tensor.sum())}"


def _hooks(program: Program, expected: list[Call], found: list[Call], is_exact: bool) -> list[str]:
    lines = []
    theirs, ours = _by_hook(expected), _by_hook(found)
    for number in sorted(theirs.keys() | ours.keys()):
        a, b = theirs[number], ours[number]
        if len(a) != len(b) or not all(_same_call(x, y, is_exact) for x, y in zip(a, b, strict=True)):
            lines.append(f"hook {number}: expected {_calls(a)}, found {_calls(b)}")
    for leaf, description in enumerate(program.leaves):
        of_leaf = {hook for hook, _, _ in description.hooks}
        orders = [[call.hook for call in log if call.hook in of_leaf] for log in (expected, found)]
        if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
            lines.append(f"hooks of leaf {leaf} ran in the order {orders[1]}, not {orders[0]}")
    return lines


def _by_hook(log: list[Call]) -> dict[int, list[Call]]:
    calls: dict[int, list[Call]] = defaultdict(list)
    for call in log:
        # Torch also runs nodes that lead to no leaf, for example to a view that was made with grad off.
        if not call.seen or any(seen is not None for seen in call.seen):
            calls[call.hook].append(call)
    return calls


def _same_call(a: Call, b: Call, is_exact: bool) -> bool:
    if len(a.seen) != len(b.seen) or a.grad_enabled != b.grad_enabled:
        return False
    tolerance = 0.0 if is_exact else 1e-6
    return all(
        x is y if x is None or y is None else x == y or math.isclose(x, y, rel_tol=tolerance, abs_tol=tolerance * 10)
        for x, y in zip(a.seen, b.seen, strict=True)
    )


def _calls(calls: list[Call]) -> str:
    return str([call.seen if not call.grad_enabled else (*call.seen, "with grad on") for call in calls])
