"""Which messages lead from the outputs of a pass to the inputs whose gradients are wanted.

The origin of such a pass asks worker after worker what their sends reach, beginning with what its own roots reach. Then
it knows the sends that are *needed*: roots reach them, and they lead to an input, on their own worker or through sends
of others that are needed. The pass takes only these. Every source that a worker is told of will get its gradients, so
no worker waits for one that does not come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from farprop.protocol.backward import ROOTS, Target


class Reached(NamedTuple):
    """What a source reaches on its own worker: the targets of recv nodes, and whether an input is there."""

    targets: frozenset[Target]
    has_input: bool


class Needed(NamedTuple):
    """What a worker has to do in the pass: the sources that get gradients, and the targets that it sends some to."""

    sources: frozenset[int]
    targets: frozenset[Target]


NOTHING = Needed(frozenset(), frozenset())


class NeededSends:
    """Finds the needed sends. ``own_rank`` is the origin's, and ``roots`` is what its outputs reach there."""

    def __init__(self, own_rank: int, roots: Reached) -> None:
        self._reached: dict[Target, Reached] = {Target(own_rank, ROOTS): roots}
        self._asked: set[Target] = set()

    def questions(self) -> dict[int, list[int]]:
        """The sends that nobody was asked for yet, by worker; empty when all is known."""
        found = {target for reached in self._reached.values() for target in reached.targets}
        new = found - self._asked
        self._asked |= new
        asked: dict[int, list[int]] = {}
        for worker, message_id in sorted(new):
            asked.setdefault(worker, []).append(message_id)
        return asked

    def on_answer(self, worker: int, answers: Mapping[int, Reached]) -> None:
        """A worker says what its sends reach."""
        for message_id, reached in answers.items():
            self._reached[Target(worker, message_id)] = reached

    def needed(self) -> dict[int, Needed]:
        """By worker, what it has to do; empty if no output depends on any input."""
        leading = self._leading()
        found: dict[int, Needed] = {}
        for source in leading:
            sources, targets = found.get(source.worker, NOTHING)
            targets |= self._reached[source].targets & leading
            found[source.worker] = Needed(sources | {source.message_id}, targets)
        return found

    def _leading(self) -> set[Target]:
        """The sources that lead to an input."""
        users: dict[Target, list[Target]] = {}
        for source, reached in self._reached.items():
            for target in reached.targets:
                users.setdefault(target, []).append(source)
        leading: set[Target] = set()
        todo = [source for source, reached in self._reached.items() if reached.has_input]
        while todo:
            source = todo.pop()
            if source not in leading:
                leading.add(source)
                todo += users.get(source, ())
        return leading


def pack_reached(answers: Iterable[Reached]) -> list[int]:
    """The answer to a question, as numbers: of each send whether it reaches an input, and its targets."""
    numbers: list[int] = []
    for targets, has_input in answers:
        numbers += (int(has_input), len(targets), *[number for target in sorted(targets) for number in target])
    return numbers


def unpack_reached(message_ids: Iterable[int], numbers: Sequence[int]) -> dict[int, Reached]:
    """The answer for these sends."""
    answers: dict[int, Reached] = {}
    at = 0
    for message_id in message_ids:
        has_input, count = numbers[at : at + 2]
        flat = numbers[at + 2 : at + 2 + 2 * count]
        answers[message_id] = Reached(_targets(flat), bool(has_input))
        at += 2 + 2 * count
    return answers


def pack_needed(needed: Needed) -> list[int]:
    """What a worker has to do, as numbers."""
    flat = [number for target in sorted(needed.targets) for number in target]
    return [len(needed.sources), *sorted(needed.sources), *flat]


def unpack_needed(numbers: Sequence[int]) -> Needed:
    count = numbers[0]
    return Needed(frozenset(numbers[1 : 1 + count]), _targets(numbers[1 + count :]))


def _targets(flat: Sequence[int]) -> frozenset[Target]:
    return frozenset(Target(*pair) for pair in zip(flat[::2], flat[1::2], strict=True))
