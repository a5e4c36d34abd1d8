"""The shared memory of the ranks of one host, and the steps that they take in it together.

Each rank has three slots for data. Ranks move in *steps*: a rank publishes the number of steps that it has done, and
waits until all have done as many. What is written in one step is read in the next, or in the one after that, and three
steps later its slot is written again: nobody reads it any more, because all have passed the step in between. Steps are
counted through all collectives, so the end of a collective needs no step of its own.

This relies on other processors seeing stores in the order in which they were made, which x86-64 promises.
"""

from __future__ import annotations

import os
import platform
import select
import time
from collections.abc import Callable, Sequence

import torch

from farprop.distributed.native.group_state import PATIENCE, CollectiveCall, GroupState
from farprop.locks import make_lock
from farprop.transport.shared_memory import SharedMapping

IS_SUPPORTED = platform.machine() in ("x86_64", "AMD64") and hasattr(os, "eventfd")
SLOTS = 3
SLOT_BYTES = 1 << 20
_CACHE_LINE = 64  # bytes; each counter has a line to itself, so that writers don't slow each other down
_PAGE = 4096
_FINGERPRINT_BYTES = 1024
# Waking a sleeping process takes longer than checking a few times. Each check yields the processor. If another process
# takes it, that costs as much as sleeping, so ranks that don't have a processor each check less often.
_SPINS, _FEW_SPINS = 200, 20
_WITHDRAWN = -1  # in place of the number of steps done

Stage = Callable[[int, list[torch.Tensor]], None]
"""What a rank does with a chunk in one step. It gets the chunk's number, and the slots of all ranks for it."""


def arena_bytes(ranks: int) -> int:
    """The size of the shared memory for this many ranks."""
    return _control_bytes(ranks) + ranks * SLOTS * SLOT_BYTES


