"""Whether a worker lives, as dialling it tells."""

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
from farprop.runtime import survival
from farprop.runtime.dialling import Dialling, SomebodyElse, Unresponsive
from farprop.runtime.survival import PATIENCE, Survival, is_certain

EVE = 3
UNREACHABLE = ConnectionLostError("no route")
LIVES = None


def refused() -> ConnectionLostError:
    error = ConnectionLostError("Can't reach it")
    error.__cause__ = ConnectionRefusedError()
    return error


class Case:
    """A watch over workers with a clock of its own. ``answer`` is what dialling says, or does."""

    def __init__(self, answer: Exception | Callable[[], None] | None) -> None:
        self.now = 100.0
        self.answer = answer
        self.dead: list[int] = []
        self.dials = 0
        self.alarms: list[float] = []
        self.jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.survival = Survival(
            self.dial, self.dead.append, lambda function, *args: self.jobs.append((function, args)), self.alarms.append
        )

    def dial(self, rank: int, timeout: float = 0.0) -> None:
        assert rank == EVE
        self.dials += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            self.answer()

    def run_jobs(self) -> None:
        """What a pool does: what a job raises ends that job only."""
        jobs, self.jobs = self.jobs, []
        for function, args in jobs:
            try:
                function(*args)
            except Exception:
                pass

    def suspect(self) -> None:
        self.survival.suspect(EVE)
        self.run_jobs()

    def ring(self) -> None:
        """The next alarm."""
        self.now = max(self.now, self.alarms.pop(0))
        self.survival.expire(self.now)
        self.run_jobs()


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Case]:
    def make(answer: Exception | Callable[[], None] | None) -> Case:
        made = Case(answer)

        class Clock:
            @staticmethod
            def monotonic() -> float:
                return made.now

        monkeypatch.setattr(survival, "time", Clock)
        return made

    return make


def test_one_that_answers_lives(case: Callable[..., Case]) -> None:
    eve = case(LIVES)
    eve.suspect()
    assert (eve.dials, eve.dead, eve.alarms) == (1, [], [])


@pytest.mark.parametrize("error", [refused(), SomebodyElse("another"), AuthenticationError("no"), ProtocolError("x")])
def test_one_that_is_surely_gone_is_dead_at_once(case: Callable[..., Case], error: Exception) -> None:
    assert is_certain(error)
    eve = case(error)
    eve.suspect()
    assert (eve.dials, eve.dead, eve.alarms) == (1, [EVE], [])
    eve.dead.clear()
    eve.survival.look_now(EVE, 1.0)
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
    assert not eve.alarms


def test_one_that_can_be_reached_again_lives(case: Callable[..., Case]) -> None:
    eve = case(UNREACHABLE)
    eve.suspect()
    eve.ring()
    eve.answer = LIVES
    eve.ring()
    assert (eve.dials, eve.dead, eve.alarms) == (3, [], [])


def test_one_that_does_not_answer_is_never_dead(case: Callable[..., Case]) -> None:
    eve = case(Unresponsive("stopped"))
    eve.suspect()
    began = eve.now
    while eve.now < began + 3 * PATIENCE:
        eve.ring()
    assert not eve.dead
    eve.answer = refused()
    eve.ring()
    assert eve.dead == [EVE]


def test_one_that_does_not_answer_and_then_vanishes_has_its_time_from_then_on(case: Callable[..., Case]) -> None:
    eve = case(Unresponsive("stopped"))
    eve.suspect()
    while eve.now < 100.0 + 2 * PATIENCE:
        eve.ring()
    eve.answer = UNREACHABLE
    eve.ring()
    assert not eve.dead


def test_what_goes_wrong_while_it_is_dialled_is_not_forgotten(case: Callable[..., Case]) -> None:
    """The link that was found was lost a moment later."""
    eve = case(LIVES)
    eve.answer = lambda: eve.survival.suspect(EVE)
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
    for answer in (LIVES, UNREACHABLE, Unresponsive("stopped"), RpcTimeoutError("late"), RuntimeError("store")):
        eve = case(answer)
        eve.survival.look_now(EVE, 0.1)
        assert (eve.dials, eve.dead, eve.alarms, eve.jobs) == (1, [], [], [])


def test_a_worker_that_shuts_down_looks_after_nobody(case: Callable[..., Case]) -> None:
    eve = case(UsageError("RPC has been shut down"))
    eve.suspect()
    assert (eve.dead, eve.alarms) == ([], [])
    eve = case(refused())
    eve.answer = eve.survival.close
    eve.suspect()
    eve.suspect()
    assert (eve.dials, eve.dead, eve.jobs) == (1, [], [])


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_dialling_one_that_does_not_answer_says_so(kind: str) -> None:
    """The kernel takes the connections of a stopped process, up to a point."""
    keys = Keys(b"k" * 32, "job", CALLS)
    dialling = Dialling(Identity("worker0", 0, "mine", 1), keys, kind == "unix", Settings())
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
        with pytest.raises(Unresponsive, match="does not answer"):
            dialling.dial(entry, time.monotonic() + 0.1)
