"""When steps may change parameters: random jobs of workers, contexts and steps, on a virtual clock."""

from __future__ import annotations

import random

import pytest

from farprop.protocol.step_gate import StepGate


class _Worker:
    """A worker's gate, with what waits there."""

    def __init__(self) -> None:
        self.gate = StepGate()
        self.steps: list[tuple[int, int]] = []  # number, context
        self.begun: list[int] = []


class _Job:
    """Contexts that use workers in any order and then step on those that they used, or just end.

    A context that waits to be let in is admitted after a few rounds, unless a step runs.
    """

    def __init__(self, seed: int, gate: type[StepGate] = StepGate) -> None:
        self.rng = random.Random(seed)
        self.workers = [_Worker() for _ in range(self.rng.randint(1, 4))]
        for worker in self.workers:
            worker.gate = gate()
        self.contexts = self.rng.randint(1, 8)
        self.steps_taken = 0
        self.gives_up = self.rng.random() < 0.3  # a step that waits
        self.plans = [self._plan() for _ in range(self.contexts)]
        self.waited = [0] * self.contexts
        self.used: list[set[int]] = [set() for _ in range(self.contexts)]  # where its pass needs the parameters

    def _plan(self) -> list[tuple[str, int]]:
        path = [("use", self.rng.randrange(len(self.workers))) for _ in range(self.rng.randint(1, 5))]
        touched = sorted({worker for _, worker in path})
        ending = [("step", worker) for worker in touched] if self.rng.random() < 0.8 else []
        return [*path, *ending, ("end", 0)]

    def run(self) -> None:
        numbers = iter(range(1, 10_000))
        waiting: dict[int, int] = {}  # by context: the step that it waits for
        for _ in range(2000):
            alive = [context for context, plan in enumerate(self.plans) if plan]
            if not alive:
                break
            context = self.rng.choice(alive)
            event, at = self.plans[context][0]
            worker = self.workers[at]
            if event == "use":
                self.waited[context] += 1
                is_in = worker.gate.on_use(context) or (self.waited[context] > 20 and worker.gate.admit(context))
                if not is_in:
                    continue
                self.waited[context] = 0
                assert worker.gate.running is None
                self.used[context].add(at)
            elif event == "step":
                if context not in waiting:
                    waiting[context] = next(numbers)
                    self.used[context].discard(at)
                    worker.gate.on_step(waiting[context], (context,))
                number = waiting[context]
                if self.gives_up and self.rng.random() < 0.02 and worker.gate.running != number:
                    worker.gate.on_step_ended(number)  # it gives up
                elif worker.gate.running == number:
                    worker.gate.on_step_ended(number)
                    self.steps_taken += 1
                else:
                    if worker.gate.may_run(number):
                        needed = [other for other in range(self.contexts) if at in self.used[other]]
                        assert not needed, f"a step ran while the passes of {needed} need the parameters"
                    continue
                del waiting[context]
            else:
                self.used[context].clear()
                for each in self.workers:
                    each.gate.on_context_ended(context)
            self.plans[context].pop(0)
        assert not any(self.plans), f"these wait for ever: {self.plans}"
        assert not any(worker.gate.is_busy for worker in self.workers)


def test_no_step_runs_under_a_pass_and_nothing_waits_for_ever() -> None:
    taken = 0
    for seed in range(1000):
        job = _Job(seed)
        job.run()
        taken += job.steps_taken
    assert taken > 1000


class _Careless(StepGate):
    """Lets a step run although contexts use the parameters."""

    def may_run(self, step: int) -> bool:
        users, self.users = self.users, set()
        try:
            return super().may_run(step)
        finally:
            self.users |= users


class _Strict(StepGate):
    """Lets no context in while a step waits."""

    def admit(self, context: int) -> bool:
        return False


class _Forgetful(StepGate):
    """Does not know that the passes of a context that steps are over."""

    def on_step(self, step: int, contexts: object) -> None:
        super().on_step(step, ())


@pytest.mark.parametrize(("gate", "what"), [(_Careless, "need"), (_Strict, "for ever"), (_Forgetful, "for ever")])
def test_planted_bugs_are_found(gate: type[StepGate], what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        for seed in range(2000):
            _Job(seed, gate).run()
