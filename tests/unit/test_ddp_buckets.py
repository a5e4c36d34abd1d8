"""The bucket schedule: random orders of gradients, and planted bugs that they must find."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from farprop.errors import ReductionError
from farprop.protocol import ddp_buckets
from farprop.protocol.ddp_buckets import BucketSchedule, ParameterInfo, State, assign_buckets

SEEDS = 3000


def parameters(dice: random.Random) -> list[ParameterInfo]:
    return [
        ParameterInfo(f"p{number}", dice.randrange(1, 50), dice.choice("ab"), dice.random() < 0.1)
        for number in range(dice.randrange(1, 12))
    ]


def check_assignment(known: list[ParameterInfo], order: list[int], first: int, limit: int) -> None:
    made = assign_buckets(known, order, first, limit)
    assert sorted(index for bucket in made for index in bucket) == sorted(order)
    begun = set()
    for bucket in made:
        kinds = {known[index].kind for index in bucket}
        assert len(kinds) == 1
        if len(bucket) > 1:
            assert not any(known[index].needs_own_bucket for index in bucket)
            # Without its last parameter, a bucket was not full.
            assert sum(known[index].nbytes for index in bucket[:-1]) < (limit if kinds <= begun else first)
        if not known[bucket[0]].needs_own_bucket:
            begun |= kinds
        assert [order.index(index) for index in bucket] == sorted(order.index(index) for index in bucket)
    assert [order.index(bucket[-1]) for bucket in made] == sorted(order.index(bucket[-1]) for bucket in made)


def run(seed: int) -> None:
    """Some iterations of several ranks, whose gradients arrive in different orders."""
    dice = random.Random(seed)
    known = parameters(dice)
    everything = list(range(len(known)))
    first, limit = dice.randrange(1, 60), dice.randrange(60, 120)
    check_assignment(known, dice.sample(everything, len(everything)), first, limit)
    is_static = dice.random() < 0.3
    finds_unused = not is_static and dice.random() < 0.5
    times = [dice.choice([0, 1, 1, 2]) for _ in known] if is_static else [1] * len(known)
    made = assign_buckets(known, reversed(everything), first, limit)
    ranks = [BucketSchedule(known, made, number, is_static) for number in range(2)]
    order: list[int] = []
    for iteration in range(4):
        launched = []
        for number, schedule in enumerate(ranks):
            unused = [index for index in everything if finds_unused and dice.random() < 0.3]
            schedule.arm(unused)
            schedule.validate()
            events = [index for index in everything if index not in unused for _ in range(times[index])]
            dice.shuffle(events)
            came: set[int] = set(unused)
            log = schedule.begin()
            left = list(events)
            for index in events:
                assert schedule.state is State.RUNNING
                new = schedule.mark_ready(index)
                left.remove(index)
                if index not in left:
                    came.add(index)
                assert schedule.is_ready(index) == (index not in left and not schedule.learns_now)
                for bucket in new:
                    learned_unused = {i for i in everything if is_static and not times[i]}
                    assert set(schedule.buckets[bucket]) <= came | learned_unused, "launched before it was full"
                log += new
                schedule.validate()
            if schedule.is_learning:
                assert log == []
                log += schedule.end_learning()
            assert schedule.state is State.LAUNCHED, "all gradients came, and not all was launched"
            if events:
                with pytest.raises(ReductionError, match="more often than expected"):
                    schedule.mark_ready(events[0])
            assert schedule.missing == []
            schedule.finish()
            schedule.validate()
            assert not schedule.mark_ready(dice.choice(everything))  # at rest
            launched.append(log)
            # A static graph's first iteration does not know which gradient is the last of its parameter.
            assert schedule.is_order_known == (iteration >= is_static)
            if iteration == is_static and number == 0:
                order = list(schedule.order)
                assert [index for index in order if index in events] == list(dict.fromkeys(events[::-1]))[::-1]
                assert order[len(set(events)) :] == sorted(set(everything) - set(events)), "what is unused comes last"
        assert launched[0] == launched[1] == list(range(len(made)))
        if iteration == is_static:
            made = assign_buckets(known, order, first, limit)
            for schedule in ranks:
                schedule.set_buckets(made)
                schedule.validate()


def test_random_orders_of_gradients():
    for seed in range(SEEDS):
        run(seed)


def test_missing_gradient_is_reported_and_the_remaining_buckets_launch():
    for seed in range(SEEDS):
        dice = random.Random(seed)
        known = parameters(dice)
        schedule = BucketSchedule(known, assign_buckets(known, range(len(known)), 20, 80), 3, False)
        schedule.arm()
        schedule.begin()
        missing = set(dice.sample(range(len(known)), dice.randrange(1, len(known) + 1)))
        launched = [b for index in range(len(known)) if index not in missing for b in schedule.mark_ready(index)]
        assert schedule.missing == sorted(missing)
        text = schedule.missing_message()
        assert text.startswith("Rank 3: ")
        assert "find_unused_parameters=True" in text
        assert all(known[index].name in text for index in sorted(missing)[:10])
        with pytest.raises(ReductionError):
            schedule.arm()
        with pytest.raises(ReductionError):
            schedule.finish()
        # The other ranks get the buckets that they wait for.
        assert launched + schedule.launch_remaining() == list(range(len(schedule.buckets)))
        schedule.note_shadowed()
        schedule.abort()
        assert schedule.is_order_known  # as on the others, whose iteration was complete
        schedule.validate()
        schedule.arm()
        schedule.begin()
        for index in range(len(known)):
            schedule.mark_ready(index)
        schedule.finish()


def test_gradient_of_an_unused_parameter_raises():
    known = [ParameterInfo("a", 1, "x"), ParameterInfo("b", 1, "x")]
    schedule = BucketSchedule(known, [(0, 1)], 0, False)
    schedule.arm([1])
    assert schedule.begin() == []
    with pytest.raises(ReductionError, match="gradient of b was accumulated more often"):
        schedule.mark_ready(1)


def _launch_when_any(schedule: BucketSchedule) -> list[int]:
    """Launches full buckets out of order."""
    new = [number for number, left in enumerate(schedule._left) if not left and number not in _seen(schedule)]
    _seen(schedule).update(new)
    if len(_seen(schedule)) == len(schedule.buckets):
        schedule.state = State.LAUNCHED
    schedule._launched = len(_seen(schedule))
    return new


def _seen(schedule: BucketSchedule) -> set[int]:
    return schedule.__dict__.setdefault("seen", set())


def _forget_unused(schedule: BucketSchedule, index: int) -> None:
    schedule._counts[index] = schedule._expected[index]


def _forget_order(schedule: BucketSchedule) -> None:
    """As ``finish``, but records the order of the parameters instead of that of the gradients."""
    _finish(schedule)
    schedule.order.sort()


_finish = BucketSchedule.finish


def _ignore_first(known: list[ParameterInfo], order: list[int], first: int, limit: int) -> object:
    return _assign(known, order, limit, limit)


def _mix_kinds(known: list[ParameterInfo], order: list[int], first: int, limit: int) -> object:
    return _assign([p._replace(kind="") for p in known], order, first, limit)


_assign = ddp_buckets.assign_buckets


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (BucketSchedule, "_launchable", _launch_when_any),
        (BucketSchedule, "_mark_unused", _forget_unused),
        (BucketSchedule, "finish", _forget_order),
        (BucketSchedule, "_reset", lambda schedule: None),
        (None, "assign_buckets", _ignore_first),
        (None, "assign_buckets", _mix_kinds),
    ],
    ids=["order of launches", "unused", "order", "reset", "first bucket", "kinds"],
)
def test_planted_bugs_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: type | None, name: str, bug: Callable[..., object]
) -> None:
    if owner is None:
        monkeypatch.setitem(globals(), name, bug)
    else:
        monkeypatch.setattr(owner, name, bug)
    with pytest.raises((AssertionError, ReductionError, AttributeError, IndexError)):
        for seed in range(300):
            run(seed)
