"""The call table under every order of answers, deadlines and lost peers."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from farprop.protocol.pending_calls import PendingCalls
from farprop.protocol.quiescence import Quiescence, Report


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_call_ends_exactly_once(seed: int) -> None:
    chance = random.Random(seed)
    table: PendingCalls[int] = PendingCalls()
    open_calls: dict[int, float | None] = {}
    ended: list[int] = []
    now = 0.0
    for call_id in range(300):
        deadline = chance.choice([None, now + chance.random() * 20])
        table.open(call_id, call_id, deadline)
        open_calls[call_id] = deadline
        now += chance.random()
        action = chance.randrange(6)
        if action <= 2:
            target = chance.randrange(call_id + 1)
            got = table.answer(target)
            assert (got is None) == (target not in open_calls)
            if got is not None:
                ended.append(got)
                del open_calls[got]
        elif action == 3:
            expired = table.expire(now)
            assert sorted(expired) == sorted(c for c, d in open_calls.items() if d is not None and d <= now)
            for call in expired:
                ended.append(call)
                del open_calls[call]
        elif action == 4 and chance.random() < 0.05:
            lost = table.lost()
            assert sorted(lost) == sorted(open_calls)
            for call in lost:
                ended.append(call)
                del open_calls[call]
        assert len(table) == len(open_calls)
        due = [d for d in open_calls.values() if d is not None]
        assert table.next_deadline() == (min(due) if due else None)
        table.validate()
    ended += table.lost()
    assert sorted(ended) == list(range(300))
    assert len(table) == 0


def test_deadlines_of_answered_calls_do_not_accumulate() -> None:
    table: PendingCalls[int] = PendingCalls()
    for call_id in range(10_000):
        table.open(call_id, call_id, 1e9 + call_id)
        table.answer(call_id)
    assert len(table._deadlines) < 200


class _World:
    """Workers that send requests to each other in any order while reports are taken."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.names = [f"w{i}" for i in range(self.chance.randint(2, 5))]
        self.sent = dict.fromkeys(self.names, 0)
        self.open = dict.fromkeys(self.names, 0)  # own calls without an answer
        self.running: list[tuple[str, str]] = []  # (who runs it, who asked)
        self.budget = self.chance.randint(0, 12)
        for name in self.names:
            if self.budget and self.chance.random() < 0.5:
                self.send(name)

    def send(self, source: str) -> None:
        self.budget -= 1
        self.sent[source] += 1
        self.open[source] += 1
        self.running.append((self.chance.choice(self.names), source))

    def step(self) -> None:
        if not self.running:
            return
        runner, source = self.running.pop(self.chance.randrange(len(self.running)))
        if self.budget and self.chance.random() < 0.6:
            self.send(runner)  # a request that sends another and does not wait for it
        self.open[source] -= 1

    def report(self, name: str) -> Report:
        idle = not self.open[name] and all(runner != name for runner, _ in self.running)
        return Report(self.sent[name], idle)


@settings(max_examples=2000, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_quiescence_is_reached_exactly_when_no_work_is_left(seed: int) -> None:
    world = _World(seed)
    machine = Quiescence()
    for _ in range(200):
        reports = {}
        for name in world.chance.sample(world.names, len(world.names)):
            for _ in range(world.chance.randrange(3)):
                world.step()
            reports[name] = world.report(name)
        if machine.round(reports):
            assert not world.running
            return
    raise AssertionError("never quiet")


def test_quiescence_needs_two_equal_idle_rounds() -> None:
    machine = Quiescence()
    calm = {"a": Report(1, True), "b": Report(0, True)}
    assert not machine.round(calm)
    assert not machine.round({"a": Report(2, True), "b": Report(0, True)})
    assert not machine.round({"a": Report(2, False), "b": Report(0, True)})
    assert not machine.round({"a": Report(2, True), "b": Report(0, True)})
    assert machine.round({"a": Report(2, True), "b": Report(0, True)})
