"""The memory that the ranks of one host have in common, and the steps that they take in it together.

Each rank has three slots for data. Ranks move in *steps*: a rank publishes the number of steps that it has done, and
waits until all have done as many. What is written in one step is read in the next, or in the one after that, and three
steps later its slot is written again: nobody reads it any more, because all have passed the step in between. Steps are
counted through all collectives, so one that ends needs no step of its own.

This relies on other processors seeing stores in the order in which they were made, which x86-64 promises.
"""

from __future__ import annotations

import os
import platform
import select
import threading
import time
from collections.abc import Callable, Sequence

import torch

from farprop.distributed.native.calls import Call
from farprop.distributed.native.standing import Standing
from farprop.transport.memory import Mapping

CAN_SHARE = platform.machine() in ("x86_64", "AMD64") and hasattr(os, "eventfd")
SLOTS = 3
SLOT_BYTES = 1 << 20
_LINE = 64  # bytes that processors move between them; whoever writes to a line has it to itself
_PAGE = 4096
_STATEMENT = 1024
# Waking a sleeping process takes longer than looking a few times. Each look offers the processor to somebody else. If
# somebody takes it that costs as much as sleeping, so ranks that don't have a processor each look less often.
_LOOKS, _FEW_LOOKS = 200, 20
Stage = Callable[[int, list[torch.Tensor]], None]
_WITHDRAWN = -1  # for the number of steps done


def size_of(ranks: int) -> int:
    return _control_size(ranks) + ranks * SLOTS * SLOT_BYTES


def _control_size(ranks: int) -> int:
    used = ranks * (2 * _LINE + SLOTS * _STATEMENT)
    return -(-used // _PAGE) * _PAGE


class Commons:
    """One rank's view of it. One thread at a time uses it.

    Args:
        ranks: those of this host, by their rank in the group.
        place: which of them this is.
        memory: of ``size_of(len(ranks))`` bytes; all zeros at first.
        bells: an eventfd for each; its own is what this rank sleeps on.
    """

    def __init__(
        self, ranks: Sequence[int], place: int, memory: Mapping, bells: Sequence[int], standing: Standing
    ) -> None:
        self.ranks = list(ranks)
        self.place = place
        self.size = count = len(ranks)
        self._standing = standing
        self._bells = list(bells)
        whole = memoryview(memory.root()).cast("B")
        step = _LINE // 8
        words = whole[: count * 2 * _LINE].cast("q")
        self._done, self._asleep = words[: count * step : step], words[count * step :: step]
        self._said = [
            [self._statement(whole, place, slot) for slot in range(SLOTS)] for place in range(count)
        ]  # by place and slot
        data = torch.frombuffer(whole, dtype=torch.uint8)[_control_size(count) :].view(count, SLOTS, SLOT_BYTES)
        self._slots = [[data[place, slot] for place in range(count)] for slot in range(SLOTS)]
        self._others = [other for other in range(count) if other != place]
        self._steps = 0
        self._looks = _LOOKS if len(os.sched_getaffinity(0)) >= count else _FEW_LOOKS
        self._fence = threading.Lock()
        self._poll = select.poll()
        self._poll.register(bells[place], select.POLLIN)

    def _statement(self, whole: memoryview, place: int, slot: int) -> memoryview:
        start = self.size * 2 * _LINE + (place * SLOTS + slot) * _STATEMENT
        return whole[start : start + _STATEMENT]

    def run(self, call: Call, chunks: int, *stages: Stage | None) -> None:
        """Work on chunks in stages, a step after each other: while one is written, the one before it is read.

        A stage is called with the number of a chunk, and the slots of all ranks for it. They are those of the chunk
        for three stages; if there are more, it is up to the caller that chunks don't get into each other's way.
        Stages in which this rank has nothing to do are None.
        """
        self._state(call)
        first = self._steps
        last = chunks + len(stages) - 2
        if len(stages) > SLOTS and len(stages) % SLOTS == 1:
            last += 1  # or what is written next would be where some still read the last chunk
        for number in range(last + 1):
            for stage, work in enumerate(stages):
                if work is not None and 0 <= number - stage < chunks:
                    work(number - stage, self._slots[(first + number - stage) % SLOTS])
            if number < last:
                self._step(call)
                if number == 0:
                    self._compare(call, first % SLOTS)

    def meet(self, call: Call) -> None:
        """A step in which nothing is done."""
        self._state(call)
        self._step(call)
        self._compare(call, (self._steps - 1) % SLOTS)

    def withdraw(self) -> None:
        """This rank has failed. Nobody who comes later may take what it wrote for its part."""
        self._done[self.place] = _WITHDRAWN

    def wake(self) -> None:
        """Have this rank look again whether it has to wait. Any thread may call it."""
        os.eventfd_write(self._bells[self.place], 1)

    def close(self) -> None:
        for bell in self._bells:
            os.close(bell)

    # Statements

    def _state(self, call: Call) -> None:
        said = self._said[self.place][self._steps % SLOTS]
        said[: len(call.encoded)] = call.encoded

    def _compare(self, call: Call, slot: int) -> None:
        """The statements of a step are there until the step after the next."""
        own = call.encoded
        for place in self._others:
            said = self._said[place][slot]
            if said[: len(own)] != own:
                number, _, text = bytes(said).split(b"\0")[0].decode().partition(" ")
                self._standing.hear(self.ranks[place], int(number), text)
                self._standing.check([], call)

    # Steps

    def _step(self, call: Call) -> None:
        self._steps += 1
        self._done[self.place] = self._steps
        # Who goes to sleep says so and looks again; who is done says so and looks who sleeps. Each has to see what the
        # other said, so a store must be seen before the load behind it: a lock is such a fence.
        with self._fence:
            pass
        for place in self._others:
            if self._asleep[place]:
                os.eventfd_write(self._bells[place], 1)
        for _ in range(self._looks):
            if not self._missing():
                return
            os.sched_yield()
        self._sleep(call)

    def _missing(self) -> bool:
        steps, done = self._steps, self._done
        return any(done[place] < steps for place in self._others)

    def _sleep(self, call: Call) -> None:
        bell = self._bells[self.place]
        self._asleep[self.place] = 1
        try:
            with self._fence:
                pass
            while self._missing():
                # Who has withdrawn will say so; whoever has not come is to blame.
                late = [place for place in self._others if _WITHDRAWN < self._done[place] < self._steps]
                missing = [self.ranks[place] for place in late or self._others]
                self._standing.check(missing, call)
                self._poll.poll(max(1.0, (call.deadline - time.monotonic()) * 1000))
                try:
                    os.eventfd_read(bell)
                except BlockingIOError:
                    pass
        finally:
            self._asleep[self.place] = 0


def new_bell() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
