"""Mutants of the two ends of a stream, to see that the simulation kills them."""

from __future__ import annotations

from typing import Any

from farprop.protocol.streams import Action, Answer, Close, Consumer, Producer, Pull, StreamNumbers
from tests.simulation.harness import mutant

_PRODUCER: dict[str, Any] = {name: value for name, value in vars(Producer).items() if callable(value)}
_CONSUMER: dict[str, Any] = {name: value for name, value in vars(Consumer).items() if callable(value)}


@mutant(Producer, "on_pull", kind="streams")
def pulls_answered_as_they_come(self: Producer, number: int, allowed: int, pull: Any) -> list[Action]:
    return list(_PRODUCER["on_pull"](self, self._next_pull + len(self._parked), allowed, pull))


@mutant(Producer, "on_pull", kind="streams")
def one_item_too_many_allowed(self: Producer, number: int, allowed: int, pull: Any) -> list[Action]:
    return list(_PRODUCER["on_pull"](self, number, allowed + 1, pull))


@mutant(Producer, "on_pull", kind="streams")
def pulls_after_the_close_parked(self: Producer, number: int, allowed: int, pull: Any) -> list[Action]:
    if self.is_closed:
        self._parked[number] = pull
        return []
    return list(_PRODUCER["on_pull"](self, number, allowed, pull))


@mutant(Producer, "on_item", kind="streams")
def generator_forgotten_when_closed_while_it_runs(self: Producer, item: Any, with_others: bool) -> list[Action]:
    found = _PRODUCER["on_item"](self, item, with_others)
    return [action for action in found if not isinstance(action, Close)]


@mutant(Producer, "on_item", kind="streams")
def run_twice_at_once(self: Producer, item: Any, with_others: bool) -> list[Action]:
    was_running = self.is_running
    self.is_running = False
    found = _PRODUCER["_follow"](self)
    self.is_running = was_running
    return list(found) + list(_PRODUCER["on_item"](self, item, with_others))


@mutant(Producer, "on_close", kind="streams")
def closed_while_it_runs(self: Producer) -> list[Action]:
    running, self.is_running = self.is_running, False
    found = _PRODUCER["on_close"](self)
    self.is_running = running
    return list(found)


@mutant(Producer, "on_close", kind="streams")
def parked_pulls_forgotten_at_the_close(self: Producer) -> list[Action]:
    return [action for action in _PRODUCER["on_close"](self) if not isinstance(action, Answer)]


@mutant(Producer, "on_error", kind="streams")
def error_before_the_items(self: Producer, error: BaseException) -> list[Action]:
    self._ready.clear()
    return list(_PRODUCER["on_error"](self, error))


@mutant(Producer, "on_error", kind="streams")
def error_taken_for_the_end(self: Producer, error: BaseException) -> list[Action]:
    return self.on_end()


@mutant(Producer, "_take_ready", kind="streams")
def an_item_lost(self: Producer) -> tuple[Any, ...]:
    items: tuple[Any, ...] = _PRODUCER["_take_ready"](self)
    return items[:-1] if len(items) > 2 else items


@mutant(Producer, "is_done", kind="streams")
@property
def forgotten_before_the_caller_is_told(self: Producer) -> bool:
    return self.has_ended


@mutant(Consumer, "pulls", kind="streams")
def one_pull_for_each_window(self: Consumer) -> list[Pull]:
    return list(_CONSUMER["pulls"](self)) if self.received - self._taken == 0 == self._sent - self._answered else []


@mutant(Consumer, "on_taken", kind="streams")
def taken_items_not_counted(self: Consumer) -> None:
    pass


@mutant(StreamNumbers, "on_unknown_close", kind="streams")
def early_closes_forgotten(self: StreamNumbers, number: int) -> None:
    pass
