"""Requests that are cancelled while threads run and answer them, in every order of the steps of these threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from farprop.protocol.served_calls import ServedCalls

CALL = 7


class _Turns:
    """Real threads, of which one at a time goes on, up to its next step."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._batons: dict[int, threading.Lock] = {}
        self._back = threading.Lock()
        self._back.acquire()

    def step(self) -> None:
        """Let the others go on."""
        baton = self._batons.get(threading.get_ident())
        if baton is not None:
            self._back.release()
            baton.acquire()

    def run(self, *functions: Callable[[], None]) -> None:
        waiting: list[threading.Lock] = []
        errors: list[BaseException] = []
        for function in functions:
            baton = threading.Lock()
            baton.acquire()
            waiting.append(baton)
            threading.Thread(target=self._main, args=(function, baton, waiting, errors), daemon=True).start()
        while waiting:
            self.chance.choice(waiting).release()
            self._back.acquire()
        if errors:
            raise errors[0]

    def _main(
        self, function: Callable[[], None], baton: threading.Lock, waiting: list[Any], errors: list[BaseException]
    ) -> None:
        self._batons[threading.get_ident()] = baton
        baton.acquire()
        try:
            function()
        except BaseException as error:
            errors.append(error)
        waiting.remove(baton)
        self._back.release()


def _stepping(kind: type, turns: _Turns) -> Any:
    """A dictionary or a set that lets other threads go on before each operation."""

    def stepping(name: str) -> Any:
        operation = getattr(kind, name)

        def step_and_do(self: Any, *args: Any) -> Any:
            turns.step()
            return operation(self, *args)

        return step_and_do

    names = [name for name in ("__contains__", "__setitem__", "pop", "add", "discard") if hasattr(kind, name)]
    return type(kind.__name__, (kind,), {name: stepping(name) for name in names})()


class _Request:
    """One request on a worker. A thread runs it, and another one reads its cancel."""

    def __init__(self, seed: int) -> None:
        turns = self.turns = _Turns(seed)
        self.served: ServedCalls[Callable[[], None]] = ServedCalls()
        self.served.open, self.served._stops = _stepping(dict, turns), _stepping(dict, turns)
        self.served.cancelled = _stepping(set, turns)
        self.returns_later = turns.chance.random() < 0.7
        self.ends_by_itself = turns.chance.random() < 0.5
        self.cancel_was_read = False
        self.has_started = self.is_done = False
        self.stops = self.answers = 0
        self.served.open[CALL] = None
        turns.run(self.run, self.read_cancel, self.end_by_itself)

    def run(self) -> None:
        was_read = self.cancel_was_read
        if CALL in self.served.cancelled:
            self.answer()
            return
        assert not was_read, "it begins after its cancel was read"
        if not self.returns_later:
            self.answer()
        elif self.served.wait(CALL, self.stop):
            self.stop()
        else:
            self.has_started = True  # what it has returned

    def read_cancel(self) -> None:
        stop = self.served.cancel(CALL)
        self.cancel_was_read = True
        if stop is not None:
            stop()

    def stop(self) -> None:
        self.stops += 1
        assert self.stops == 1, "it is stopped twice"
        self.end()

    def end_by_itself(self) -> None:
        for _ in range(self.turns.chance.randrange(12)):
            self.turns.step()
        if self.ends_by_itself and self.has_started:
            self.end()

    def end(self) -> None:
        if not self.is_done:  # as a task: it ends once
            self.is_done = True
            self.turns.step()
            self.served.waited(CALL)
            self.answer()

    def answer(self) -> None:
        self.answers += 1
        self.served.answered(CALL)

    def check(self) -> None:
        self.served.validate()
        assert self.answers == 1, f"it has {self.answers} answers"
        assert not self.served.open
        assert not self.served.cancelled, "what was cancelled is not forgotten"


def _first_failure(seeds: int) -> str | None:
    for seed in range(seeds):
        try:
            _Request(seed).check()
        except AssertionError as error:
            return f"seed {seed}: {error}"
    return None


def test_request_is_answered_once_and_stopped_once_in_any_order() -> None:
    assert _first_failure(1500) is None


def _cancel_without_a_second_look(self: ServedCalls[Any], call_id: int) -> Any:
    if call_id not in self.open:
        return None
    self.cancelled.add(call_id)
    return self._stops.pop(call_id, None)


def _cancel_that_keeps_the_stop(self: ServedCalls[Any], call_id: int) -> Any:
    if call_id in self.open:
        self.cancelled.add(call_id)
        if call_id in self.open:
            return self._stops.get(call_id)
        self.cancelled.discard(call_id)
    return None


def _cancel_of_what_is_not_open(self: ServedCalls[Any], call_id: int) -> Any:
    self.cancelled.add(call_id)
    return self._stops.pop(call_id, None)


def _wait_that_looks_first(self: ServedCalls[Any], call_id: int, stop: Any) -> bool:
    if call_id in self.cancelled:
        return True
    self._stops[call_id] = stop
    return False


def _wait_that_does_not_look(self: ServedCalls[Any], call_id: int, stop: Any) -> bool:
    self._stops[call_id] = stop
    return False


def _answered_that_does_not_forget(self: ServedCalls[Any], call_id: int) -> None:
    self.open.pop(call_id, None)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("cancel", _cancel_without_a_second_look),
        ("cancel", _cancel_that_keeps_the_stop),
        ("cancel", _cancel_of_what_is_not_open),
        ("wait", _wait_that_looks_first),
        ("wait", _wait_that_does_not_look),
        ("answered", _answered_that_does_not_forget),
    ],
)
def test_planted_bugs_are_found(method: str, wrong: Any) -> None:
    with mock.patch.object(ServedCalls, method, wrong):
        assert _first_failure(3000) is not None, wrong.__name__
