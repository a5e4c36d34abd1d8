"""The bucket schedule of DistributedDataParallel: which gradients are reduced together, and when, on one rank.

Rules that hold here:

- Buckets are launched in index order, once per iteration each, and only when every gradient in them is ready. So all
  ranks launch the same buckets in the same order, whatever order their gradients arrive in.
- In the idle state gradients are not counted: the program accumulates them locally (``no_sync``).
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from farprop.errors import ReductionError

_MAX_NAMES_IN_ERROR = 10

BucketIndices = tuple[int, ...]
"""The parameters of one bucket, as indices into the list of all parameters."""


class ParameterInfo(NamedTuple):
    """What the schedule knows about a parameter."""

    name: str
    nbytes: int
    kind: Hashable
    """Parameters of one bucket have the same kind, for example the same dtype and device."""
    needs_own_bucket: bool = False


def assign_buckets(
    parameters: Sequence[ParameterInfo], order: Iterable[int], first_limit: int, limit: int
) -> tuple[BucketIndices, ...]:
    """Split parameters into buckets.

    Args:
        parameters: All parameters.
        order: The indices of the parameters, in the order in which their gradients are expected.
        first_limit: Bytes after which the first bucket of each kind is full.
        limit: Bytes after which any later bucket is full.

    Returns:
        The buckets, in the order in which they fill up.
    """
    full: list[BucketIndices] = []
    filling: dict[Hashable, list[int]] = {}
    bytes_left: dict[Hashable, int] = {}
    position = {}
    for number, index in enumerate(order):
        parameter = parameters[index]
        kind = parameter.kind
        position[index] = number
        if parameter.needs_own_bucket:
            full.append((index,))
            continue
        filling.setdefault(kind, []).append(index)
        bytes_left[kind] = bytes_left.get(kind, first_limit) - parameter.nbytes
        if bytes_left[kind] <= 0:
            bytes_left[kind] = limit
            full.append(tuple(filling.pop(kind)))
    full.extend(tuple(bucket) for bucket in filling.values())
    return tuple(sorted(full, key=lambda bucket: position[bucket[-1]]))


class State(enum.Enum):
    """The state of a :class:`BucketSchedule`."""

    IDLE = "idle"  # no reduction is due
    ARMED = "armed"  # a forward pass has run; its backward pass reduces
    RUNNING = "running"  # the backward pass has begun, and some buckets are not launched yet
    LAUNCHED = "launched"  # all buckets are launched


class BucketSchedule:
    """The state machine. ``begin``, ``mark_ready``, ``end_learning`` and ``launch_remaining`` return bucket indices.

    The caller launches those buckets, in that order.

    Args:
        parameters: All parameters.
        buckets: The first buckets, which cover every parameter once.
        rank: The rank of this process, for error messages.
        learns: Whether the first iteration only counts gradients (``static_graph=True``).
    """

    def __init__(
        self, parameters: Sequence[ParameterInfo], buckets: Sequence[BucketIndices], rank: int, learns: bool
    ) -> None:
        self.state = State.IDLE
        self.is_learning = learns
        self.order: list[int] = []  # in which gradients got ready in the first iteration; buckets are rebuilt by it
        self.is_order_known = False
        self._parameters = tuple(parameters)
        self._rank = rank
        self._expected = [1] * len(self._parameters)  # how often each gradient is accumulated in a backward pass
        self._known_unused: frozenset[int] = frozenset()  # what a static graph has learned
        self._unused: frozenset[int] = frozenset()  # in this iteration
        self._counts = [0] * len(self._parameters)  # how often each gradient was accumulated in this iteration
        self._has_just_learned = False
        self.set_buckets(buckets)

    def set_buckets(self, buckets: Sequence[BucketIndices]) -> None:
        """Replace the buckets, between two iterations."""
        if self.state in (State.RUNNING, State.LAUNCHED):
            raise ReductionError("Buckets can't be changed while gradients are being reduced.")
        self.buckets = tuple(buckets)
        self._bucket_of = {index: number for number, bucket in enumerate(self.buckets) for index in bucket}
        self._reset()

    def arm(self, unused: Iterable[int] = ()) -> None:
        """Expect a backward pass, because a forward pass has run. Parameters in ``unused`` will get no gradient."""
        if self.state in (State.RUNNING, State.LAUNCHED):
            raise ReductionError("A forward pass ended while gradients were being reduced.")
        self._reset()
        self._unused = self._known_unused.union(unused)
        self.state = State.ARMED

    def begin(self, can_learn: bool = True) -> list[int]:
        """Start the backward pass. ``can_learn`` is whether the caller will be told when the pass ends."""
        if self.state is not State.ARMED:
            return []
        self.state = State.RUNNING
        self.learns_now = self.is_learning and can_learn
        if self.learns_now:
            return []
        for index in sorted(self._unused):
            self._mark_unused(index)
        return self._launchable()

    def mark_ready(self, index: int) -> Sequence[int]:
        """Count an accumulated gradient."""
        # This runs for every parameter, so the common case is the first branch of each test.
        if self.state is not State.RUNNING:
            if self.state is State.LAUNCHED:
                raise ReductionError(self._ready_again_message(index))
            return ()
        count = self._counts[index] = self._counts[index] + 1
        if self.learns_now:
            return ()
        if count != self._expected[index]:
            if count > self._expected[index]:
                raise ReductionError(self._ready_again_message(index))
            return ()
        if not self.is_order_known:
            self.order.append(index)
        bucket = self._bucket_of[index]
        left = self._left[bucket] = self._left[bucket] - 1
        return () if left or bucket != self._launched else self._launchable()

    def is_ready(self, index: int) -> bool:
        """Whether a gradient is complete. Never true in an iteration that only counts."""
        return not self.learns_now and self._counts[index] >= self._expected[index]

    def end_learning(self) -> list[int]:
        """End the first backward pass of a static graph: remember its counts, and launch all buckets."""
        self._expected = [max(1, count) for count in self._counts]
        self._known_unused = frozenset(index for index, count in enumerate(self._counts) if not count)
        self.is_learning = self.learns_now = False
        self._has_just_learned = True
        self._left = [0] * len(self.buckets)
        return self._launchable()

    def launch_remaining(self) -> list[int]:
        """Launch all buckets that are left, because no more gradients will be accumulated."""
        self._left = [0] * len(self.buckets)
        self.state = State.RUNNING
        return self._launchable()

    def finish(self) -> None:
        """End the iteration: all buckets are reduced."""
        if self.state is not State.LAUNCHED:
            raise ReductionError("Not all gradients were reduced.")
        # While a static graph learned, it was not known which accumulation was the last one of its parameter. So the
        # order is taken from the next iteration.
        if not self.is_order_known and not self._has_just_learned:
            self.is_order_known = True
            # Unused parameters come last, so that no bucket has to wait for them.
            self.order.extend(sorted(set(range(len(self._parameters))).difference(self.order)))
        self.state = State.IDLE

    def abort(self) -> None:
        """End the iteration after an error."""
        if not self.is_order_known:
            self.order.clear()
        self.state = State.IDLE

    def note_shadowed(self) -> None:
        """Note that the other ranks finished an iteration for which this rank had no gradients."""
        if not self.is_order_known:
            self.is_order_known = True
            self.order = [index for bucket in self.buckets for index in bucket]

    @property
    def missing(self) -> list[int]:
        """Parameters without a complete gradient in a running backward pass."""
        if self.state is not State.RUNNING:
            return []
        return [index for index, count in enumerate(self._counts) if count < self._expected[index]]

    def missing_message(self) -> str:
        """The error text for a forward pass that starts although gradients are missing."""
        missing = self.missing
        names = ", ".join(self._parameters[index].name for index in missing[:_MAX_NAMES_IN_ERROR])
        more = f" and {len(missing) - _MAX_NAMES_IN_ERROR} others" if len(missing) > _MAX_NAMES_IN_ERROR else ""
        return (
            f"Rank {self._rank}: the last backward pass gave no gradient for {len(missing)} of "
            f"{len(self._parameters)} parameters: {names}{more}. So the gradients of this rank were not averaged "
            "correctly. All parameters have to take part in the loss. If some do not, pass find_unused_parameters=True "
            "to DistributedDataParallel. If outputs of the forward pass were left out of the loss, use them. If the "
            "backward pass raised an error, skip this iteration on every rank."
        )

    def validate(self) -> None:
        """Raise ``AssertionError`` if an invariant does not hold."""
        members = sorted(index for bucket in self.buckets for index in bucket)
        assert members == list(range(len(self._parameters)))
        assert 0 <= self._launched <= len(self.buckets)
        assert (self.state is State.LAUNCHED) <= (self._launched == len(self.buckets))
        assert not any(self._left[: self._launched])
        if self.state is State.RUNNING and not self.learns_now:
            assert self._launched < len(self.buckets)
            assert self._left[self._launched] > 0
            for number, bucket in enumerate(self.buckets):
                assert self._left[number] == sum(self._counts[index] < self._expected[index] for index in bucket)
        if self.is_order_known:
            assert sorted(self.order) == members

    def _reset(self) -> None:
        self._counts = [0] * len(self._parameters)
        self._left = [len(bucket) for bucket in self.buckets]  # gradients that each bucket still waits for
        self._launched = 0  # how many buckets are launched
        self.learns_now = self._has_just_learned = False
        self._unused = frozenset()

    def _mark_unused(self, index: int) -> None:
        self._counts[index] = self._expected[index]
        self._left[self._bucket_of[index]] -= 1

    def _launchable(self) -> list[int]:
        """Take the buckets that can be launched now."""
        first = self._launched
        while self._launched < len(self.buckets) and not self._left[self._launched]:
            self._launched += 1
        if self._launched == len(self.buckets):
            self.state = State.LAUNCHED
        return list(range(first, self._launched))

    def _ready_again_message(self, index: int) -> str:
        return (
            f"Rank {self._rank}: the gradient of {self._parameters[index].name} was accumulated more often than "
            "expected in one backward pass. Either the forward pass found it unused and it was used after all, or "
            "several checkpoints or nested backward passes use it. If each iteration is like the first, pass "
            "static_graph=True to DistributedDataParallel."
        )
