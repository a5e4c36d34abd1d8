"""The sentences of ``why``, from snapshots that are made up: no worker is needed."""

from __future__ import annotations

import random

import pytest

from farprop.protocol.inspection import (
    HELD,
    QUEUED,
    RUNNING,
    UNFINISHED,
    Answer,
    AwaitedCall,
    CallId,
    Frame,
    Member,
    Reply,
    ServedCall,
    Silence,
    Snapshot,
    from_json,
    roots,
    to_json,
)
from farprop.protocol.waits import explain, reasons


def _member(name: str) -> Member:
    return Member(name, int(name[1:]), "host", 1, "")


def _call(caller: str, callee: str, number: int = 1) -> CallId:
    return CallId(caller, callee, number)


def _awaited(call: CallId, function: str, parent: CallId | None = None, seconds: float = 12.0) -> AwaitedCall:
    return AwaitedCall(call, f"train:{function}", seconds, None, "MainThread", True, None, parent)


def _served(call: CallId, function: str, state: str = RUNNING, waits_for: CallId | None = None, **more) -> ServedCall:
    waits = [] if waits_for is None else [waits_for]
    return ServedCall(call, f"train:{function}", state, 12.0, None, waits_for=waits, **more)


def _snapshot(name: str, awaited: list[AwaitedCall], served: list[ServedCall], busy: int = 0) -> Snapshot:
    return Snapshot(_member(name), "job", False, 0.0, 16, busy, False, awaited, served, 0)


def _why(answers: dict[str, Answer]) -> str:
    (reason,) = reasons(answers)
    return reason.sentence


def test_chain_over_three_workers_that_ends_in_a_line() -> None:
    first, second = _call("w0", "w1"), _call("w1", "w2", 3)
    answers: dict[str, Answer] = {
        "w0": _snapshot("w0", [_awaited(first, "step")], []),
        "w1": _snapshot("w1", [_awaited(second, "lock", first)], [_served(first, "step", waits_for=second)]),
        "w2": _snapshot("w2", [], [_served(second, "lock", place=Frame("/home/train.py", 88, "lock"), computes=True)]),
    }
    assert _why(answers) == (
        "w0 waits for w1.step (12 s), which waits for w2.lock (12 s): w2 has been in train.py:88 `lock` for 12 s, "
        "computing"
    )
    assert roots(answers) == {first: first, second: first}


def test_cycle() -> None:
    first, second = _call("w0", "w1"), _call("w1", "w0", 3)
    answers: dict[str, Answer] = {
        "w0": _snapshot("w0", [_awaited(first, "step")], [_served(second, "lock", waits_for=first)]),
        "w1": _snapshot("w1", [_awaited(second, "lock", first)], [_served(first, "step", waits_for=second)]),
    }
    (reason,) = reasons(answers)
    assert reason.is_cycle
    assert reason.sentence.endswith("which waits for w0.lock (12 s), which waits for w1.step (12 s): a cycle")


def test_value_that_another_call_makes() -> None:
    fetch, maker = _call("w0", "w1", 2), _call("w0", "w1", 1)
    answers: dict[str, Answer] = {
        "w0": _snapshot("w0", [_awaited(fetch, "to_here")], []),
        "w1": _snapshot("w1", [], [_served(fetch, "to_here", UNFINISHED, value_of=maker), _served(maker, "build")]),
    }
    assert "which waits for the value that w1.build makes (12 s): w1 has been in `build` for 12 s" in _why(answers)


@pytest.mark.parametrize(
    ("state", "end"),
    [
        (QUEUED, ": w1 has not started it: 16 of 16 threads are busy with `slow`"),
        (HELD, ": w1 holds it back: a barrier has not ended there, or w0 reads no answers"),
        (UNFINISHED, ": w1.step has returned a future that is not done (12 s)"),
    ],
)
def test_call_that_does_not_run(state: str, end: str) -> None:
    call = _call("w0", "w1", 99)
    slow = [_served(_call("w2", "w1", number), "slow") for number in range(16)]
    answers: dict[str, Answer] = {
        "w0": _snapshot("w0", [_awaited(call, "step")], []),
        "w1": _snapshot("w1", [], [*slow, _served(call, "step", state)], busy=16),
    }
    assert _why(answers).endswith(end)


def test_worker_that_says_nothing_and_call_that_is_unknown() -> None:
    call = _call("w0", "w1")
    answers: dict[str, Answer] = {
        "w0": _snapshot("w0", [_awaited(call, "step")], []),
        "w1": Silence(_member("w1"), "answers nothing: it is stopped"),
    }
    assert _why(answers) == "w0 waits for w1.step (12 s): w1 answers nothing: it is stopped"
    answers["w1"] = _snapshot("w1", [], [])
    assert "w1 does not have it" in _why(answers)


def test_each_worker_is_asked_once_and_every_chain_ends() -> None:
    """Random tables of who waits for whom: cycles, dead ends, silent workers, calls that nobody knows."""
    for seed in range(2000):
        rng = random.Random(seed)
        names = [f"w{number}" for number in range(rng.randint(1, 5))]
        calls = [_call(rng.choice(names), rng.choice(names), number) for number in range(rng.randint(1, 12))]
        answers: dict[str, Answer] = {}
        for name in names:
            own = [_awaited(call, "f", rng.choice([None, *calls])) for call in calls if call.caller == name]
            served = [
                _served(
                    call,
                    "f",
                    rng.choice([RUNNING, QUEUED, HELD, UNFINISHED]),
                    rng.choice([None, *calls]),
                    value_of=rng.choice([None, None, *calls]),
                    computes=rng.choice([True, False, None]),
                )
                for call in calls
                if call.callee == name and rng.random() < 0.9
            ]
            silent = Silence(_member(name), "answers nothing")
            answers[name] = silent if rng.random() < 0.1 else _snapshot(name, own, served)
        asked: list[str] = []

        def ask(name: str, answers: dict[str, Answer] = answers, asked: list[str] = asked) -> Answer:
            asked.append(name)
            return answers[name]

        reason = explain(_awaited(calls[0], "f"), ask)
        assert len(asked) == len(set(asked)), f"seed {seed}"
        assert len(reason.chain) == len(set(reason.chain)), f"seed {seed}"
        assert reason.is_cycle == reason.sentence.endswith(": a cycle"), f"seed {seed}"
        assert set(roots(answers)) >= {
            call.id for answer in answers.values() if isinstance(answer, Snapshot) for call in answer.awaited
        }
        assert from_json(to_json(Reply.of(answers.values())), Reply).answers.keys() == answers.keys()
