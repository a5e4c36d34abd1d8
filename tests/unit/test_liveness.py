"""The failure detector: it dials a suspected worker to find out whether it is alive."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from farprop.config import Settings
from farprop.errors import AuthenticationError, ConnectionLostError, ProtocolError, RpcTimeoutError, UsageError
from farprop.protocol.handshake import RefusedError
from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import CALLS, Keys
from farprop.runtime import liveness
from farprop.runtime.dialer import Dialer, UnresponsiveError, WrongPeerError
from farprop.runtime.liveness import PATIENCE, FailureDetector, Verdict, is_certain, look_for

EVE = 3
UNREACHABLE = ConnectionLostError("no route")
LIVES = None


def refused() -> ConnectionLostError:
    error = ConnectionLostError("Can't reach it")
    error.__cause__ = ConnectionRefusedError()
    return error


class Case:
    """A failure detector with a fake clock. ``answer`` is the result of a dial."""

    def __init__(self, answer: Exception | Callable[[], None] | None) -> None:
        self.now = 100.0
        self.answer = answer
        self.dead: list[int] = []
        self.was_replaced = False  # another process has her rank
        self.dials = 0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.detector = FailureDetector(
            "worker0",
            self.dial,
            self.died,
            lambda function, *args: self.jobs.append((function, args)),
            lambda when, callback: self.timers.append((when, callback)),
        )

    def died(self, rank: int, reason: str) -> bool:
        if self.was_replaced:
            return False
        self.dead.append(rank)
        return True

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

    def run_next_timer(self) -> None:
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


def test_worker_that_answers_is_alive(case: Callable[..., Case]) -> None:
    eve = case(LIVES)
    eve.suspect()
    assert (eve.dials, eve.dead, eve.timers) == (1, [], [])


@pytest.mark.parametrize("error", [refused(), WrongPeerError("another"), AuthenticationError("no"), ProtocolError("x")])
def test_worker_is_dead_at_once_if_the_error_is_certain(case: Callable[..., Case], error: Exception) -> None:
    assert is_certain(error)
    eve = case(error)
    eve.suspect()
    assert (eve.dials, eve.dead, eve.timers) == (1, [EVE], [])
    eve.dead.clear()
    eve.detector.look_now(EVE, 1.0)
    assert eve.dead == [EVE]


@pytest.mark.parametrize("error", [UNREACHABLE, RpcTimeoutError("late"), RuntimeError("store"), OSError("fds")])
def test_unreachable_worker_is_dead_after_a_while(case: Callable[..., Case], error: Exception) -> None:
    eve = case(error)
    eve.suspect()
    began = eve.now
    while not eve.dead:
        assert eve.now < began + PATIENCE
        eve.run_next_timer()
    assert eve.dead == [EVE]
    assert eve.now >= began + PATIENCE
    assert eve.dials > 10
    assert not eve.timers


def test_worker_that_becomes_reachable_again_is_alive(case: Callable[..., Case]) -> None:
    eve = case(UNREACHABLE)
    eve.suspect()
    eve.run_next_timer()
    eve.answer = LIVES
    eve.run_next_timer()
    assert (eve.dials, eve.dead, eve.timers) == (3, [], [])


def test_unresponsive_worker_is_never_declared_dead(case: Callable[..., Case]) -> None:
    eve = case(UnresponsiveError("stopped"))
    eve.suspect()
    began = eve.now
    while eve.now < began + 3 * PATIENCE:
        eve.run_next_timer()
    assert not eve.dead
    eve.answer = refused()
    eve.run_next_timer()
    assert eve.dead == [EVE]


def test_patience_starts_when_an_unresponsive_worker_becomes_unreachable(case: Callable[..., Case]) -> None:
    eve = case(UnresponsiveError("stopped"))
    eve.suspect()
    while eve.now < 100.0 + 2 * PATIENCE:
        eve.run_next_timer()
    eve.answer = UNREACHABLE
    eve.run_next_timer()
    assert not eve.dead


def test_suspicion_during_a_dial_leads_to_another_dial(case: Callable[..., Case]) -> None:
    """The connection exists, and is lost a moment later."""
    eve = case(LIVES)
    eve.answer = lambda: eve.detector.suspect(EVE)
    eve.suspect()
    assert eve.dials == 1
    eve.answer = refused()
    eve.run_next_timer()
    assert (eve.dials, eve.dead) == (2, [EVE])


def test_suspicion_of_a_process_that_took_the_rank_survives_the_verdict_on_the_one_before(
    case: Callable[..., Case],
) -> None:
    """The dial to the old process took long. The new one came and died meanwhile, and its references stayed."""
    eve = case(LIVES)

    def answer() -> None:
        eve.was_replaced = True
        eve.answer = refused()
        eve.detector.suspect(EVE)
        raise refused()

    eve.answer = answer
    eve.suspect()
    assert not eve.dead
    eve.was_replaced = False  # the next dial is to the new one
    eve.run_jobs()
    assert eve.dead == [EVE]


def test_unexpected_error_does_not_stop_the_detector(case: Callable[..., Case]) -> None:
    eve = case(RuntimeError("the store is gone"))
    eve.suspect()
    assert not eve.dead
    eve.answer = refused()
    eve.run_next_timer()
    eve.dead.clear()
    eve.suspect()
    assert eve.dead == [EVE]


def test_short_check_declares_nobody_dead_without_certainty(case: Callable[..., Case]) -> None:
    for answer in (LIVES, UNREACHABLE, UnresponsiveError("stopped"), RpcTimeoutError("late"), RuntimeError("store")):
        eve = case(answer)
        eve.detector.look_now(EVE, 0.1)
        assert (eve.dials, eve.dead, eve.timers, eve.jobs) == (1, [], [], [])


def test_detector_does_nothing_during_and_after_shutdown(case: Callable[..., Case]) -> None:
    eve = case(UsageError("RPC has been shut down"))
    eve.suspect()
    assert (eve.dead, eve.timers) == ([], [])
    eve = case(refused())
    eve.answer = eve.detector.close
    eve.suspect()
    eve.suspect()
    assert (eve.dials, eve.dead, eve.jobs) == (1, [], [])


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_dialing_an_unresponsive_worker_raises_unresponsive_error(kind: str) -> None:
    """The kernel accepts connections to a stopped process until the backlog is full."""
    keys = Keys(b"k" * 32, "job", CALLS)
    our_dialer = Dialer(Identity("worker0", 0, "mine", 1), keys, kind == "unix", Settings())
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
            net=our_dialer.net,
            host="here",
            pid=1,
            own_secret=False,
        )
        with pytest.raises(UnresponsiveError, match="does not answer"):
            our_dialer.dial(entry, time.monotonic() + 0.1)


# A worker joins, and another one has its name


@pytest.mark.parametrize(
    ("answers", "seconds", "verdict", "takes"),
    [
        ([LIVES], 60, Verdict.ALIVE, 0),
        ([RefusedError("I am alive")], 60, Verdict.ALIVE, 0),
        ([refused()], 60, Verdict.DEAD, 0),
        ([WrongPeerError("another")], 60, Verdict.DEAD, 0),
        ([UNREACHABLE], 180, Verdict.DEAD, PATIENCE),
        ([UNREACHABLE], 5, Verdict.UNKNOWN, 5),
        ([UnresponsiveError("stopped")], 60, Verdict.UNKNOWN, 60),
        ([UnresponsiveError("stopped"), refused()], 60, Verdict.DEAD, 0),
        ([UnresponsiveError("stopped"), UNREACHABLE], 180, Verdict.DEAD, PATIENCE),
        ([UNREACHABLE, LIVES], 60, Verdict.ALIVE, 0),
    ],
)
def test_joiner_looks_for_the_worker_with_its_name(
    answers: list[Exception | None],
    seconds: float,
    verdict: Verdict,
    takes: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        now = 100.0

        @classmethod
        def monotonic(cls) -> float:
            return cls.now

        @classmethod
        def sleep(cls, seconds: float) -> None:
            cls.now += seconds

    def dial(worker: Any, until: float) -> None:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is not None:
            raise answer

    monkeypatch.setattr(liveness, "time", Clock)
    assert look_for(dial, object(), 100.0 + seconds) is verdict  # type: ignore[arg-type]
    assert takes <= Clock.now - 100 + 0.5 <= takes + 1
