"""Gatherings without calls: in any order of messages, with workers that die and with time that runs out."""

from __future__ import annotations

import random
from typing import Any

import pytest

from farprop.errors import ConnectionLostError, FarpropError, RpcTimeoutError, UsageError
from farprop.protocol.gatherings import Failure, Finish, Gatherings, Hurry, Key, Release, Speak, Tell

ABC = ("a", "b", "c")
KEY = Key(ABC, 0)


def _leader_with_all_words() -> Gatherings:
    leader = Gatherings()
    assert leader.begin("a", ABC, 1, 5.0) == (KEY, [])
    assert leader.hear(KEY, "c", 3) == []
    assert leader.hear(KEY, "b", 2) == [Tell(("b", "c"), {"a": 1, "b": 2, "c": 3})]
    leader.validate()
    return leader


def test_the_leader_is_through_when_all_have_the_words():
    leader = _leader_with_all_words()
    assert leader.confirm(KEY, "b", None) == []
    *releases, finish = leader.confirm(KEY, "c", None)
    assert releases == [Release("b", None), Release("c", None)]
    assert finish == Finish({"a": 1, "b": 2, "c": 3}, None)


def test_a_follower_is_through_when_it_is_released():
    follower = Gatherings()
    assert follower.begin("b", ABC, 2, 5.0) == (KEY, [Speak("a")])
    assert follower.be_told(KEY, {"a": 1}) == [Hurry()]
    assert follower.awaited(KEY) == {"a"}
    assert follower.be_released(KEY, None) == [Finish({"a": 1}, None)]
    assert follower.be_told(KEY, {}) == follower.be_released(KEY, None) == follower.run_out(KEY, 1.0) == []


@pytest.mark.parametrize("end", ["lost", "time"])
def test_a_follower_with_the_words_needs_its_leader_no_more(end):
    follower = Gatherings()
    follower.begin("b", ABC, 2, 5.0)
    follower.be_told(KEY, {"a": 1})
    ended = follower.lose(KEY, "a", ConnectionLostError("gone")) if end == "lost" else follower.run_out(KEY, 5.0)
    assert ended == [Finish({"a": 1}, None)]


def test_a_leader_that_gives_up_says_so_to_those_who_spoke_and_refuses_the_others():
    leader = Gatherings()
    leader.begin("a", ABC, 1, 5.0)
    leader.hear(KEY, "b", 2)
    assert leader.awaited(KEY) == {"c"}
    release, finish = leader.run_out(KEY, 5.0)
    assert isinstance(finish, Finish)
    assert isinstance(finish.error, RpcTimeoutError)
    text = "c timed out in _all_gather after 5.00 seconds."
    assert release == Release("b", Failure("RpcTimeoutError", text))
    with pytest.raises(UsageError, match=f"c came too late: a is through with gathering 0 of a, b, c: {text}"):
        leader.hear(KEY, "c", 3)

    follower = Gatherings()
    follower.begin("b", ABC, 2, 5.0)
    (finish,) = follower.be_released(KEY, Failure("RpcTimeoutError", text))
    assert isinstance(finish, Finish)
    assert isinstance(finish.error, RpcTimeoutError)
    assert str(finish.error) == f"a gave up gathering 0 of a, b, c: {text}"


def test_a_follower_that_could_not_be_told():
    leader = _leader_with_all_words()
    assert leader.run_out(KEY, 5.0) == []  # the calls have timeouts of their own
    leader.confirm(KEY, "b", ConnectionLostError("b is gone"))
    to_b, to_c, finish = leader.confirm(KEY, "c", None)
    assert to_b == Release("b", Failure("ConnectionLostError", "b is gone"))
    assert to_c == Release("c", None)
    assert isinstance(finish, Finish)
    assert "Followers ['b'] timed out in _all_gather after 5.00 seconds." in str(finish.error)


def test_words_that_do_not_belong():
    leader = Gatherings()
    leader.hear(KEY, "b", 2)  # before the leader has begun
    for stranger in ("b", "d"):
        with pytest.raises(UsageError, match=f"{stranger} does not belong to gathering 0 of a, b, c, or has spoken"):
            leader.hear(KEY, stranger, 2)
    leader.validate()


class _World:
    """Some workers that make the same gatherings, and messages between them that come in any order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = ABC if self.random.random() < 0.5 else ("a", "b", "c", "d")
        self.count = self.random.randint(1, 4)
        self.machines = {name: Gatherings() for name in self.names}
        self.inside: dict[str, Key] = {}
        self.results: dict[str, list[Finish]] = {name: [] for name in self.names}
        self.excused: set[tuple[str, Key]] = set()  # need not wait for the leader
        self.dead: set[str] = set()
        self.messages: list[tuple[Any, ...]] = []
        self.deaths = self.random.choice([0, 0, 0, 1, 2])
        self.hurried = self.random.choice([0.0, 0.0, 0.1])  # how often time runs out, or a call fails

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
                steps.append(lambda name=name: self._run_out(name))
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
        self._perform(name, key, self.machines[name].lose(key, other, ConnectionLostError(other)))

    def _run_out(self, name: str) -> None:
        key = self.inside[name]
        self.excused.add((name, key))
        self._perform(name, key, self.machines[name].run_out(key, 5.0))

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
        elif kind == "speak":
            try:
                self._perform(to, key, self.machines[to].hear(key, sender, content))
            except FarpropError as error:
                failed = error
        elif kind == "tell":
            self._perform(to, key, self.machines[to].be_told(key, content))
        else:
            self._perform(to, key, self.machines[to].be_released(key, content))
        if sender in self.dead:
            return
        if kind == "speak" and failed is not None:
            self._perform(sender, key, self.machines[sender].fail(key, failed))
        elif kind == "tell":
            if self.random.random() < self.hurried:
                failed = RpcTimeoutError("slow")
            self._perform(sender, key, self.machines[sender].confirm(key, to, failed))

    def _perform(self, name: str, key: Key, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Speak(leader):
                    self.messages.append(("speak", name, leader, key, (name, key.number)))
                case Tell(followers, words):
                    self.messages += [("tell", name, follower, key, words) for follower in followers]
                case Release(follower, failure):
                    self.messages.append(("release", name, follower, key, failure))
                case Finish():
                    assert self.inside.pop(name) == key
                    self._look_at(name, key, action)
                    self.results[name].append(action)

    def _look_at(self, name: str, key: Key, finish: Finish) -> None:
        leader = self.names[0]
        if finish.error is None:
            assert finish.words == {other: (other, key.number) for other in self.names}
            if name != leader and (name, key) not in self.excused:
                assert len(self.results[leader]) > key.number, "a follower was through before its leader"
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


def test_the_simulated_worlds_are_not_all_alike():
    words = errors = deaths = 0
    for seed in range(300):
        world = _World(seed)
        world.run()
        finishes = [finish for results in world.results.values() for finish in results]
        words += sum(finish.error is None for finish in finishes)
        errors += sum(finish.error is not None for finish in finishes)
        deaths += len(world.dead)
    assert words > 500
    assert errors > 50
    assert deaths > 50


def test_a_follower_that_does_not_wait_for_its_release_is_found(monkeypatch):
    be_told = Gatherings.be_told

    def hasty(self: Gatherings, key: Key, words: dict[str, Any]) -> list[Any]:
        return [*be_told(self, key, words), *self.be_released(key, None)]

    monkeypatch.setattr(Gatherings, "be_told", hasty)
    with pytest.raises(AssertionError, match="a follower was through before its leader"):
        for seed in range(100):
            _World(seed).run()
