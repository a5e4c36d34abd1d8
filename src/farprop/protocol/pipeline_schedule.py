"""In which order the workers of a pipeline run their micro-batches.

A *stage* is a part of a model, on one worker. A worker runs one *action* at a time: the forward or the backward of one
micro-batch through one of its stages. ``make_plans`` gives each worker the order of its actions, and ``PlanExecution``
follows it: the next action begins when its input has arrived and the one before has ended.

**Why nothing waits for ever.** The orders are those of one run that ``make_plans`` has simulated to its end. In that
run every action began after those that it depends on, on all workers. So whatever the order in which messages arrive,
the first action of that run that has not ended yet can run: all that it depends on has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from farprop.errors import ProtocolError

_W = TypeVar("_W", bound=Hashable)

FORWARD, BACKWARD = "forward", "backward"
ONE_F_ONE_B, GPIPE = "1f1b", "gpipe"
SCHEDULES = (ONE_F_ONE_B, GPIPE)

_TIME = {FORWARD: 1, BACKWARD: 2}  # a backward computes gradients of inputs and of parameters


class Action(NamedTuple):
    """The forward or the backward of a micro-batch through a stage."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"the {self.kind} of micro-batch {self.micro_batch}"


def successor(action: Action, stages: int) -> Action | None:
    """The action whose input is the output of this one; None if its output leaves the pipeline, or stays."""
    kind, stage, micro_batch = action
    following = stage + 1 if kind == FORWARD else stage - 1
    return Action(kind, following, micro_batch) if 0 <= following < stages else None


def needs_input(action: Action, stages: int) -> bool:
    """Whether something has to arrive before the action. The last backward has the loss of its own forward."""
    return action.kind == FORWARD or action.stage < stages - 1


@lru_cache(maxsize=64)
def make_plans(
    schedule: str, workers: tuple[_W, ...], micro_batches: int, trains: bool = True
) -> Mapping[_W, tuple[Action, ...]]:
    """The order of the actions of each worker.

    Args:
        schedule: ``1f1b``: a stage begins no forward that would be its ``stages - stage + 1``-th in flight, and
            backwards come first. ``gpipe``: a stage runs all forwards, then all backwards.
        workers: for each stage, in order, the worker that has it. A worker may have several.
        micro_batches: how many there are.
        trains: whether there are backwards.
    """
    simulated = _Simulation(schedule, workers, micro_batches, trains)
    simulated.run()
    return {worker: tuple(plan) for worker, plan in simulated.plans.items()}


class _Simulation(Generic[_W]):
    """A run in which actions take ``_TIME`` and messages none. A free worker begins the best action that is ready."""

    def __init__(self, schedule: str, workers: Sequence[_W], micro_batches: int, trains: bool) -> None:
        self.plans: dict[_W, list[Action]] = {worker: [] for worker in workers}
        self._is_gpipe = schedule == GPIPE
        self._stages = len(workers)
        self._own: dict[_W, list[int]] = {worker: [] for worker in workers}
        for stage in reversed(range(self._stages)):
            self._own[workers[stage]].append(stage)
        self._micro_batches = micro_batches
        self._trains = trains
        self._next = {kind: [0] * self._stages for kind in (FORWARD, BACKWARD)}  # by stage, the next micro-batch
        self._ended: dict[Action, int] = {}
        self._free_at: dict[_W, int] = dict.fromkeys(self.plans, 0)

    def run(self) -> None:
        now, left = 0, self._stages * self._micro_batches * (2 if self._trains else 1)
        while left:
            for worker, free_at in self._free_at.items():
                action = self._best(worker, now) if free_at <= now else None
                if action is not None:
                    self.plans[worker].append(action)
                    self._next[action.kind][action.stage] += 1
                    self._ended[action] = self._free_at[worker] = now + _TIME[action.kind]
                    left -= 1
            now += 1

    def _best(self, worker: _W, now: int) -> Action | None:
        """Of the later stages first: what is ready there frees activations sooner."""
        own = self._own[worker]
        forward = next((a for stage in own if (a := self._forward(stage, now)) is not None), None)
        backward = next((a for stage in own if (a := self._backward(stage, now)) is not None), None)
        return (forward or backward) if self._is_gpipe else (backward or forward)

    def _forward(self, stage: int, now: int) -> Action | None:
        number = self._next[FORWARD][stage]
        if number == self._micro_batches:
            return None
        in_flight = number - self._next[BACKWARD][stage]
        if self._trains and not self._is_gpipe and in_flight >= self._stages - stage:
            return None
        is_ready = stage == 0 or self._has_ended(Action(FORWARD, stage - 1, number), now)
        return Action(FORWARD, stage, number) if is_ready else None

    def _backward(self, stage: int, now: int) -> Action | None:
        number = self._next[BACKWARD][stage]
        forwards = self._next[FORWARD][stage]
        if not self._trains or number >= forwards or (self._is_gpipe and forwards < self._micro_batches):
            return None
        before = Action(FORWARD, stage, number) if stage == self._stages - 1 else Action(BACKWARD, stage + 1, number)
        return Action(BACKWARD, stage, number) if self._has_ended(before, now) else None

    def _has_ended(self, action: Action, now: int) -> bool:
        ended = self._ended.get(action)
        return ended is not None and ended <= now


class PlanExecution:
    """One worker's part of a step. Events are its methods.

    Args:
        plan: The worker's actions, in their order.
        stages: How many stages the pipeline has.

    Attributes:
        received: The actions whose inputs have arrived.
        running: The action that runs now.
    """

    def __init__(self, plan: Sequence[Action], stages: int) -> None:
        self.received: set[Action] = set()
        self.running: Action | None = None
        self._expected = {action for action in plan if needs_input(action, stages)}
        self._left = deque(plan)
        self._stages = stages

    def on_input(self, action: Action) -> None:
        """The input of an action has arrived; raises ``ProtocolError`` if it can't be."""
        if action not in self._expected or action in self.received:
            why = "has arrived before" if action in self.received else "does not belong here"
            raise ProtocolError(f"the input of {action} through stage {action.stage} {why}")
        self.received.add(action)

    def start(self) -> Action | None:
        """Begin the next action if it can; returns it."""
        if self.running is not None or not self._left:
            return None
        action = self._left[0]
        if action in self._expected and action not in self.received:
            return None
        self.running = self._left.popleft()
        return action

    def on_ended(self) -> None:
        """The running action has ended."""
        assert self.running is not None
        self.running = None

    @property
    def next(self) -> Action | None:
        """The running action, or the one that comes next."""
        return self.running or (self._left[0] if self._left else None)

    @property
    def is_done(self) -> bool:
        return not self._left and self.running is None


def reached(plan: Sequence[Action], received: Collection[Action], stages: int) -> Action | None:
    """The action that a worker had come to when it was lost, by what others have received; None if all had ended.

    A worker follows its plan, so all actions before one whose output has arrived somewhere have ended.
    """
    known = max((place for place, action in enumerate(plan) if successor(action, stages) in received), default=-1)
    return plan[known + 1] if known + 1 < len(plan) else None
