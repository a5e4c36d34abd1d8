"""What browsers are told, and when the job is asked."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from farprop.dashboard import poller
from farprop.dashboard.board import Board
from farprop.dashboard.picture import Part, State
from farprop.dashboard.poller import Poller
from farprop.dashboard.sources import JobEnded
from farprop.dashboard.task_stream import StreamPart
from farprop.errors import ConnectionLostError
from farprop.inspect.job import Job


def _part(time: float, names: list[str] | None = None) -> Part:
    return Part(time, [], None, None, 0.0, StreamPart(names=names or []))


def _state(job: str = "a") -> State:
    return State(job, "train", 0.0, False)


def _message(board: Board, number: int) -> tuple[int, Any]:
    number, message = board.message_since(number)
    return number, json.loads(message)


def test_browser_gets_what_it_does_not_have() -> None:
    async def run() -> None:
        board = Board()
        for time in (1.0, 2.0):
            board.post(_state(), _part(time))
        number, first = _message(board, 0)
        assert first["state"]["id"] == "a"
        assert [part["time"] for part in first["parts"]] == [1.0, 2.0]
        board.post(_state(), _part(3.0))
        board.post(None, None, "The job could not be asked.")
        _, second = _message(board, board.number_of(board.label(number)))
        assert [part["time"] for part in second["parts"]] == [3.0]
        assert second["note"] == "The job could not be asked."
        assert second["state"] == first["state"]
        board.post(_state("b"), _part(4.0))  # another job: nothing of the old one is drawn
        assert [part["time"] for part in _message(board, 0)[1]["parts"]] == [4.0]

    asyncio.run(run())


def test_board_has_a_limit() -> None:
    async def run() -> None:
        board = Board()
        for time in range(400):
            board.post(_state(), _part(float(time), ["x" * 100_000]))
        parts = _message(board, 0)[1]["parts"]
        assert 10 < len(parts) < 50
        assert parts[-1]["time"] == 399.0

    asyncio.run(run())


@pytest.mark.parametrize("label", ["", "x", "1.2", "00000000.5", ".", "9" * 5000, "{}.-1", "{}.x", "{}." + "9" * 5000])
def test_ids_of_other_boards_mean_nothing(label: str) -> None:
    async def run() -> None:
        board = Board()
        board.post(_state(), _part(1.0))
        assert board.number_of(label.format(board.label(1).partition(".")[0])) == 0
        assert board.number_of(board.label(1)) == 1
        assert board.number_of(board.label(99)) == 1

    asyncio.run(run())


class _Source:
    def __init__(self) -> None:
        self.looks = 0
        self.error: Exception | None = None

    def look(self, cursors: dict[str, int]) -> tuple[Job, dict[str, Any]]:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return Job("a", {}, "train"), {}


class _Watched:
    """A poller, and what it publishes."""

    def __init__(self) -> None:
        self.source = _Source()
        self.published: list[tuple[State | None, str]] = []
        self._changed = threading.Condition()
        self.poller = Poller(self.source, self._publish)
        self.poller.start()

    def _publish(self, state: State | None, part: Part | None, note: str) -> None:
        with self._changed:
            self.published.append((state, note))
            self._changed.notify_all()

    def wait_for(self, more: int) -> None:
        with self._changed:
            wanted = len(self.published) + more
            assert self._changed.wait_for(lambda: len(self.published) >= wanted, timeout=30)


@pytest.fixture
def very_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "INTERVAL_SECONDS", 0.001)


@pytest.mark.usefixtures("very_often")
def test_nobody_is_asked_while_nobody_watches() -> None:
    watched, clock = _Watched(), _Watched()
    clock.poller.watch(1)
    clock.wait_for(20)
    assert watched.source.looks == 0
    watched.poller.watch(1)
    watched.wait_for(3)
    watched.poller.watch(-1)
    clock.wait_for(20)  # what was under way is over
    before = watched.source.looks
    clock.wait_for(20)
    assert watched.source.looks == before
    watched.poller.watch(1)
    watched.wait_for(1)
    for one in (watched, clock):
        one.poller.close()


@pytest.mark.usefixtures("very_often")
def test_poller_says_what_is_wrong_and_goes_on() -> None:
    watched = _Watched()
    watched.poller.watch(1)
    watched.wait_for(1)
    watched.source.error = ConnectionLostError("it went away")
    watched.wait_for(2)
    assert watched.published[-1] == (None, "The job could not be asked: it went away")
    watched.source.error = JobEnded()
    watched.wait_for(2)
    state, note = watched.published[-1]
    assert state is not None
    assert (state.ended, note) == (True, "")
    watched.source.error = None  # somebody has started it again
    watched.wait_for(2)
    state, note = watched.published[-1]
    assert state is not None
    assert not state.ended
    watched.poller.close()
