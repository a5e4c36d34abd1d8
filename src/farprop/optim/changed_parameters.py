"""Names the parameter that a step has changed while another trainer's backward pass still needed its old value.

Torch counts the changes of a tensor, its *version*, and its error says which version the pass expected and which it
found. Each local optimizer keeps the versions around its last steps.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from farprop._torch import version_of
from farprop.ids import WorkerInfo
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.autograd import engine
from farprop.runtime.autograd.contexts import maker_of

_KEPT = 16  # steps of an optimizer
_SHOWN = 3  # parameters
_CHANGED = re.compile(r"modified by an inplace operation.*is at version (\d+); expected version (\d+)", re.DOTALL)
_SHAPE = re.compile(r"\[torch\.\w+ \[([\d, ]*)\]\]")


class Step(NamedTuple):
    """A step with the gradients of a context, and the parameters' versions before and after it."""

    context_id: int
    before: Sequence[int]
    after: Sequence[int]


class StepHistory:
    """The last steps of a local optimizer.

    Args:
        parameters: Its parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self.indices: Sequence[int] = range(len(parameters))  # in the list of all parameters
        self.steps: deque[Step] = deque(maxlen=_KEPT)
        _histories.add(self)

    def versions(self) -> list[int]:
        """The versions of the parameters now."""
        return [version_of(parameter) for parameter in self.parameters]


_histories: weakref.WeakSet[StepHistory] = weakref.WeakSet()


def explain(error: Exception, leaves: Iterable[torch.Tensor], context_id: int) -> str | None:
    """Say which step changed a parameter that a pass needed.

    Args:
        error: What torch raised in the pass.
        leaves: The leaves of the pass on this worker.
        context_id: The context of the pass.

    Returns:
        A text, or None if it was no step of a distributed optimizer.
    """
    text = str(error)
    found = _CHANGED.search(text)
    if found is None:
        return None
    changed = _changed_since(int(found[2]), {id(leaf) for leaf in leaves})
    shape = _SHAPE.search(text)
    if shape is not None:
        # The graph may have kept a transposed view of the parameter.
        sizes = sorted(int(size) for size in shape[1].split(",") if size.strip())
        changed = [each for each in changed if sorted(each[1].shape) == sizes] or changed
    if not changed:
        return None
    here = current_agent().get_worker_info().name
    names = [f"params_rref[{index}] (shape {tuple(leaf.shape)})" for index, leaf, _ in changed[:_SHOWN]]
    which = f"{' or '.join(names)} on {here}"
    step = changed[0][2]
    if step.context_id == context_id:
        return (
            f"It is {which}, which a step of this same context has changed. Run all backward passes of a context "
            "before its step, or compute the loss again."
        )
    return (
        f"It is {which}, which a step of {_name_of(maker_of(step.context_id))} (context {step.context_id}) changed "
        "after this pass's forward had used it. Make the optimizers of trainers that share parameters with "
        'consistency="versioned", or "locked": then a step does not break the passes of others.'
    )


def _changed_since(version: int, leaves: set[int]) -> list[tuple[int, torch.Tensor, Step]]:
    """The leaves that steps have changed since they had this version: index, leaf, and the first of the steps."""
    changed: dict[int, tuple[int, torch.Tensor, Step]] = {}
    first: dict[int, int] = {}  # the version that this step found
    for history in list(_histories):
        for place, (index, parameter) in enumerate(zip(history.indices, history.parameters, strict=True)):
            if id(parameter) not in leaves:
                continue
            for step in list(history.steps):
                before, after = step.before[place], step.after[place]
                if version <= before < after and before < first.get(id(parameter), after):
                    changed[id(parameter)] = index, parameter, step
                    first[id(parameter)] = before
    return list(changed.values())


def _name_of(rank: int) -> str:
    try:
        info: WorkerInfo = current_agent().get_worker_info(rank)
        return info.name
    except Exception:  # it has left
        return f"the worker with rank {rank}"


engine.explain_changed_leaf = explain
