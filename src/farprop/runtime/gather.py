"""All-gathers over calls, for barriers and graceful shutdown. The state machine is in ``farprop.protocol.gather``."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from farprop.errors import ConnectionLostError, FarpropError, RpcTimeoutError
from farprop.locks import make_lock
from farprop.protocol import gather as protocol
from farprop.protocol.gather import Action, AwaitRelease, Broadcast, Failure, Finish, Key, Release, SendValue
from farprop.runtime.agent import Agent
from farprop.runtime.first_failure import explained
from farprop.runtime.futures import Future
from farprop.wire.message import SYSTEM

_PEER_CHECK_SECONDS = 0.25  # how often to check that the awaited workers are alive
_LEAST_CALL_SECONDS = 0.25  # what a call of a gather has, however little time is left
_RELEASE_SECONDS = 0.5  # how long a leader that gives up dials followers to tell them


class AllGatherStates:
    """One gather on this worker: the actions that its thread has to perform, and its result."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()
        self.due: deque[Action] = deque()


class GatherCalls(NamedTuple):
    """The functions to call on other workers: with a value for the leader, with all values for a follower, to release
    a follower.
    """

    to_leader: Callable[..., None]
    to_follower: Callable[..., None]
    release: Callable[..., None]


class Gathers:
    """The gathers of this worker. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = make_lock("gather")
        self._machine = protocol.GatherMachine()
        self._states: dict[Key, AllGatherStates] = {}
        self._on_all_values: dict[Key, Callable[[Key], None]] = {}  # called when other workers may have finished it

    def begin(
        self, own: str, names: set[str], value: Any, call_seconds: float, on_all_values: Callable[[Key], None]
    ) -> tuple[Key, AllGatherStates]:
        state = AllGatherStates()  # first: Ctrl-C in it must not leave a gather that nobody performs
        with self._lock:
            key, actions = self._machine.begin(own, names, value, call_seconds)
            self._states[key] = state
            self._on_all_values[key] = on_all_values
            self._add(key, actions)
        return key, state

    def end(self, key: Key) -> None:
        with self._lock:
            self._states.pop(key, None)
            self._on_all_values.pop(key, None)

    def on_value(self, key: Key, worker: str, value: Any) -> None:
        with self._lock:
            self._add(key, self._machine.on_value(key, worker, value))

    def on_confirmed(self, key: Key, follower: str, error: BaseException | None) -> None:
        with self._lock:
            self._add(key, self._machine.on_confirmed(key, follower, error))

    def on_broadcast(self, key: Key, values: dict[str, Any]) -> None:
        with self._lock:
            self._add(key, self._machine.on_broadcast(key, values))

    def on_release(self, key: Key, failure: Failure | None) -> None:
        with self._lock:
            self._add(key, self._machine.on_release(key, failure))

    def awaited(self, key: Key) -> list[str]:
        with self._lock:
            return sorted(self._machine.awaited(key))

    def all_awaited(self) -> list[str]:
        """The workers that any gather here waits for."""
        with self._lock:
            return sorted({worker for key in self._states for worker in self._machine.awaited(key)})

    def on_lost(self, key: Key, worker: str, error: ConnectionLostError) -> None:
        with self._lock:
            self._add(key, self._machine.on_lost(key, worker, error))

    def on_timeout(self, key: Key, seconds: float) -> None:
        with self._lock:
            self._add(key, self._machine.on_timeout(key, seconds))

    def fail(self, key: Key, error: BaseException) -> None:
        with self._lock:
            self._add(key, self._machine.fail(key, error))

    def _add(self, key: Key, actions: list[Action]) -> None:
        if actions:
            state = self._states.get(key)
            if state is None:
                raise ConnectionLostError(f"A worker has given up {key}: it was interrupted when it began.")
            if any(isinstance(action, Broadcast | AwaitRelease) for action in actions):
                self._on_all_values[key](key)
            state.due.extend(actions)
            state.proceed_signal.set()


def gather(
    agent: Agent,
    gathers: Gathers,
    value: Any,
    names: set[str],
    timeout: float | None,
    call_timeout: float | None,
    calls: GatherCalls,
    flags: int = 0,
) -> dict[str, Any]:
    """Exchange values among workers. Blocks until all have contributed one.

    Args:
        agent: this worker.
        gathers: its gathers.
        value: this worker's value.
        names: the names of the workers that take part.
        timeout: how long to wait for slow workers, in seconds; None for no timeout.
        call_timeout: the timeout of each call.
        calls: the functions to call on other workers.
        flags: flags of these calls.

    Returns:
        The values by name.

    Raises:
        ConnectionLostError: a worker has died.
        RpcTimeoutError: the time was not enough.
    """
    own = agent.get_worker_info().name
    own_calls = frozenset(
        name for function in (calls.to_leader, calls.to_follower) if (name := agent.dialect.name_of(function))
    )

    def on_all_values(key: Key) -> None:
        if not flags & SYSTEM:
            agent.gate.shut(key, frozenset(names - {own}), own_calls)

    key, state = gathers.begin(own, names, value, call_timeout or 0.0, on_all_values)
    return _GatherLoop(agent, gathers, key, state, own, value, timeout, call_timeout, calls, flags).run()


class _GatherLoop:
    """Performs the actions of one gather on the caller's thread, and watches the workers that it waits for."""

    def __init__(
        self,
        agent: Agent,
        gathers: Gathers,
        key: Key,
        state: AllGatherStates,
        own: str,
        value: Any,
        timeout: float | None,
        call_timeout: float | None,
        calls: GatherCalls,
        flags: int,
    ) -> None:
        self._agent = agent
        self._gathers = gathers
        self._key = key
        self._state = state
        self._own = own
        self._value = value
        self._timeout = timeout
        self._call_timeout = call_timeout
        self._calls = calls
        self._flags = flags
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._end = self._deadline  # as the deadline, which is None once it has been reported
        self._gave_up: float | None = None

    def _call_seconds(self) -> float | None:
        """The timeout of a call: the gather's deadline holds for all of its calls together."""
        if self._end is None:
            return self._call_timeout
        left = max(_LEAST_CALL_SECONDS, self._end - time.monotonic())
        return left if self._call_timeout is None else min(left, self._call_timeout)

    def run(self) -> dict[str, Any]:
        try:
            try:
                return self._perform_actions()
            except BaseException as error:  # Ctrl-C, too: the other workers must not wait for this one
                self._gathers.fail(self._key, error)
                while self._state.due:
                    action = self._state.due.popleft()
                    if isinstance(action, Release):
                        self._release(action)
                raise
        finally:
            self._gathers.end(self._key)
            self._agent.gate.open(self._key)

    def _perform_actions(self) -> dict[str, Any]:
        while True:
            self._await_action()
            match self._state.due.popleft():
                case SendValue(leader):
                    arguments = (tuple(self._key), self._own, self._value)
                    seconds = self._call_seconds()
                    self._agent.call_sync(leader, self._calls.to_leader, arguments, {}, seconds, self._flags)
                case Broadcast(followers, values):
                    for follower in followers:
                        self._broadcast_to(follower, values)
                case AwaitRelease():
                    if self._call_timeout is not None:
                        patience = time.monotonic() + self._call_timeout
                        self._deadline = patience if self._deadline is None else min(self._deadline, patience)
                case Release() as release:
                    self._release(release)
                case Finish(values, error):
                    if isinstance(error, FarpropError):
                        explained(error)
                    if error is not None:
                        raise error
                    self._state.gathered_objects = values
                    return values

    def _await_action(self) -> None:
        """Wait for the next action. Meanwhile, check that the awaited workers are alive."""
        due, signal = self._state.due, self._state.proceed_signal
        while not due:
            signal.clear()
            for name in self._gathers.awaited(self._key):
                if due:
                    return
                try:
                    deadline = self._deadline
                    self._agent.peers.connect(
                        name, None if deadline is None else max(0.001, deadline - time.monotonic())
                    )
                except RpcTimeoutError:
                    break  # time is up
                except ConnectionLostError as error:
                    # It may have sent its last message and left. In that case the message arrives at once.
                    if not signal.wait(_PEER_CHECK_SECONDS):
                        self._gathers.on_lost(self._key, name, explained(error))
            if due:
                return
            left = _PEER_CHECK_SECONDS if self._deadline is None else self._deadline - time.monotonic()
            if left > 0:
                if not signal.wait(min(left, _PEER_CHECK_SECONDS)):
                    # A worker is slow. It may be waiting for a call that the gate holds back here.
                    self._agent.gate.open(self._key)
            else:
                self._deadline = None
                self._gathers.on_timeout(self._key, self._timeout or 0.0)

    def _broadcast_to(self, follower: str, values: dict[str, Any]) -> None:
        future = Future()
        try:
            self._agent.call_async(
                follower,
                self._calls.to_follower,
                (tuple(self._key), values),
                {},
                self._call_seconds(),
                future,
                self._flags,
            )
        except FarpropError as error:
            self._gathers.on_confirmed(self._key, follower, error)
            return
        gathers, key = self._gathers, self._key

        def confirm(delivered: Any) -> None:
            try:
                delivered.wait()
            except Exception as error:
                gathers.on_confirmed(key, follower, error)
            else:
                gathers.on_confirmed(key, follower, None)

        # On a thread of the pool: if the future is done, the callback runs at once, and torch swallows an interrupt.
        self._agent.services.submit(future.add_done_callback, confirm)

    def _release(self, release: Release) -> None:
        failure = None if release.failure is None else tuple(release.failure)
        arguments = (tuple(self._key), failure)
        seconds = self._call_seconds()
        if failure is not None:
            now = time.monotonic()
            if self._gave_up is None:
                self._gave_up = now
            seconds = max(0.0, self._gave_up + _RELEASE_SECONDS - now)
            if not seconds and not self._agent.peers.is_ready(self._agent.get_worker_info(release.follower).id):
                return  # it learns it at its own deadline
        try:
            self._agent.call_async(release.follower, self._calls.release, arguments, {}, seconds, Future(), SYSTEM)
        except FarpropError:
            pass  # the follower is gone
