"""Five training programs with the shapes of PyTorch's RPC examples, for both sides and for one process.

The function ``prepare`` of a program gets the side's `Api` and returns a function that trains one step and returns its
loss. ``alone`` returns the same for the same work in one process, without any calls. Both start from the same weights
and take the same data, so their losses are equal.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import ModuleType

from bench.cases import Api, Case, Sample, add_case

Step = Callable[[], float]
CHECKED_STEPS = 4
_TOLERANCE = 1e-4


def program(
    name: str, label: str, *, goal: float, samples: int, workers: int, round_trips: int, steps: int = 1
) -> None:
    """Register the case of a program.

    Args:
        name: of the module, and of the case.
        label: the row of the table.
        goal: torch's time over ours that we want to reach.
        samples: steps in each round.
        workers: how many it has.
        round_trips: how many round trips a step takes at least, one after the other.
        steps: in one sample.
    """
    module = importlib.import_module(f"{__name__}.{name}")
    add_case(
        Case(
            name=f"program-{name}",
            label=label,
            goal=goal,
            prepare=lambda api, _: _checked(api, module),
            samples=samples,
            warmup=3,
            calls=steps,
            floor="unix",
            workers=workers,
            alone=module.alone,
            round_trips=round_trips,
        )
    )


def losses(api: Api, module: ModuleType, steps: int) -> tuple[list[float], Step]:
    """The first losses of a program on one side, and its step."""
    step: Step = module.prepare(api)
    return [step() for _ in range(steps)], step


def _checked(api: Api, module: ModuleType) -> Sample:
    """The step of a program, once its first losses were compared with those of one process."""
    ours, step = losses(api, module, CHECKED_STEPS)
    alone = module.alone()
    for loss in ours:
        expected = alone()
        if not math.isclose(loss, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            raise AssertionError(f"{api.package} has the loss {loss}, and one process has {expected}")
    return step


program("rnn", "program rnn", goal=1.6, samples=60, workers=2, round_trips=6)
program("hybrid", "program hybrid", goal=1.6, samples=150, workers=2, round_trips=3)
program("pipeline", "program pipeline", goal=1.4, samples=20, workers=3, round_trips=5)
program("batch_server", "program batch parameter server", goal=1.5, samples=12, workers=3, round_trips=1, steps=10)
program("rl", "program reinforcement learning", goal=3, samples=8, workers=3, round_trips=81)