def _control_bytes(ranks: int) -> int:
    used = ranks * (2 * _CACHE_LINE + SLOTS * _FINGERPRINT_BYTES)
    return -(-used // _PAGE) * _PAGE


def new_wakeup_fd() -> int:
    """The eventfd that a rank sleeps on. Others write to it to wake the rank."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


class ShmArena:
    """One rank's view of the shared memory. One thread at a time uses it.

    Args:
        ranks: the ranks of this host, by their rank in the group.
        local_rank: the index of this rank in ``ranks``.
        memory: of ``arena_bytes(len(ranks))`` bytes, all zeros at first.
        wakeup_fds: an eventfd for each of the ranks.
        state: of the group.
        on_long_wait: called when this rank has waited for others for a while; None if the group has no other hosts.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        local_rank: int,
        memory: SharedMapping,
        wakeup_fds: Sequence[int],
        state: GroupState,
        on_long_wait: Callable[[CollectiveCall], None] | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self.local_rank = local_rank
        self.size = count = len(ranks)
        self._state = state
        self._on_long_wait = on_long_wait
        self._wakeup_fds = list(wakeup_fds)
        whole = memoryview(memory.root()).cast("B")
        stride = _CACHE_LINE // 8
        words = whole[: count * 2 * _CACHE_LINE].cast("q")
        self._done, self._asleep = words[: count * stride : stride], words[count * stride :: stride]
        self._fingerprints = [
            [self._fingerprint_at(whole, rank, slot) for slot in range(SLOTS)] for rank in range(count)
        ]
        data = torch.frombuffer(whole, dtype=torch.uint8)[_control_bytes(count) :].view(count, SLOTS, SLOT_BYTES)
        self._slots = [[data[rank, slot] for rank in range(count)] for slot in range(SLOTS)]
        self._others = [other for other in range(count) if other != local_rank]
        self._steps = 0
        self._spins = _SPINS if len(os.sched_getaffinity(0)) >= count else _FEW_SPINS
        self._fence = make_lock("shm_fence")
        self._poll = select.poll()
        self._poll.register(wakeup_fds[local_rank], select.POLLIN)

    def _fingerprint_at(self, whole: memoryview, rank: int, slot: int) -> memoryview:
        start = self.size * 2 * _CACHE_LINE + (rank * SLOTS + slot) * _FINGERPRINT_BYTES
        return whole[start : start + _FINGERPRINT_BYTES]

    def run(self, call: CollectiveCall, chunks: int, *stages: Stage | None) -> None:
        """Take chunks through stages as a pipeline: while one chunk is written, the one before it is read.

        A chunk is in its first stage one step after the chunk before it. Its slots are its own for three stages; with
        more stages, the caller sees to it that chunks don't overwrite each other.

        Args:
            call: the collective.
            chunks: the number of chunks.
            stages: what this rank does in each stage; None for nothing.

        Raises:
            CollectiveError: the group broke, or a rank did not join in time.
        """
        self._publish_fingerprint(call)
        first = self._steps
        last = chunks + len(stages) - 2
        if len(stages) > SLOTS and len(stages) % SLOTS == 1:
            last += 1  # or the next collective would write where some still read the last chunk
        for number in range(last + 1):
            for stage, work in enumerate(stages):
                if work is not None and 0 <= number - stage < chunks:
                    work(number - stage, self._slots[(first + number - stage) % SLOTS])
            if number < last:
                self._step(call)
                if number == 0:
                    self._compare_fingerprints(call, first % SLOTS)

    def barrier(self, call: CollectiveCall) -> None:
        """Take a step in which nothing is written or read."""
        self._publish_fingerprint(call)
        self._step(call)
        self._compare_fingerprints(call, (self._steps - 1) % SLOTS)

    def withdraw(self) -> None:
        """This rank has failed in a collective: ranks that join it later must not read its slots."""
        self._done[self.local_rank] = _WITHDRAWN

    def wake(self) -> None:
        """Have this rank check again whether it has to wait. Any thread may call it."""
        os.eventfd_write(self._wakeup_fds[self.local_rank], 1)

    def close(self) -> None:
        """Close the eventfds. The memory is unmapped with the last view of it."""
        for fd in self._wakeup_fds:
            os.close(fd)

    # Fingerprints

    def _publish_fingerprint(self, call: CollectiveCall) -> None:
        own = self._fingerprints[self.local_rank][self._steps % SLOTS]
        own[: len(call.encoded)] = call.encoded

    def _compare_fingerprints(self, call: CollectiveCall, slot: int) -> None:
        """Compare the fingerprints of all ranks. They stay in the slot until the step after the next."""
        own = call.encoded
        for rank in self._others:
            theirs = self._fingerprints[rank][slot]
            if theirs[: len(own)] != own:
                number, _, text = bytes(theirs).split(b"\0")[0].decode().partition(" ")
                self._state.on_fingerprint(self.ranks[rank], int(number), text)
                self._state.check_wait([], call)

    # Steps

    def _step(self, call: CollectiveCall) -> None:
        """Publish that this rank has done another step, and wait until all have."""
        self._steps += 1
        self._done[self.local_rank] = self._steps
        # A rank that goes to sleep stores that, then loads who is done. A rank that is done stores that, then loads who
        # sleeps. One of them has to see the other, so each store must be visible before the load that follows it.
        # Taking a lock is a fence between the two.
        with self._fence:
            pass
        for rank in self._others:
            if self._asleep[rank]:
                os.eventfd_write(self._wakeup_fds[rank], 1)
        for _ in range(self._spins):
            if not self._must_wait():
                return
            os.sched_yield()
        self._sleep(call)

    def _must_wait(self) -> bool:
        steps, done = self._steps, self._done
        return any(done[rank] < steps for rank in self._others)

    def _sleep(self, call: CollectiveCall) -> None:
        fd = self._wakeup_fds[self.local_rank]
        announcement = time.monotonic() + PATIENCE
        self._asleep[self.local_rank] = 1
        try:
            with self._fence:
                pass
            while self._must_wait():
                # A rank that has withdrawn reports its failure itself. A timeout is due to those that have not come.
                late = [rank for rank in self._others if _WITHDRAWN < self._done[rank] < self._steps]
                self._state.check_wait([self.ranks[rank] for rank in late or self._others], call)
                until = call.deadline
                if self._on_long_wait is not None and not call.is_announced:
                    if time.monotonic() >= announcement:
                        self._on_long_wait(call)
                    else:
                        until = min(until, announcement)
                self._poll.poll(max(1.0, (until - time.monotonic()) * 1000))
                try:
                    os.eventfd_read(fd)
                except BlockingIOError:
                    pass
        finally:
            self._asleep[self.local_rank] = 0
