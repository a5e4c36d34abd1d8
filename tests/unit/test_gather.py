"""The state machine of ``_all_gather`` and ``_barrier``: any order of messages, workers that die, timeouts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from farprop.errors import ConnectionLostError, FarpropError, RpcTimeoutError, UsageError
from farprop.protocol.gather import AwaitRelease, Broadcast, Failure, Finish, GatherMachine, Key, Release, SendValue
from farprop.runtime.dialer import WrongPeerError
from farprop.runtime.gather import Gathers

ABC = ("a", "b", "c")
KEY = Key(ABC, 0)


def _leader_with_all_values() -> GatherMachine:
    leader = GatherMachine()
    assert leader.begin("a", ABC, 1, 5.0) == (KEY, [])
    assert leader.on_value(KEY, "c", 3) == []
    assert leader.on_value(KEY, "b", 2) == [Broadcast(("b", "c"), {"a": 1, "b": 2, "c": 3})]
    leader.validate()
    return leader


def test_leader_finishes_when_all_followers_have_the_values():
    leader = _leader_with_all_values()
    assert leader.on_confirmed(KEY, "b", None) == []
    *releases, finish = leader.on_confirmed(KEY, "c", None)
    assert releases == [Release("b", None), Release("c", None)]
    assert finish == Finish({"a": 1, "b": 2, "c": 3}, None)


def test_follower_finishes_when_released():
    follower = GatherMachine()
    assert follower.begin("b", ABC, 2, 5.0) == (KEY, [SendValue("a")])
    assert follower.on_broadcast(KEY, {"a": 1}) == [AwaitRelease()]
    assert follower.awaited(KEY) == {"a"}
    assert follower.on_release(KEY, None) == [Finish({"a": 1}, None)]
    assert follower.on_broadcast(KEY, {}) == follower.on_release(KEY, None) == follower.on_timeout(KEY, 1.0) == []


@pytest.mark.parametrize("end", ["lost", "time"])
def test_follower_with_all_values_finishes_without_its_leader(end):
    follower = GatherMachine()
    follower.begin("b", ABC, 2, 5.0)
    follower.on_broadcast(KEY, {"a": 1})
    ended = follower.on_lost(KEY, "a", ConnectionLostError("gone")) if end == "lost" else follower.on_timeout(KEY, 5.0)
    assert ended == [Finish({"a": 1}, None)]


def test_failed_leader_releases_followers_that_sent_a_value_and_refuses_late_ones():
    leader = GatherMachine()
    leader.begin("a", ABC, 1, 5.0)
    leader.on_value(KEY, "b", 2)
    assert leader.awaited(KEY) == {"c"}
    release, finish = leader.on_timeout(KEY, 5.0)
    assert isinstance(finish, Finish)
    assert isinstance(finish.error, RpcTimeoutError)
    text = "c timed out in _all_gather after 5.00 seconds."
    assert release == Release("b", Failure("RpcTimeoutError", text))
    with pytest.raises(UsageError, match=f"c came too late: a has finished gather 0 of a, b, c: {text}"):
        leader.on_value(KEY, "c", 3)

    follower = GatherMachine()
    follower.begin("b", ABC, 2, 5.0)
    (finish,) = follower.on_release(KEY, Failure("RpcTimeoutError", text))
    assert isinstance(finish, Finish)
    assert isinstance(finish.error, RpcTimeoutError)
    assert str(finish.error) == f"a gave up gather 0 of a, b, c: {text}"


def test_unreachable_follower_fails_the_leader_but_not_other_followers():
    leader = _leader_with_all_values()
    assert leader.on_timeout(KEY, 5.0) == []  # the calls have timeouts of their own
    leader.on_confirmed(KEY, "b", ConnectionLostError("b is gone"))
    to_b, to_c, finish = leader.on_confirmed(KEY, "c", None)
    assert to_b == Release("b", Failure("ConnectionLostError", "b is gone"))
    assert to_c == Release("c", None)
    assert isinstance(finish, Finish)
    assert "Followers ['b'] timed out in _all_gather after 5.00 seconds." in str(finish.error)


def test_values_of_strangers_and_duplicate_values_raise():
    leader = GatherMachine()
    leader.on_value(KEY, "b", 2)  # before the leader has begun
    for stranger in ("b", "d"):
        with pytest.raises(UsageError, match=f"{stranger} does not belong to gather 0 of a, b, c, or has sent"):
            leader.on_value(KEY, stranger, 2)
    leader.validate()


class _World:
    """Some workers that make the same gathers, and messages between them that arrive in any order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = ABC if self.random.random() < 0.5 else ("a", "b", "c", "d")
        self.count = self.random.randint(1, 4)
        self.machines = {name: GatherMachine() for name in self.names}
        self.inside: dict[str, Key] = {}
        self.results: dict[str, list[Finish]] = {name: [] for name in self.names}
        self.excused: set[tuple[str, Key]] = set()  # need not wait for the leader
        self.dead: set[str] = set()
        self.messages: list[tuple[Any, ...]] = []
        self.deaths = self.random.choice([0, 0, 0, 1, 2])
        self.hurried = self.random.choice([0.0, 0.0, 0.1])  # how often a gather times out, or a call fails

    def run(self) -> None:
        for _ in range(100_000):
            steps = self._steps()
            if not steps:
                break
            self.random.choice(steps)()
            for name in self._living():
                self.machines[name].validate()
        self._check()

    def _living(self) -> list[str]:
        return [name for name in self.names if name not in self.dead]

    def _steps(self) -> list[Any]:
        steps: list[Any] = [lambda m=m: self._deliver(m) for m in self.messages]
        for name in self._living():
            if name not in self.inside:
                if len(self.results[name]) < self.count:
                    steps.append(lambda name=name: self._begin(name))
                continue
            lost = self.machines[name].awaited(self.inside[name]) & self.dead
            steps += [lambda name=name, other=other: self._lose(name, other) for other in lost]
            if self.random.random() < self.hurried:
                steps.append(lambda name=name: self._time_out(name))
        if self.deaths and self.random.random() < 0.3:
            steps.append(self._kill)
        return steps

    def _begin(self, name: str) -> None:
        number = len(self.results[name])
        self.inside[name], actions = self.machines[name].begin(name, self.names, (name, number), 5.0)
        self._perform(name, self.inside[name], actions)

    def _lose(self, name: str, other: str) -> None:
        key = self.inside[name]
        self.excused.add((name, key))
        self._perform(name, key, self.machines[name].on_lost(key, other, ConnectionLostError(other)))

    def _time_out(self, name: str) -> None:
        key = self.inside[name]
        self.excused.add((name, key))
        self._perform(name, key, self.machines[name].on_timeout(key, 5.0))

    def _kill(self) -> None:
        self.deaths -= 1
        name = self.random.choice(self._living())
        self.dead.add(name)
        self.inside.pop(name, None)

    def _deliver(self, message: tuple[Any, ...]) -> None:
        self.messages.remove(message)
        kind, sender, to, key, content = message
        failed: FarpropError | None = None
        if to in self.dead:
            failed = ConnectionLostError(to)
        elif kind == "value":
            try:
                self._perform(to, key, self.machines[to].on_value(key, sender, content))
            except FarpropError as error:
                failed = error
        elif kind == "broadcast":
            self._perform(to, key, self.machines[to].on_broadcast(key, content))
        else:
            self._perform(to, key, self.machines[to].on_release(key, content))
        if sender in self.dead:
            return
        if kind == "value" and failed is not None:
            self._perform(sender, key, self.machines[sender].fail(key, failed))
        elif kind == "broadcast":
            if self.random.random() < self.hurried:
                failed = RpcTimeoutError("slow")
            self._perform(sender, key, self.machines[sender].on_confirmed(key, to, failed))

    def _perform(self, name: str, key: Key, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case SendValue(leader):
                    self.messages.append(("value", name, leader, key, (name, key.number)))
                case Broadcast(followers, values):
                    self.messages += [("broadcast", name, follower, key, values) for follower in followers]
                case Release(follower, failure):
                    self.messages.append(("release", name, follower, key, failure))
                case Finish():
                    assert self.inside.pop(name) == key
                    self._check_result(name, key, action)
                    self.results[name].append(action)

    def _check_result(self, name: str, key: Key, finish: Finish) -> None:
        leader = self.names[0]
        if finish.error is None:
            assert finish.values == {other: (other, key.number) for other in self.names}
            if name != leader and (name, key) not in self.excused:
                assert len(self.results[leader]) > key.number, "a follower finished before its leader"
        elif not self.dead and not self.excused and not self.hurried:
            raise AssertionError("nothing went wrong") from finish.error

    def _check(self) -> None:
        assert not self.messages
        for name in self._living():
            assert len(self.results[name]) == self.count, f"{name} waits for ever"
            if name == self.names[0] or not self.dead:
                assert not self.machines[name]._open


@pytest.mark.parametrize("block", range(4))
def test_any_order_of_messages(block):
    for seed in range(block * 1000, (block + 1) * 1000):
        world = _World(seed)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_simulation_covers_values_errors_and_deaths():
    values = errors = deaths = 0
    for seed in range(300):
        world = _World(seed)
        world.run()
        finishes = [finish for results in world.results.values() for finish in results]
        values += sum(finish.error is None for finish in finishes)
        errors += sum(finish.error is not None for finish in finishes)
        deaths += len(world.dead)
    assert values > 500
    assert errors > 50
    assert deaths > 50


def test_simulation_detects_a_follower_that_does_not_wait_for_its_release(monkeypatch):
    on_broadcast = GatherMachine.on_broadcast

    def hasty(self: GatherMachine, key: Key, values: dict[str, Any]) -> list[Any]:
        return [*on_broadcast(self, key, values), *self.on_release(key, None)]

    monkeypatch.setattr(GatherMachine, "on_broadcast", hasty)
    with pytest.raises(AssertionError, match="a follower finished before its leader"):
        for seed in range(100):
            _World(seed).run()


@pytest.mark.parametrize("error", [ConnectionLostError, WrongPeerError])
def test_late_worker_is_not_blamed_for_a_death(error: type[ConnectionLostError]) -> None:
    """It raised ``UsageError``, as if the program of the late worker were wrong."""
    leader = GatherMachine()
    leader.begin("a", ABC, 1, 5.0)
    leader.on_lost(KEY, "b", error("b is gone"))
    with pytest.raises(ConnectionLostError, match="c came too late: a has finished gather 0 of a, b, c: b is gone"):
        leader.on_value(KEY, "c", 3)


def test_gather_whose_begin_was_interrupted_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others who take part in it hear of that: a ``KeyError`` came from the leader."""
    gathers = Gathers()
    begin = gathers._machine.begin

    def interrupted(*args: Any) -> Any:
        begin(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(gathers._machine, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gathers.begin("a", {"a", "b"}, 1, 5.0, lambda key: None)
    with pytest.raises(ConnectionLostError, match="interrupted"):
        gathers.on_value(Key(("a", "b"), 0), "b", 2)
