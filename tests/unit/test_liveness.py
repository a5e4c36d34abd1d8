"""The failure detector: whether a worker is alive, as dialling it tells."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from farprop.config import Settings
from farprop.errors import AuthenticationError, ConnectionLostError, ProtocolError, RpcTimeoutError, UsageError
from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import CALLS, Keys
from farprop.runtime import liveness
from farprop.runtime.dialer import Dialer, UnresponsiveError, WrongPeerError
from farprop.runtime.liveness import PATIENCE, FailureDetector, is_certain

EVE = 3
UNREACHABLE = ConnectionLostError("no route")
LIVES = None


def refused() -> ConnectionLostError:
    error = ConnectionLostError("Can't reach it")
    error.__cause__ = ConnectionRefusedError()
    return error


class Case:
    """A failure detector with a fake clock. ``answer`` stands in for dialling."""

    def __init__(self, answer: Exception | Callable[[], None] | None) -> None:
        self.now = 100.0
        self.answer = answer
        self.dead: list[int] = []
        self.dials = 0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.detector = FailureDetector(
            "worker0",
            self.dial,
            self.dead.append,
            lambda function, *args: self.jobs.append((function, args)),
            lambda when, callback: self.timers.append((when, callback)),
        )

    def dial(self, rank: int, timeout: float = 0.0) -> None:
        assert rank == EVE
        self.dials += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            self.answer()

    def run_jobs(self) -> None:
        """Run the jobs like a pool: an exception ends only its own job."""
        jobs, self.jobs = self.jobs, []
        for function, args in jobs:
            try:
                function(*args)
            except Exception:
                pass

    def suspect(self) -> None:
        self.detector.suspect(EVE)
        self.run_jobs()

    def ring(self) -> None:
        """Run the next timer."""
        when, callback = self.timers.pop(0)
        self.now = max(self.now, when)
        callback()
        self.run_jobs()


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Case]:
    def make(answer: Exception | Callable[[], None] | None) -> Case:
        made = Case(answer)

        class Clock:
            @staticmethod
            def monotonic() -> float:
                return made.now

        monkeypatch.setattr(liveness, "time", Clock)
        return made

    return make


def test_one_that_answers_lives(case: Callable[..., Case]) -> None:
    eve = case(LIVES)
    eve.suspect()
    assert (eve.dials, eve.dead, eve.timers) == (1, [], [])


@pytest.mark.parametrize("error", [refused(), WrongPeerError("another"), AuthenticationError("no"), ProtocolError("x")])
def test_one_that_is_surely_gone_is_dead_at_once(case: Callable[..., Case], error: Exception) -> None:
    assert is_certain(error)
    eve = case(error)
    eve.suspect()
    assert (eve.dials, eve.dead, eve.timers) == (1, [EVE], [])
    eve.dead.clear()
    eve.detector.look_now(EVE, 1.0)
    assert eve.dead == [EVE]


@pytest.mark.parametrize("error", [UNREACHABLE, RpcTimeoutError("late"), RuntimeError("store"), OSError("fds")])
def test_one_that_can_not_be_reached_is_dead_after_a_while(case: Callable[..., Case], error: Exception) -> None:
    eve = case(error)
    eve.suspect()
    began = eve.now
    while not eve.dead:
        assert eve.now < began + PATIENCE
        eve.ring()
    assert eve.dead == [EVE]
    assert eve.now >= began + PATIENCE
    assert eve.dials > 10
    assert not eve.timers


def test_one_that_can_be_reached_again_lives(case: Callable[..., Case]) -> None:
    eve = case(UNREACHABLE)
    eve.suspect()
    eve.ring()
    eve.answer = LIVES
    eve.ring()
    assert (eve.dials, eve.dead, eve.timers) == (3, [], [])


def test_one_that_does_not_answer_is_never_dead(case: Callable[..., Case]) -> None:
    eve = case(UnresponsiveError("stopped"))
    eve.suspect()
    began = eve.now
    while eve.now < began + 3 * PATIENCE:
        eve.ring()
    assert not eve.dead
    eve.answer = refused()
    eve.ring()
    assert eve.dead == [EVE]


def test_one_that_does_not_answer_and_then_vanishes_has_its_time_from_then_on(case: Callable[..., Case]) -> None:
    eve = case(UnresponsiveError("stopped"))
    eve.suspect()
    while eve.now < 100.0 + 2 * PATIENCE:
        eve.ring()
    eve.answer = UNREACHABLE
    eve.ring()
    assert not eve.dead


def test_what_goes_wrong_while_it_is_dialled_is_not_forgotten(case: Callable[..., Case]) -> None:
    """The connection exists, and is lost a moment later."""
    eve = case(LIVES)
    eve.answer = lambda: eve.detector.suspect(EVE)
    eve.suspect()
    assert eve.dials == 1
    eve.answer = refused()
    eve.ring()
    assert (eve.dials, eve.dead) == (2, [EVE])


def test_an_unexpected_error_does_not_end_the_watch(case: Callable[..., Case]) -> None:
    eve = case(RuntimeError("the store is gone"))
    eve.suspect()
    assert not eve.dead
    eve.answer = refused()
    eve.ring()
    eve.dead.clear()
    eve.suspect()
    assert eve.dead == [EVE]


def test_a_short_look_kills_nobody_that_may_live(case: Callable[..., Case]) -> None:
    for answer in (LIVES, UNREACHABLE, UnresponsiveError("stopped"), RpcTimeoutError("late"), RuntimeError("store")):
        eve = case(answer)
        eve.detector.look_now(EVE, 0.1)
        assert (eve.dials, eve.dead, eve.timers, eve.jobs) == (1, [], [], [])


def test_a_worker_that_shuts_down_looks_after_nobody(case: Callable[..., Case]) -> None:
    eve = case(UsageError("RPC has been shut down"))
    eve.suspect()
    assert (eve.dead, eve.timers) == ([], [])
    eve = case(refused())
    eve.answer = eve.detector.close
    eve.suspect()
    eve.suspect()
    assert (eve.dials, eve.dead, eve.jobs) == (1, [], [])


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_dialling_one_that_does_not_answer_says_so(kind: str) -> None:
    """The kernel accepts connections to a stopped process until the backlog is full."""
    keys = Keys(b"k" * 32, "job", CALLS)
    dialling = Dialer(Identity("worker0", 0, "mine", 1), keys, kind == "unix", Settings())
    name = f"farprop-test-{time.monotonic_ns()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0" + name)
        unix.listen()
        entry = Entry(
            name="worker3",
            rank=EVE,
            world_size=4,
            instance="its",
            tcp=tcp.getsockname(),
            unix=name,
            net=dialling.net,
            host="here",
            pid=1,
            own_secret=False,
        )
        with pytest.raises(UnresponsiveError, match="does not answer"):
            dialling.dial(entry, time.monotonic() + 0.1)
