"""The decision that a host has vanished, on simulated connections: found within two seconds, and never wrongly."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from farprop.protocol.host_liveness import PROBE_SECONDS, HostLiveness, HostState, TcpFacts

_MIN_RTO = 200  # milliseconds, Linux's
_PROBE_MS = round(PROBE_SECONDS * 1000)


class Kernel:
    """What a kernel does with one connection, a millisecond at a time.

    It retransmits data, or probes a closed window, with exponential backoff. ``arrives()`` says whether the next packet
    and its acknowledgement both arrive. The processes of the other host don't occur: its kernel acknowledges.
    """

    def __init__(self, round_trip: int, arrives: Callable[[], bool], window_is_closed: bool = False) -> None:
        self.now = 0
        self._round_trip = round_trip
        self._arrives = arrives
        self._closed_window = window_is_closed
        self._last_answer = 0
        self._unanswered: int | None = None  # how often what is in flight was sent again
        self._next_attempt = self._rto if window_is_closed else 0
        self._answer_at: int | None = None

    @property
    def _rto(self) -> int:
        return self._round_trip + _MIN_RTO

    def send(self) -> None:
        """Send a packet, unless one is in flight: it would only wait behind that one."""
        if self._unanswered is None and not self._closed_window:
            self._unanswered = 0
            self._transmit()

    def _transmit(self) -> None:
        attempts = self._unanswered or 0
        self._next_attempt = self.now + (self._rto << attempts)
        if self._arrives() and self._answer_at is None:
            self._answer_at = self.now + self._round_trip

    def tick(self) -> None:
        self.now += 1
        if self._answer_at is not None and self.now >= self._answer_at:
            self._answer_at, self._unanswered = None, None
            self._last_answer = self.now
            if self._closed_window:
                self._next_attempt = self.now + self._rto
        elif (self._unanswered is not None or self._closed_window) and self.now >= self._next_attempt:
            self._unanswered = (0 if self._unanswered is None else self._unanswered) + 1
            self._transmit()

    def facts(self) -> TcpFacts:
        count, silent = self._unanswered or 0, self.now - self._last_answer
        if self._closed_window:
            return TcpFacts(0, count, 0, silent)
        return TcpFacts(count, 0, int(self._unanswered is not None), silent)


def _run(kernel: Kernel, rng: random.Random, seconds: float) -> bool:
    """Probe as calls and groups do, with data to send at random times; returns whether the host has vanished."""
    liveness = HostLiveness()
    busy = rng.choice([0.0, 0.001, 0.05])
    next_probe = kernel.now + rng.randrange(1, _PROBE_MS)
    end = kernel.now + 1000 * seconds
    while kernel.now < end:
        kernel.tick()
        if rng.random() < busy:
            kernel.send()
        if kernel.now >= next_probe:
            next_probe = kernel.now + _PROBE_MS
            state = liveness.on_probe(kernel.facts())
            if state is HostState.VANISHED:
                return True
            if state is HostState.IDLE:
                kernel.send()
    return False


class Losses:
    """Loses packets at random, but at most two in a row; after ``cut`` all of them."""

    def __init__(self, rng: random.Random) -> None:
        self.is_cut = False
        self._rng = rng
        self._in_a_row = 0

    def __call__(self) -> bool:
        if self.is_cut:
            return False
        lost = self._in_a_row < 2 and self._rng.random() < 0.4
        self._in_a_row = self._in_a_row + 1 if lost else 0
        return not lost


@pytest.mark.parametrize("window_is_closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("seed", range(40))
def test_a_host_that_answers_never_counts_as_vanished(seed: int, window_is_closed: bool) -> None:
    """Its processes may be stopped, and read nothing. A closed window is probed, and one probe of two is answered."""
    rng = random.Random(seed)
    arrives: Callable[[], bool] = Losses(rng)
    if window_is_closed:
        turns = iter(range(10_000))
        arrives = lambda: next(turns) % 2 == 0  # noqa: E731
    assert not _run(Kernel(rng.randrange(1, 100), arrives, window_is_closed), rng, 60)


@pytest.mark.parametrize("seed", range(200))
def test_a_vanished_host_is_found_within_two_seconds(seed: int) -> None:
    rng = random.Random(seed)
    losses = Losses(rng)
    kernel = Kernel(rng.randrange(1, 100), losses)
    assert not _run(kernel, rng, rng.uniform(0.1, 3))
    losses.is_cut = True
    assert _run(kernel, rng, 2.0)


def test_the_decision_is_final() -> None:
    liveness = HostLiveness()
    assert liveness.on_probe(TcpFacts(3, 0, 1, 2000)) is HostState.VANISHED
    assert liveness.on_probe(TcpFacts(0, 0, 0, 0)) is HostState.VANISHED


@pytest.mark.parametrize(
    "facts",
    [TcpFacts(1, 0, 1, 60_000), TcpFacts(0, 2, 0, 60_000), TcpFacts(9, 9, 1, 1499), TcpFacts(0, 0, 1, 60_000)],
    ids=str,
)
def test_silence_alone_or_retransmits_alone_prove_nothing(facts: TcpFacts) -> None:
    assert HostLiveness().on_probe(facts) is HostState.ANSWERS
