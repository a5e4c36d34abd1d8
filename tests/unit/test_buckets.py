"""The machine of buckets: random orders, and planted bugs that they must find."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from farprop.errors import ReductionError
from farprop.protocol import buckets
from farprop.protocol.buckets import Parameter, Reduction, State, assign

SEEDS = 3000


def parameters(dice: random.Random) -> list[Parameter]:
    return [
        Parameter(f"p{number}", dice.randrange(1, 50), dice.choice("ab"), dice.random() < 0.1)
        for number in range(dice.randrange(1, 12))
    ]


def check_assignment(known: list[Parameter], order: list[int], first: int, limit: int) -> None:
    made = assign(known, order, first, limit)
    assert sorted(index for bucket in made for index in bucket) == sorted(order)
    begun = set()
    for bucket in made:
        kinds = {known[index].kind for index in bucket}
        assert len(kinds) == 1
        if len(bucket) > 1:
            assert not any(known[index].is_alone for index in bucket)
            # Without its last parameter, a bucket was not full.
            assert sum(known[index].size for index in bucket[:-1]) < (limit if kinds <= begun else first)
        if not known[bucket[0]].is_alone:
            begun |= kinds
        assert [order.index(index) for index in bucket] == sorted(order.index(index) for index in bucket)
    assert [order.index(bucket[-1]) for bucket in made] == sorted(order.index(bucket[-1]) for bucket in made)


def run(seed: int) -> None:
    """Some iterations of several ranks, whose gradients come in different orders."""
    dice = random.Random(seed)
    known = parameters(dice)
    everything = list(range(len(known)))
    first, limit = dice.randrange(1, 60), dice.randrange(60, 120)
    check_assignment(known, dice.sample(everything, len(everything)), first, limit)
    is_static = dice.random() < 0.3
    finds_unused = not is_static and dice.random() < 0.5
    times = [dice.choice([0, 1, 1, 2]) for _ in known] if is_static else [1] * len(known)
    made = assign(known, reversed(everything), first, limit)
    ranks = [Reduction(known, made, number, is_static) for number in range(2)]
    order: list[int] = []
    for iteration in range(4):
        launched = []
        for number, machine in enumerate(ranks):
            unused = [index for index in everything if finds_unused and dice.random() < 0.3]
            machine.expect(unused)
            machine.validate()
            events = [index for index in everything if index not in unused for _ in range(times[index])]
            dice.shuffle(events)
            came: set[int] = set(unused)
            log = machine.begin()
            left = list(events)
            for index in events:
                assert machine.state is State.RUNNING
                new = machine.ready(index)
                left.remove(index)
                if index not in left:
                    came.add(index)
                assert machine.is_there(index) == (index not in left and not machine.learns_now)
                for bucket in new:
                    learned_unused = {i for i in everything if is_static and not times[i]}
                    assert set(machine.buckets[bucket]) <= came | learned_unused, "launched before it was full"
                log += new
                machine.validate()
            if machine.is_learning:
                assert log == []
                log += machine.learned()
            assert machine.state is State.LAUNCHED, "all gradients came, and not all was launched"
            if events:
                with pytest.raises(ReductionError, match="more often than expected"):
                    machine.ready(events[0])
            assert machine.missing == []
            machine.finish()
            machine.validate()
            assert not machine.ready(dice.choice(everything))  # at rest
            launched.append(log)
            # A static graph's first iteration does not know which gradient is the last of its parameter.
            assert machine.is_order_known == (iteration >= is_static)
            if iteration == is_static and number == 0:
                order = list(machine.order)
                assert [index for index in order if index in events] == list(dict.fromkeys(events[::-1]))[::-1]
                assert order[len(set(events)) :] == sorted(set(everything) - set(events)), "what is unused comes last"
        assert launched[0] == launched[1] == list(range(len(made)))
        if iteration == is_static:
            made = assign(known, order, first, limit)
            for machine in ranks:
                machine.set_buckets(made)
                machine.validate()


def test_random_orders():
    for seed in range(SEEDS):
        run(seed)


def test_a_gradient_that_never_comes():
    for seed in range(SEEDS):
        dice = random.Random(seed)
        known = parameters(dice)
        machine = Reduction(known, assign(known, range(len(known)), 20, 80), 3, False)
        machine.expect()
        machine.begin()
        missing = set(dice.sample(range(len(known)), dice.randrange(1, len(known) + 1)))
        launched = [b for index in range(len(known)) if index not in missing for b in machine.ready(index)]
        assert machine.missing == sorted(missing)
        text = machine.unfinished()
        assert text.startswith("Rank 3: ")
        assert "find_unused_parameters=True" in text
        assert all(known[index].name in text for index in sorted(missing)[:10])
        with pytest.raises(ReductionError):
            machine.expect()
        with pytest.raises(ReductionError):
            machine.finish()
        # The others get what they wait for.
        assert launched + machine.force() == list(range(len(machine.buckets)))
        machine.note_shadow()
        machine.abandon()
        assert machine.is_order_known  # as on the others, whose iteration was complete
        machine.validate()
        machine.expect()
        machine.begin()
        for index in range(len(known)):
            machine.ready(index)
        machine.finish()


def test_an_unused_parameter_that_is_used_after_all():
    known = [Parameter("a", 1, "x"), Parameter("b", 1, "x")]
    machine = Reduction(known, [(0, 1)], 0, False)
    machine.expect([1])
    assert machine.begin() == []
    with pytest.raises(ReductionError, match="gradient of b came more often"):
        machine.ready(1)


def _launch_when_any(machine: Reduction) -> list[int]:
    """Launches full buckets out of order."""
    new = [number for number, left in enumerate(machine._left) if not left and number not in _seen(machine)]
    _seen(machine).update(new)
    if len(_seen(machine)) == len(machine.buckets):
        machine.state = State.LAUNCHED
    machine._launched = len(_seen(machine))
    return new


def _seen(machine: Reduction) -> set[int]:
    return machine.__dict__.setdefault("seen", set())


def _forget_unused(machine: Reduction, index: int) -> None:
    machine._came[index] = machine._times[index]


def _forget_order(machine: Reduction) -> None:
    """As ``finish``, but what has come is in the order of the parameters."""
    _finish(machine)
    machine.order.sort()


_finish = Reduction.finish


def _ignore_first(known: list[Parameter], order: list[int], first: int, limit: int) -> object:
    return _assign(known, order, limit, limit)


def _mix_kinds(known: list[Parameter], order: list[int], first: int, limit: int) -> object:
    return _assign([p._replace(kind="") for p in known], order, first, limit)


_assign = buckets.assign


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (Reduction, "_full", _launch_when_any),
        (Reduction, "_mark", _forget_unused),
        (Reduction, "finish", _forget_order),
        (Reduction, "_reset", lambda machine: None),
        (None, "assign", _ignore_first),
        (None, "assign", _mix_kinds),
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
