"""Threads of the simulated workers: generators that yield how long they are busy, or a future that they wait for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.passes.context import ContextHolder

Steps = Generator[Any, Any, Any]


class PassError(Exception):
    """An error that simulated workers raise, as opposed to a violation by the state machines."""


class Future:
    """A result that is set once. Later results are dropped, like answers that nobody waits for."""

    def __init__(self) -> None:
        self.is_done = False
        self._result: tuple[Any, PassError | None] = (None, None)
        self._follow: Callable[[Any, PassError | None], None] | None = None

    def done(self, value: Any = None, error: PassError | None = None) -> None:
        if not self.is_done:
            self.is_done = True
            self._result = (value, error)
            if self._follow is not None:
                self._follow(value, error)

    def then(self, follow: Callable[[Any, PassError | None], None]) -> None:
        self._follow = follow
        if self.is_done:
            follow(*self._result)


def start(worker: ContextHolder, steps: Steps) -> Future:
    """Run a thread; the future gets its result or exception. A crash of its worker stops the thread."""
    result = Future()

    def go(value: Any = None, error: PassError | None = None) -> None:
        if worker.crashed:
            return
        try:
            wanted = steps.send(value) if error is None else steps.throw(error)
        except StopIteration as stop:
            result.done(stop.value)
        except PassError as raised:
            result.done(None, raised)
        else:
            if isinstance(wanted, Future):
                wanted.then(go)
            else:
                worker.world.clock.after(wanted, go)

    go()
    return result
