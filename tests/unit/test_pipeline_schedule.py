"""The orders of pipelines, and random runs of them: messages arrive in any order, actions take any time."""

from __future__ import annotations

import random

import pytest

from farprop.errors import ProtocolError
from farprop.protocol.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    GPIPE,
    ONE_F_ONE_B,
    SCHEDULES,
    Action,
    PlanExecution,
    make_plans,
    needs_input,
    reached,
    successor,
)

DEPTHS = range(1, 9)
MICRO_BATCHES = range(1, 17)


def placements(depth: int) -> list[tuple[int, ...]]:
    """By stage, its worker: one for each stage, one for all, neighbours together, round and round, down and up."""
    half = (depth + 1) // 2
    return [
        tuple(range(depth)),
        (0,) * depth,
        tuple(stage // 2 for stage in range(depth)),
        tuple(stage % half for stage in range(depth)),
        tuple(min(stage, depth - 1 - stage) for stage in range(depth)),
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_every_worker_runs_every_action_of_its_stages_once_and_backwards_after_forwards(schedule, depth):
    for workers in placements(depth):
        for count in MICRO_BATCHES:
            plans = make_plans(schedule, workers, count)
            assert plans.keys() == set(workers)
            for worker, plan in plans.items():
                own = [stage for stage in range(depth) if workers[stage] == worker]
                assert sorted(plan) == sorted(
                    Action(kind, stage, number)
                    for kind in (FORWARD, BACKWARD)
                    for stage in own
                    for number in range(count)
                )
                place = {action: index for index, action in enumerate(plan)}
                for stage in own:
                    for number in range(count):
                        assert place[Action(FORWARD, stage, number)] < place[Action(BACKWARD, stage, number)]
                    for kind in (FORWARD, BACKWARD):
                        in_order = [action.micro_batch for action in plan if action[:2] == (kind, stage)]
                        assert in_order == list(range(count))


@pytest.mark.parametrize("depth", DEPTHS)
def test_1f1b_is_the_known_order_if_every_stage_has_a_worker(depth):
    for count in MICRO_BATCHES:
        plans = make_plans(ONE_F_ONE_B, tuple(range(depth)), count)
        for stage in range(depth):
            first = min(depth - stage - 1, count)
            right = [Action(FORWARD, stage, number) for number in range(first)]
            for number in range(count - first):
                right += [Action(FORWARD, stage, first + number), Action(BACKWARD, stage, number)]
            right += [Action(BACKWARD, stage, number) for number in range(count - first, count)]
            assert list(plans[stage]) == right


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stage_of_1f1b_keeps_no_more_activations_than_there_are_stages_from_it_on(depth):
    for workers in placements(depth):
        for count in MICRO_BATCHES:
            limits = [min(depth - stage, count) for stage in range(depth)]
            kept = most_in_flight(make_plans(ONE_F_ONE_B, workers, count), depth)
            assert all(most <= limit for most, limit in zip(kept, limits, strict=True))
            assert kept == limits or len(set(workers)) < depth
            assert most_in_flight(make_plans(GPIPE, workers, count), depth) == [count] * depth


def most_in_flight(plans, depth: int) -> list[int]:
    most, now = [0] * depth, [0] * depth
    for plan in plans.values():
        for kind, stage, _ in plan:
            now[stage] += 1 if kind == FORWARD else -1
            most[stage] = max(most[stage], now[stage])
    return most


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forwards_alone(schedule):
    for depth in DEPTHS:
        for workers in placements(depth):
            actions = [action for plan in make_plans(schedule, workers, 5, False).values() for action in plan]
            assert sorted(actions) == sorted(Action(FORWARD, s, n) for s in range(depth) for n in range(5))


class Job:
    """Workers that run their plans; messages between them arrive in random order."""

    def __init__(self, seed: int, plans, workers: tuple[int, ...], count: int) -> None:
        self.rng = random.Random(seed)
        self.workers = workers
        self.depth = len(workers)
        self.executions = {worker: PlanExecution(plan, self.depth) for worker, plan in plans.items()}
        self.messages = [Action(FORWARD, 0, number) for number in range(count)]
        self.ended: list[Action] = []

    def run(self) -> None:
        """Until nothing can happen any more."""
        while True:
            running = [execution for execution in self.executions.values() if execution.running is not None]
            choice = self.rng.randrange(len(self.messages) + len(running)) if self.messages or running else None
            if choice is None:
                return
            if choice < len(self.messages):
                action = self.messages.pop(choice)
                self.executions[self.workers[action.stage]].on_input(action)
            else:
                execution = running[choice - len(self.messages)]
                action = execution.running
                execution.on_ended()
                self.ended.append(action)
                following = successor(action, self.depth)
                if following is not None:
                    self.messages.append(following)
            for execution in self.executions.values():
                begun = execution.start()
                assert begun is None or execution.start() is None  # one at a time


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_every_run_ends_whatever_the_order_of_messages(schedule, depth):
    for workers in placements(depth):
        for count in MICRO_BATCHES:
            plans = make_plans(schedule, workers, count)
            for seed in range(4):
                job = Job(seed, plans, workers, count)
                job.run()
                assert all(execution.is_done for execution in job.executions.values()), (workers, count, seed)
                assert len(job.ended) == 2 * depth * count


def test_a_plan_in_a_wrong_order_hangs_in_the_same_runs():
    """The runs above would find one: the last stage asks for the second micro-batch first."""
    plans = dict(make_plans(ONE_F_ONE_B, (0, 1), 2))
    plans[0] = (Action(FORWARD, 0, 0), Action(BACKWARD, 0, 0), Action(FORWARD, 0, 1), Action(BACKWARD, 0, 1))
    plans[1] = (Action(FORWARD, 1, 1), Action(BACKWARD, 1, 1), Action(FORWARD, 1, 0), Action(BACKWARD, 1, 0))
    job = Job(0, plans, (0, 1), 2)
    job.run()
    assert not any(execution.is_done for execution in job.executions.values())


def test_inputs_that_can_not_be_are_refused():
    execution = PlanExecution(make_plans(ONE_F_ONE_B, ("a", "b"), 2)["b"], 2)
    execution.on_input(Action(FORWARD, 1, 0))
    with pytest.raises(ProtocolError, match="the forward of micro-batch 0 through stage 1 has arrived before"):
        execution.on_input(Action(FORWARD, 1, 0))
    # Another stage's, a micro-batch too many, and the gradient of the loss, which nobody sends.
    for action in (Action(FORWARD, 0, 0), Action(FORWARD, 1, 2), Action(BACKWARD, 1, 0)):
        with pytest.raises(ProtocolError, match="does not belong here"):
            execution.on_input(action)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("depth", range(2, 7))
def test_what_a_lost_worker_had_come_to(schedule, depth):
    """By what others received; a stage whose results stay on its worker is told by the next that leaves it."""
    rng = random.Random(depth)
    for workers in placements(depth):
        if len(set(workers)) < 2:
            continue
        plans = make_plans(schedule, workers, 6)
        for worker, plan in plans.items():
            ended = rng.randrange(len(plan) + 1)
            sent = {successor(action, depth) for action in plan[:ended]}
            received = {a for a in sent if a is not None and workers[a.stage] != worker}
            at = reached(plan, received, depth)
            place = len(plan) if at is None else plan.index(at)
            assert place <= ended
            # Nothing that left the worker lies between what it had come to and what is said.
            between = [successor(action, depth) for action in plan[place:ended]]
            assert all(a is None or workers[a.stage] == worker for a in between)


def test_only_the_loss_has_no_input_from_elsewhere():
    plan = make_plans(ONE_F_ONE_B, ("a",), 2)["a"]
    assert [needs_input(action, 1) for action in plan] == [action.kind == FORWARD for action in plan]
    assert needs_input(Action(BACKWARD, 0, 0), 2)
