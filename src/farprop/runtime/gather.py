"""All workers say something, all hear everything: what barriers and graceful shutdown are made of.

The worker whose name sorts first leads. The others send it their word; when it has all, it sends the collection to
each. A gathering is known by its workers and a number that counts on every one of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from farprop.errors import ConnectionLostError, FarpropError, RpcTimeoutError, UsageError
from farprop.runtime.agent import UNSET_TIMEOUT, Agent
from farprop.runtime.futures import Future

_LOOK_AROUND = 0.25  # seconds between looks whether those we wait for are still there


class AllGatherStates:
    """One gathering on one worker."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


class Gatherings:
    """The gatherings that this worker takes part in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._states: dict[str, AllGatherStates] = {}

    def state(self, key: str) -> AllGatherStates:
        with self._lock:
            return self._states.setdefault(key, AllGatherStates())

    def begin(self, names: Iterable[str]) -> str:
        group = " ".join(sorted(names))
        with self._lock:
            number = self._numbers.get(group, 0)
            self._numbers[group] = number + 1
        return f"{group} #{number}"

    def end(self, key: str) -> None:
        with self._lock:
            self._states.pop(key, None)

    def hear(self, key: str, worker: str, word: Any, names: set[str]) -> None:
        """On the leader: a worker's word has come."""
        state = self.state(key)
        with self._lock:
            if worker not in names or worker in state.gathered_objects:
                raise UsageError(
                    f"{worker} does not belong to the gathering of {key!r}, or has spoken already. All workers must "
                    "make the same gatherings in the same order."
                )
            state.gathered_objects[worker] = word
            if set(state.gathered_objects) == names:
                state.proceed_signal.set()

    def conclude(self, key: str, words: dict[str, Any]) -> None:
        """On a follower: all have spoken."""
        state = self.state(key)
        state.gathered_objects = words
        state.proceed_signal.set()


def gather(
    agent: Agent,
    gatherings: Gatherings,
    word: Any,
    names: set[str],
    timeout: float,
    hear: Callable[..., None],
    conclude: Callable[..., None],
    flags: int = 0,
) -> dict[str, Any]:
    """Exchange ``word`` among ``names``. ``hear`` and ``conclude`` are what is called on the other workers.

    ``timeout`` bounds the calls and the wait for late-comers; unset bounds the calls alone. A worker that is gone is
    an error at once, not a wait.
    """
    own = agent.get_worker_info().name
    leader = min(names)
    key = gatherings.begin(names)
    call_timeout = agent.rpc_timeout if timeout == UNSET_TIMEOUT else timeout
    deadline = time.monotonic() + timeout if timeout > 0 else 0.0
    try:
        if own == leader:
            gatherings.hear(key, own, word, names)
        else:
            agent.call_sync(leader, hear, (key, own, word, names), {}, call_timeout, flags)
        state = gatherings.state(key)
        _await(agent, state, names if own == leader else {leader}, own, deadline, timeout)
        if own == leader:
            _tell_all(agent, key, state.gathered_objects, names - {own}, call_timeout, conclude, flags)
        return state.gathered_objects
    finally:
        gatherings.end(key)


def _await(agent: Agent, state: AllGatherStates, names: set[str], own: str, deadline: float, timeout: float) -> None:
    """Wait for the signal while those who can still give it are there."""
    while True:
        for name in sorted(names - {own} - set(state.gathered_objects)):
            if state.proceed_signal.is_set():
                return
            try:
                agent.link(name, max(0.001, deadline - time.monotonic()) if deadline else 0.0)
            except RpcTimeoutError:
                break  # time is up
            except ConnectionLostError:
                # It may have said its last word and left: then the signal is set by now.
                if not state.proceed_signal.wait(_LOOK_AROUND):
                    raise
        left = deadline - time.monotonic() if deadline else _LOOK_AROUND
        if state.proceed_signal.wait(min(max(left, 0.0), _LOOK_AROUND)):
            return
        if deadline and time.monotonic() >= deadline:
            late = sorted(names - set(state.gathered_objects) - {own})
            raise RpcTimeoutError(f"{', '.join(late)} timed out in _all_gather after {timeout:.2f} seconds.")


def _tell_all(
    agent: Agent,
    key: str,
    words: dict[str, Any],
    followers: set[str],
    timeout: float,
    conclude: Callable[..., None],
    flags: int,
) -> None:
    told: dict[str, Future] = {}
    failed: dict[str, Exception] = {}
    for name in sorted(followers):
        future = Future()
        try:
            agent.call_async(name, conclude, (key, words), {}, timeout, future, flags)
            told[name] = future
        except FarpropError as error:
            failed[name] = error
    for name, future in told.items():
        try:
            future.wait()
        except Exception as error:
            failed[name] = error
    if failed:
        first = next(iter(failed.values()))
        raise RpcTimeoutError(
            f"Followers {sorted(failed)} timed out in _all_gather after {timeout:.2f} seconds. "
            f"The first error is {first!r}"
        ) from first
