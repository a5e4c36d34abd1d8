"""Gatherings over calls: what barriers and graceful shutdown are made of. ``farprop.protocol.gatherings`` decides."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from farprop.errors import ConnectionLostError, FarpropError, RpcTimeoutError
from farprop.protocol import gatherings as protocol
from farprop.protocol.gatherings import Action, Failure, Finish, Hurry, Key, Release, Speak, Tell
from farprop.runtime.agent import UNSET_TIMEOUT, Agent
from farprop.runtime.futures import Future
from farprop.wire.frames import SYSTEM

_LOOK_AROUND = 0.25  # seconds between looks whether those we wait for are still there


class AllGatherStates:
    """One gathering on one worker: what is to be done for it, by the thread that gathers, and what it has gathered."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()
        self.due: deque[Action] = deque()


class Calls(NamedTuple):
    """What is called on the other workers: a word for the leader, all words for a follower, and its release."""

    hear: Callable[..., None]
    tell: Callable[..., None]
    release: Callable[..., None]


class Gatherings:
    """The gatherings that this worker takes part in. Events come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._machine = protocol.Gatherings()
        self._states: dict[Key, AllGatherStates] = {}
        self._all_have_spoken: dict[Key, Callable[[Key], None]] = {}  # called when others may be through with it

    def begin(
        self, own: str, names: set[str], word: Any, call_seconds: float, all_have_spoken: Callable[[Key], None]
    ) -> tuple[Key, AllGatherStates]:
        with self._lock:
            key, actions = self._machine.begin(own, names, word, call_seconds)
            state = self._states[key] = AllGatherStates()
            self._all_have_spoken[key] = all_have_spoken
            self._add(key, actions)
        return key, state

    def end(self, key: Key) -> None:
        with self._lock:
            self._states.pop(key, None)
            self._all_have_spoken.pop(key, None)

    def hear(self, key: Key, worker: str, word: Any) -> None:
        with self._lock:
            self._add(key, self._machine.hear(key, worker, word))

    def confirm(self, key: Key, follower: str, error: BaseException | None) -> None:
        with self._lock:
            self._add(key, self._machine.confirm(key, follower, error))

    def be_told(self, key: Key, words: dict[str, Any]) -> None:
        with self._lock:
            self._add(key, self._machine.be_told(key, words))

    def be_released(self, key: Key, failure: Failure | None) -> None:
        with self._lock:
            self._add(key, self._machine.be_released(key, failure))

    def awaited(self, key: Key) -> list[str]:
        with self._lock:
            return sorted(self._machine.awaited(key))

    def lose(self, key: Key, worker: str, error: ConnectionLostError) -> None:
        with self._lock:
            self._add(key, self._machine.lose(key, worker, error))

    def run_out(self, key: Key, seconds: float) -> None:
        with self._lock:
            self._add(key, self._machine.run_out(key, seconds))

    def fail(self, key: Key, error: BaseException) -> None:
        with self._lock:
            self._add(key, self._machine.fail(key, error))

    def _add(self, key: Key, actions: list[Action]) -> None:
        if actions:
            state = self._states[key]
            if any(isinstance(action, Tell | Hurry) for action in actions):
                self._all_have_spoken[key](key)
            state.due.extend(actions)
            state.proceed_signal.set()


def gather(
    agent: Agent,
    gatherings: Gatherings,
    word: Any,
    names: set[str],
    timeout: float,
    calls: Calls,
    flags: int = 0,
) -> dict[str, Any]:
    """Exchange ``word`` among ``names``.

    ``timeout`` bounds the calls and the wait for late-comers; unset bounds the calls alone. A worker that is gone is
    an error at once, not a wait.
    """
    call_timeout = agent.rpc_timeout if timeout == UNSET_TIMEOUT else timeout
    own = agent.get_worker_info().name
    inner = frozenset(name for function in (calls.hear, calls.tell) if (name := agent.dialect.name_of(function)))

    def shut_gate(key: Key) -> None:
        if not flags & SYSTEM:
            agent.gate.shut(key, frozenset(names - {own}), inner)

    key, state = gatherings.begin(own, names, word, call_timeout, shut_gate)
    return _Gatherer(agent, gatherings, key, state, own, word, timeout, call_timeout, calls, flags).run()


class _Gatherer:
    """The thread that gathers: it does what the machine says, and tells it what it waits for in vain."""

    def __init__(
        self,
        agent: Agent,
        gatherings: Gatherings,
        key: Key,
        state: AllGatherStates,
        own: str,
        word: Any,
        timeout: float,
        call_timeout: float,
        calls: Calls,
        flags: int,
    ) -> None:
        self._agent = agent
        self._gatherings = gatherings
        self._key = key
        self._state = state
        self._own = own
        self._word = word
        self._timeout = timeout
        self._call_timeout = call_timeout
        self._calls = calls
        self._flags = flags
        self._deadline = time.monotonic() + timeout if timeout > 0 else 0.0

    def run(self) -> dict[str, Any]:
        try:
            try:
                return self._go_on()
            except BaseException as error:  # Ctrl-C, too: the others must not wait for us
                self._gatherings.fail(self._key, error)
                while self._state.due:
                    action = self._state.due.popleft()
                    if isinstance(action, Release):
                        self._release(action)
                raise
        finally:
            self._gatherings.end(self._key)
            self._agent.gate.open(self._key)

    def _go_on(self) -> dict[str, Any]:
        while True:
            self._await()
            match self._state.due.popleft():
                case Speak(leader):
                    arguments = (tuple(self._key), self._own, self._word)
                    self._agent.call_sync(leader, self._calls.hear, arguments, {}, self._call_timeout, self._flags)
                case Tell(followers, words):
                    for follower in followers:
                        self._tell(follower, words)
                case Hurry():
                    if self._call_timeout:
                        patience = time.monotonic() + self._call_timeout
                        self._deadline = min(self._deadline, patience) if self._deadline else patience
                case Release() as release:
                    self._release(release)
                case Finish(words, error):
                    if error is not None:
                        raise error
                    self._state.gathered_objects = words
                    return words

    def _await(self) -> None:
        """Until there is something to do. Looks around for those who should give it."""
        due, signal = self._state.due, self._state.proceed_signal
        while not due:
            signal.clear()
            for name in self._gatherings.awaited(self._key):
                if due:
                    return
                try:
                    self._agent.link(name, max(0.001, self._deadline - time.monotonic()) if self._deadline else 0.0)
                except RpcTimeoutError:
                    break  # time is up
                except ConnectionLostError as error:
                    # It may have said its last word and left: then that is here by now.
                    if not signal.wait(_LOOK_AROUND):
                        self._gatherings.lose(self._key, name, error)
            if due:
                return
            left = self._deadline - time.monotonic() if self._deadline else _LOOK_AROUND
            if left > 0:
                if not signal.wait(min(left, _LOOK_AROUND)):
                    # Somebody is slow. What is held back here may be what it waits for.
                    self._agent.gate.open(self._key)
            else:
                self._deadline = 0.0
                self._gatherings.run_out(self._key, self._timeout)

    def _tell(self, follower: str, words: dict[str, Any]) -> None:
        future = Future()
        try:
            self._agent.call_async(
                follower, self._calls.tell, (tuple(self._key), words), {}, self._call_timeout, future, self._flags
            )
        except FarpropError as error:
            self._gatherings.confirm(self._key, follower, error)
            return
        gatherings, key = self._gatherings, self._key

        def confirm(told: Any) -> None:
            try:
                told.wait()
            except Exception as error:
                gatherings.confirm(key, follower, error)
            else:
                gatherings.confirm(key, follower, None)

        future.add_done_callback(confirm)

    def _release(self, release: Release) -> None:
        failure = None if release.failure is None else tuple(release.failure)
        arguments = (tuple(self._key), failure)
        try:
            self._agent.call_async(
                release.follower, self._calls.release, arguments, {}, self._call_timeout, Future(), SYSTEM
            )
        except FarpropError:
            pass  # it is gone
