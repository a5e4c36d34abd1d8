"""Which gradients travel together, and when: the decisions of DistributedDataParallel on one rank.

Rules that hold here:

- Buckets are launched in their order, each once an iteration, and only when all gradients in it are there. So all ranks
  launch the same ones in the same order, whatever order their gradients come in.
- What is not expected is not counted: a gradient that comes at rest is the user's own affair (``no_sync``).
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from farprop.errors import ReductionError

_SHOWN = 10  # names in an error


class Parameter(NamedTuple):
    """What the machine knows of a parameter."""

    name: str
    size: int  # in bytes
    kind: Hashable  # parameters of one bucket have one kind
    is_alone: bool = False  # it has a bucket of its own


Bucket = tuple[int, ...]


def assign(parameters: Sequence[Parameter], order: Iterable[int], first: int, limit: int) -> tuple[Bucket, ...]:
    """Buckets of about ``limit`` bytes, the first of each kind of ``first``; in the order in which they get full."""
    done: list[Bucket] = []
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}
    place = {}
    for number, index in enumerate(order):
        parameter = parameters[index]
        kind = parameter.kind
        place[index] = number
        if parameter.is_alone:
            done.append((index,))
            continue
        filling.setdefault(kind, []).append(index)
        room[kind] = room.get(kind, first) - parameter.size
        if room[kind] <= 0:
            room[kind] = limit
            done.append(tuple(filling.pop(kind)))
    done.extend(tuple(bucket) for bucket in filling.values())
    return tuple(sorted(done, key=lambda bucket: place[bucket[-1]]))


class State(enum.Enum):
    REST = "rest"  # nothing is expected
    EXPECTING = "expecting"  # a forward pass has run
    RUNNING = "running"  # a backward pass has begun, and not all buckets are launched
    LAUNCHED = "launched"  # all are


class Reduction:
    """The machine. ``begin``, ``ready`` and ``force`` return the buckets to launch, in order."""

    def __init__(self, parameters: Sequence[Parameter], buckets: Sequence[Bucket], rank: int, learns: bool) -> None:
        self.state = State.REST
        self.is_learning = learns  # a static graph's first iteration only counts what comes
        self.order: list[int] = []  # of the first iteration: what buckets are rebuilt by
        self.is_order_known = False
        self._parameters = tuple(parameters)
        self._rank = rank
        self._times = [1] * len(self._parameters)  # how often each gradient comes
        self._unused: frozenset[int] = frozenset()
        self._expected_unused: frozenset[int] = frozenset()
        self._came = [0] * len(self._parameters)
        self._has_just_learned = False
        self.set_buckets(buckets)

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        """New buckets, between iterations."""
        if self.state in (State.RUNNING, State.LAUNCHED):
            raise ReductionError("Buckets can't be changed while gradients are reduced.")
        self.buckets = tuple(buckets)
        self._bucket_of = {index: number for number, bucket in enumerate(self.buckets) for index in bucket}
        self._reset()

    def expect(self, unused: Iterable[int] = ()) -> None:
        """A forward pass has run; the gradients of all but ``unused`` will come; a static graph may know of more."""
        if self.state in (State.RUNNING, State.LAUNCHED):
            raise ReductionError("A forward pass ended while gradients were reduced.")
        self._reset()
        self._expected_unused = self._unused.union(unused)
        self.state = State.EXPECTING

    def begin(self, can_learn: bool = True) -> list[int]:
        """A backward pass has begun. It can't learn if nobody will tell when it ends."""
        if self.state is not State.EXPECTING:
            return []
        self.state = State.RUNNING
        self.learns_now = self.is_learning and can_learn
        if self.learns_now:
            return []
        for index in sorted(self._expected_unused):
            self._mark(index)
        return self._full()

    def ready(self, index: int) -> Sequence[int]:
        """A gradient has come. On the way of every parameter, so what is usual comes first."""
        if self.state is not State.RUNNING:
            if self.state is State.LAUNCHED:
                raise ReductionError(self._came_again(index))
            return ()
        came = self._came[index] = self._came[index] + 1
        if self.learns_now:
            return ()
        if came != self._times[index]:
            if came > self._times[index]:
                raise ReductionError(self._came_again(index))
            return ()
        if not self.is_order_known:
            self.order.append(index)
        bucket = self._bucket_of[index]
        left = self._left[bucket] = self._left[bucket] - 1
        return () if left or bucket != self._launched else self._full()

    def is_there(self, index: int) -> bool:
        """Whether all of a gradient has come, in an iteration that does not just count."""
        return not self.learns_now and self._came[index] >= self._times[index]

    def learned(self) -> list[int]:
        """The first backward pass of a static graph has ended."""
        self._times = [max(1, came) for came in self._came]
        self._unused = frozenset(index for index, came in enumerate(self._came) if not came)
        self.is_learning = self.learns_now = False
        self._has_just_learned = True
        self._left = [0] * len(self.buckets)
        return self._full()

    def force(self) -> list[int]:
        """Launch what is left, because no more gradients come."""
        self._left = [0] * len(self.buckets)
        self.state = State.RUNNING
        return self._full()

    def finish(self) -> None:
        """All buckets are back."""
        if self.state is not State.LAUNCHED:
            raise ReductionError("Not all gradients were reduced.")
        # What gradients of a static graph come only once was not known when they came, so the next iteration's order
        # is taken.
        if not self.is_order_known and not self._has_just_learned:
            self.is_order_known = True
            # What is not used comes last: nothing has to wait for it.
            self.order.extend(sorted(set(range(len(self._parameters))).difference(self.order)))
        self.state = State.REST

    def abandon(self) -> None:
        """The iteration has failed."""
        if not self.is_order_known:
            self.order.clear()
        self.state = State.REST

    def note_shadow(self) -> None:
        """The others had an iteration that this rank only accompanied."""
        if not self.is_order_known:
            self.is_order_known = True
            self.order = [index for bucket in self.buckets for index in bucket]

    @property
    def missing(self) -> list[int]:
        """What has not come in a backward pass that has begun."""
        if self.state is not State.RUNNING:
            return []
        return [index for index, came in enumerate(self._came) if came < self._times[index]]

    def unfinished(self) -> str:
        """What is wrong if the next forward pass starts now."""
        missing = self.missing
        names = ", ".join(self._parameters[index].name for index in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} others" if len(missing) > _SHOWN else ""
        return (
            f"Rank {self._rank}: the last backward pass gave no gradient for {len(missing)} of "
            f"{len(self._parameters)} parameters: {names}{more}. So gradients on this rank are not those of all ranks. "
            "All parameters have to take part in the loss. If some don't, pass find_unused_parameters=True to "
            "DistributedDataParallel; if outputs of its forward were left out of the loss, use them. If the backward "
            "pass raised an error, leave out its iteration on every rank."
        )

    def validate(self) -> None:
        """Raise if an invariant does not hold."""
        members = sorted(index for bucket in self.buckets for index in bucket)
        assert members == list(range(len(self._parameters)))
        assert 0 <= self._launched <= len(self.buckets)
        assert (self.state is State.LAUNCHED) <= (self._launched == len(self.buckets))
        assert not any(self._left[: self._launched])
        if self.state is State.RUNNING and not self.learns_now:
            assert self._launched < len(self.buckets)
            assert self._left[self._launched] > 0
            for number, bucket in enumerate(self.buckets):
                assert self._left[number] == sum(self._came[index] < self._times[index] for index in bucket)
        if self.is_order_known:
            assert sorted(self.order) == members

    def _reset(self) -> None:
        self._came = [0] * len(self._parameters)
        self._left = [len(bucket) for bucket in self.buckets]
        self._launched = 0
        self.learns_now = self._has_just_learned = False
        self._expected_unused = frozenset()

    def _mark(self, index: int) -> None:
        self._came[index] = self._times[index]
        self._left[self._bucket_of[index]] -= 1

    def _full(self) -> list[int]:
        first = self._launched
        while self._launched < len(self.buckets) and not self._left[self._launched]:
            self._launched += 1
        if self._launched == len(self.buckets):
            self.state = State.LAUNCHED
        return list(range(first, self._launched))

    def _came_again(self, index: int) -> str:
        return (
            f"Rank {self._rank}: the gradient of {self._parameters[index].name} came more often than expected in one "
            "backward pass. It was found unused in the forward pass and used after all, or it is used in several "
            "checkpoints or nested backward passes; if each iteration is like the first, pass static_graph=True to "
            "DistributedDataParallel."
        )
