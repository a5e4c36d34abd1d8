"""Who is alive: a failure detector, which dials suspected workers, and the process behind each rank.

What dialling a suspected worker shows:

- It answers: it is alive.
- Its address refuses connections, or another process has it: the worker is dead.
- It can't be reached: it is dialled again, and taken for dead after ``PATIENCE`` seconds. The network may come back.
- It takes the connection and does not answer: it is stopped or slow, and not dead.

A restarted worker may have the same name and rank, but is another instance. The instance before it is dead, and stays
dead. ``look_for`` is the check that a joining worker makes before it takes the name or the rank of another one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum
from functools import partial

from farprop.errors import AuthenticationError, ConnectionLostError, ProtocolError, RpcTimeoutError, UsageError
from farprop.locks import make_lock
from farprop.protocol.handshake import RefusedError
from farprop.protocol.roster import Entry
from farprop.runtime.dialer import UnresponsiveError, WrongPeerError
from farprop.runtime.references.guarded_machine import GuardedMachine

_log = logging.getLogger(__name__)

PATIENCE = 120.0
_REDIAL_SECONDS = 0.5
_LOOK_SECONDS = 2.0  # how long one dial of a joining worker may take


class FailureDetector:
    """Finds out whether suspected workers are alive. See the module.

    Args:
        worker: this worker's name, for log lines.
        dial: ``dial(rank, timeout)`` makes a connection unless there is one, or raises.
        died: ``died(rank, reason)`` is called once a worker is dead; returns False if another process has its rank.
        submit: runs a function on another thread.
        call_at: calls a function at a time of the monotonic clock.
    """

    def __init__(
        self,
        worker: str,
        dial: Callable[..., object],
        died: Callable[[int, str], bool],
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
                self._died(rank, str(error))

    def _look(self, rank: int, deadline: float) -> None:
        dead = again = False
        reason = ""
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
            reason = str(error)
        with self._lock:
            again = self._dialling.pop(rank, False) or again
            if self._closed:
                return
            if again and not dead:
                self._suspects[rank] = deadline
        if dead:
            if not self._died(rank, reason) and again:
                self.suspect(rank)  # it is the process that has the rank now which was suspected meanwhile
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


class Verdict(Enum):
    """What a joining worker has found out about the one that has its name or rank."""

    ALIVE = "it has answered"
    DEAD = "its process is gone, or it could not be reached for ``PATIENCE`` seconds"
    UNKNOWN = "it takes connections and does not answer, or there was too little time to find out"


def look_for(dial: Callable[[Entry, float], None], worker: Entry, deadline: float) -> Verdict:
    """Find out, on this thread, whether a worker is alive.

    Args:
        dial: ``dial(worker, deadline)`` makes a connection and closes it, or raises.
        worker: the worker's entry.
        deadline: when to give up, on the monotonic clock.
    """
    dead_at = time.monotonic() + PATIENCE
    while True:
        now = time.monotonic()
        try:
            dial(worker, min(now + _LOOK_SECONDS, deadline))
            return Verdict.ALIVE
        except RefusedError:
            return Verdict.ALIVE  # it refuses a second worker with its name or rank
        except UnresponsiveError:
            dead_at = now + PATIENCE
        except (ConnectionLostError, AuthenticationError, ProtocolError) as error:
            if is_certain(error):
                return Verdict.DEAD
        now = time.monotonic()
        if now >= dead_at:
            return Verdict.DEAD
        if now + _REDIAL_SECONDS >= deadline:
            return Verdict.UNKNOWN
        time.sleep(_REDIAL_SECONDS)


class PeerInstances:
    """The last known instance of each rank, and whether it is dead.

    Args:
        guard: The state machine of references, which lists the dead ranks. Its lock guards this table, too.
        on_replaced: Called with a rank and an instance when that instance has taken the rank of another one, which is
            dead. It calls ``replace`` under the lock.
    """

    def __init__(self, guard: GuardedMachine, on_replaced: Callable[[int, str], None]) -> None:
        self._guard = guard
        self._machine = guard.machine
        self._on_replaced = on_replaced
        self._instances: dict[int, str] = {}
        self._replaced: set[str] = set()

    def meet(self, rank: int, instance: str) -> None:
        """A worker has proved who it is. If another instance had its rank, that one is dead.

        Raises:
            ConnectionLostError: it was replaced itself.
        """
        if self._guard.locked(self._instances.setdefault, rank, instance) != instance:
            self._on_replaced(rank, instance)
            if instance in self._replaced:
                raise ConnectionLostError(f"Another process has taken rank {rank}: the one before it is dead.")

    def replace(self, rank: int, instance: str) -> None:
        """Another instance has the rank from now on. The caller holds the lock."""
        self._replaced.add(self._instances[rank])
        self._instances[rank] = instance
        self._machine.replaced(rank)

    def note(self, rank: int, instance: str) -> bool:
        """Note which instance has a rank, if none is known. The caller holds the lock.

        Returns:
            Whether this instance has it.
        """
        return self._instances.setdefault(rank, instance) == instance

    # Each method does one lookup in a dictionary or a set: the interpreter's lock is enough.

    def get(self, rank: int, default: str | None = None) -> str | None:
        """The last known instance of a rank."""
        return self._instances.get(rank, default)

    def is_dead(self, rank: int, instance: str) -> bool:
        """Whether this instance is known to be dead. If its rank is dead and had no known instance, any instance is."""
        dead = self._machine.dead
        return instance in self._replaced or (rank in dead and self._instances.get(rank, instance) == instance)
