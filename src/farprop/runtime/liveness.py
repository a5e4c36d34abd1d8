"""Who is alive: a failure detector, which dials suspected workers, and the process behind each rank.

What dialling a suspected worker shows:

- It answers: it is alive.
- Its address refuses connections, or another process has it: the worker is dead.
- It can't be reached: it is dialled again, and taken for dead after ``PATIENCE`` seconds. The network may come back.
- It takes the connection and does not answer: it is stopped or slow, and not dead.

A restarted worker keeps its rank, but is another instance. The instance before it is dead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from farprop.errors import AuthenticationError, ConnectionLostError, ProtocolError, RpcTimeoutError, UsageError
from farprop.locks import make_lock
from farprop.runtime.dialer import UnresponsiveError, WrongPeerError
from farprop.runtime.references.guarded_machine import GuardedMachine

_log = logging.getLogger(__name__)

PATIENCE = 120.0
_REDIAL_SECONDS = 0.5


class FailureDetector:
    """Finds out whether suspected workers are alive. See the module.

    Args:
        worker: this worker's name, for log lines.
        dial: ``dial(rank, timeout)`` makes a connection unless there is one, or raises.
        died: ``died(rank)`` is called once a worker is dead.
        submit: runs a function on another thread.
        call_at: calls a function at a time of the monotonic clock.
    """

    def __init__(
        self,
        worker: str,
        dial: Callable[..., object],
        died: Callable[[int], None],
        submit: Callable[..., None],
        call_at: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._worker = worker
        self._dial = dial
        self._died = died
        self._submit = submit
        self._call_at = call_at
        self._lock = make_lock("failure_detector")
        self._suspects: dict[int, float] = {}  # to be dialled again: when to take them for dead
        self._dialling: dict[int, bool] = {}  # being dialled: whether they were suspected again meanwhile
        self._closed = False

    def suspect(self, rank: int) -> None:
        """Something is wrong with a worker: find out whether it is alive, on another thread."""
        with self._lock:
            if rank in self._dialling:
                self._dialling[rank] = True
            if self._closed or rank in self._dialling or rank in self._suspects:
                return
            self._dialling[rank] = False
        self._submit(self._look, rank, time.monotonic() + PATIENCE)

    def look_now(self, rank: int, timeout: float | None) -> None:
        """Dial on this thread. Only a certain outcome counts: the time may be too short for any other."""
        try:
            self._dial(rank, timeout)
        except Exception as error:
            if is_certain(error):
                self._died(rank)

    def _look(self, rank: int, deadline: float) -> None:
        dead = again = False
        try:
            self._dial(rank)
        except UsageError:
            pass  # this worker is shutting down
        except UnresponsiveError:
            again = True
            deadline = time.monotonic() + PATIENCE
        except Exception as error:
            if not isinstance(error, ConnectionLostError | RpcTimeoutError):
                _log.info("%s could not find out whether worker %d is alive: %r", self._worker, rank, error)
            dead = is_certain(error) or time.monotonic() >= deadline
            again = not dead
        with self._lock:
            again = self._dialling.pop(rank, False) or again
            if self._closed:
                return
            if again and not dead:
                self._suspects[rank] = deadline
        if dead:
            self._died(rank)
        elif again:
            self._call_at(time.monotonic() + _REDIAL_SECONDS, partial(self._look_again, rank))

    def _look_again(self, rank: int) -> None:
        with self._lock:
            if self._closed:
                return
            deadline = self._suspects.pop(rank)
            self._dialling[rank] = False
        self._submit(self._look, rank, deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True


def is_certain(error: BaseException | None) -> bool:
    """Whether a failed dial proves that the worker is gone, and not only that the network is cut."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | WrongPeerError | AuthenticationError | ProtocolError):
            return True
        error = error.__cause__
    return False


class PeerInstances:
    """The last known instance of each rank, and whether it is dead.

    Args:
        guard: The state machine of references, which lists the dead ranks. Its lock guards this table, too.
        on_replaced: Called with a rank when another process has taken it: the earlier process is dead.
    """

    def __init__(self, guard: GuardedMachine, on_replaced: Callable[[int], None]) -> None:
        self._guard = guard
        self._machine = guard.machine
        self._on_replaced = on_replaced
        self._instances: dict[int, str] = {}

    def meet(self, rank: int, instance: str) -> None:
        """A worker has proved who it is. If another instance had its rank, that one is dead."""
        if self._guard.locked(self._instances.setdefault, rank, instance) == instance:
            return
        self._on_replaced(rank)
        self._guard.run(self._replace, rank, instance)

    def _replace(self, rank: int, instance: str) -> None:
        if self._instances.get(rank) != instance:
            self._instances[rank] = instance
            self._machine.replaced(rank)

    # Each method does one lookup in a dictionary or a set: the interpreter's lock is enough.

    def get(self, rank: int, default: str | None = None) -> str | None:
        """The last known instance of a rank."""
        return self._instances.get(rank, default)

    def is_dead(self, rank: int, instance: str) -> bool:
        """Whether this instance is known to be dead. If its rank is dead and had no known instance, any instance is."""
        return rank in self._machine.dead and self._instances.get(rank, instance) == instance
