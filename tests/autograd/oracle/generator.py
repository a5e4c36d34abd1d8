"""Makes a program from a seed. It runs each step in one process at once, so that the next step can use the results."""

from __future__ import annotations

import random

import torch

from tests.autograd.oracle.blocks import BlockMaker, Plan
from tests.autograd.oracle.local import LocalReference, make_interpreters, run_locally
from tests.autograd.oracle.outcome import Outcome
from tests.autograd.oracle.program import Block, Higher, Pass, Program, leaf_used


class _Unfit(Exception):
    """This attempt made nothing that has a gradient."""


def generate(seed: int) -> tuple[Program, Outcome]:
    """The program of a seed, and its expected outcome."""
    rng = random.Random(seed)
    while True:
        try:
            program = _try(seed, rng)
            return program, run_locally(program)
        except _Unfit:
            continue
        except RuntimeError:
            continue  # torch refuses it, for example because of a change in place


def _try(seed: int, rng: random.Random) -> Program:
    is_exact = rng.random() < 0.6
    plan = Plan(
        rng,
        workers=rng.randint(2, 4),
        is_exact=is_exact,
        is_tidy=rng.random() < 0.25,
        hook_rate=rng.choice((0.0, 0.05, 0.25)),
        call_rate=rng.choice((0.15, 0.3, 0.5)),
        budget=rng.choice((6, 12, 25, 40)),
        has_big=rng.random() < 0.1,
        has_none=rng.random() < 0.2,
    )
    plan.blocks.append(Block(0, (), ()))  # replaced below
    empty = Program(seed, plan.workers, is_exact, "smart", (), (), ())
    plan.interpreters = make_interpreters(empty, hooked=False)
    main = BlockMaker(plan, 0, [], depth=0)
    main.fill()
    outputs = main.roots()
    if not outputs:
        raise _Unfit
    between = [r for r in main.differentiable() if r not in outputs]
    between = rng.sample(between, min(len(between), 2)) if rng.random() < 0.5 else []
    plan.blocks[0] = main.block(outputs + between)
    roots = [main.registers[r] for r in outputs]
    mode = "fast" if plan.is_tidy and rng.random() < 0.5 else "smart"
    passes = _passes(rng, roots, plan.is_tidy)
    program = Program(seed, plan.workers, is_exact, mode, tuple(plan.leaves), tuple(plan.blocks), passes)
    if passes[-1].where == "here" and rng.random() < 0.7:
        program = program._replace(higher=_higher(rng, program, range(len(outputs), len(outputs) + len(between))))
    return program


def _higher(rng: random.Random, program: Program, between: range) -> Higher:
    order = rng.choice((2, 2, 3))
    if rng.random() < 0.4:
        return Higher(order, (), ())
    leaves = [number for number in range(len(program.leaves)) if leaf_used(program, number)]
    return Higher(order, tuple(rng.sample(leaves, rng.randint(1, len(leaves)))), tuple(between))


def _passes(rng: random.Random, roots: list[torch.Tensor | LocalReference], is_tidy: bool) -> tuple[Pass, ...]:
    count = rng.choice((1, 1, 1, 2, 3))
    passes = []
    for number in range(count):
        chosen = list(range(len(roots))) if is_tidy else rng.sample(range(len(roots)), rng.randint(1, len(roots)))
        away = [r for r in chosen if isinstance(roots[r], LocalReference)]
        if away:  # such a pass has one root
            chosen = away[:1]
        # A pass frees its graph, so all but the last must retain it; the last may retain it, too.
        passes.append(Pass(tuple(chosen), number < count - 1 or rng.random() < 0.2, "owner" if away else "here"))
    return tuple(passes)
