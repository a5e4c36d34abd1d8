"""All-gathers of a job's workers: each contributes a value, and each gets the values of all.

The worker whose name sorts first is the leader, the others follow. A gather is identified by its workers and a sequence
number, which every worker counts. It has three steps:

1. Each follower sends its value to the leader.
2. When the leader has all values, it broadcasts them to the followers, and each confirms.
3. When every follower has confirmed or failed, the leader releases the followers and returns.

Rules that hold here:

- A follower returns after its leader, unless the leader is lost or the time is up. Many programs call the leader next,
  and expect it to have finished the gather.
- A worker that has the values returns them, even if others fail. But a leader that could not reach a follower raises.
- A leader that fails releases the followers whose values it has, with the reason, and refuses the values of the others.
  So no worker waits for a gather that has failed.
- Messages for a gather that is over are ignored. A value may arrive before the leader has begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from farprop.errors import ConnectionLostError, FarpropError, ProtocolError, RpcTimeoutError, UsageError

_KINDS = {kind.__name__: kind for kind in (ConnectionLostError, RpcTimeoutError)}
_ADVICE = "All workers must make the same gathers in the same order."


class Key(NamedTuple):
    """Identifies a gather; the same on all of its workers."""

    names: tuple[str, ...]
    number: int

    @classmethod
    def of(cls, value: Any) -> Key:
        """Check a key from a message, where it may be a plain tuple."""
        match value:
            case (tuple() as names, int() as number) if all(isinstance(name, str) for name in names):
                return cls(names, number)
        raise ProtocolError("a message of a gather has no valid key")

    def __str__(self) -> str:
        return f"gather {self.number} of {', '.join(self.names)}"


class SendValue(NamedTuple):
    """Send this worker's value to the leader."""

    leader: str


class Broadcast(NamedTuple):
    """Send all values to these followers, and report the outcome of each with ``on_confirmed``."""

    followers: tuple[str, ...]
    values: dict[str, Any]


class AwaitRelease(NamedTuple):
    """All values are here: wait for the release, but no longer than a call may take."""


class Failure(NamedTuple):
    """The reason why a follower gets no values."""

    kind: str
    text: str

    @classmethod
    def of(cls, value: Any) -> Failure:
        """Check a failure from a message, where it may be a plain tuple."""
        match value:
            case (str() as kind, str() as text):
                return cls(kind, text)
        raise ProtocolError("the failure in a message of a gather is malformed")


_NO_FAILURE = Failure("", "")


def _kind_of(error: BaseException) -> str:
    """The name of its class; for one that is private to farprop, of the public one above it."""
    public = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == ConnectionLostError.__module__)
    return next(public, type(error).__name__)


class Release(NamedTuple):
    """Tell a follower that the gather is over."""

    follower: str
    failure: Failure | None


class Finish(NamedTuple):
    """The gather is over on this worker: return the values, or raise the error."""

    values: dict[str, Any]
    error: BaseException | None


Action = SendValue | Broadcast | AwaitRelease | Release | Finish


class _Gather:
    def __init__(self, key: Key) -> None:
        self.key = key
        self.own = ""  # this worker's name; empty until it begins
        self.call_seconds = 0.0
        self.values: dict[str, Any] = {}
        self.has_all = False
        self.unconfirmed: set[str] = set()
        self.unreached: dict[str, BaseException] = {}

    @property
    def leads(self) -> bool:
        return self.own == self.key.names[0]


class GatherMachine:
    """The state machine of one worker's gathers. Each event is a method, which returns the actions to perform."""

    def __init__(self) -> None:
        self._begun: dict[tuple[str, ...], int] = {}
        self._open: dict[Key, _Gather] = {}
        self._failures: dict[tuple[str, ...], tuple[int, Failure]] = {}  # the last one of each group

    def begin(self, own: str, names: Iterable[str], value: Any, call_seconds: float) -> tuple[Key, list[Action]]:
        """Begin the next gather of these workers.

        Args:
            own: the name of this worker.
            names: the names of all workers that take part.
            value: this worker's value.
            call_seconds: how long a call may take.

        Returns:
            The key of the gather, and the actions to perform.
        """
        group = tuple(sorted(names))
        number = self._begun.get(group, 0)
        self._begun[group] = number + 1
        key = Key(group, number)
        gather = self._open.setdefault(key, _Gather(key))
        gather.own = own
        gather.call_seconds = call_seconds
        return key, self.on_value(key, own, value) if gather.leads else [SendValue(group[0])]

    def on_value(self, key: Key, worker: str, value: Any) -> list[Action]:
        """On the leader: the value of a worker arrived."""
        gather = self._open.get(key)
        if gather is None:
            if key.number < self._begun.get(key.names, 0):
                number, failure = self._failures.get(key.names, (-1, _NO_FAILURE))
                is_known = number == key.number
                because = f": {failure.text}" if is_known else "."
                # If a death is the reason, the late one is not to blame.
                is_death = is_known and failure.kind == ConnectionLostError.__name__
                kind = ConnectionLostError if is_death else UsageError
                raise kind(f"{worker} came too late: {key.names[0]} has finished {key}{because}")
            gather = self._open[key] = _Gather(key)
        if worker not in key.names or worker in gather.values:
            raise UsageError(f"{worker} does not belong to {key}, or has sent its value already. {_ADVICE}")
        gather.values[worker] = value
        if len(gather.values) < len(key.names):
            return []
        gather.has_all = True
        followers = key.names[1:]
        gather.unconfirmed = set(followers)
        return [Broadcast(followers, gather.values)] if followers else self._finish(gather)

    def on_confirmed(self, key: Key, follower: str, error: BaseException | None) -> list[Action]:
        """On the leader: a follower has the values, or could not be reached."""
        gather = self._open.get(key)
        if gather is None or follower not in gather.unconfirmed:
            return []
        gather.unconfirmed.remove(follower)
        if error is not None:
            gather.unreached[follower] = error
        return [] if gather.unconfirmed else self._finish(gather)

    def on_broadcast(self, key: Key, values: dict[str, Any]) -> list[Action]:
        """On a follower: the values of all workers arrived."""
        gather = self._open.get(key)
        if gather is None or gather.has_all:
            return []
        gather.values, gather.has_all = values, True
        return [AwaitRelease()]

    def on_release(self, key: Key, failure: Failure | None) -> list[Action]:
        """On a follower: the leader has finished, with ``failure`` if it did not get the values of all workers."""
        gather = self._open.get(key)
        if gather is None:
            return []
        if failure is None or gather.has_all:
            return self._finish(gather)
        kind = _KINDS.get(failure.kind, FarpropError)
        return self._finish(gather, kind(f"{key.names[0]} gave up {key}: {failure.text}"))

    def awaited(self, key: Key) -> set[str]:
        """The workers whose death must be noticed. A broadcast's own call notices the death of a follower."""
        gather = self._open.get(key)
        if gather is None:
            return set()
        if not gather.leads:
            return {key.names[0]}
        return set() if gather.has_all else set(key.names) - set(gather.values)

    def on_lost(self, key: Key, worker: str, error: ConnectionLostError) -> list[Action]:
        """An awaited worker can't be reached any more."""
        gather = self._open.get(key)
        if gather is None or worker not in self.awaited(key):
            return []
        return self._finish(gather, None if gather.has_all else error)

    def on_timeout(self, key: Key, seconds: float) -> list[Action]:
        """The time is up. The broadcast goes on: its calls have timeouts of their own."""
        gather = self._open.get(key)
        if gather is None or (gather.leads and gather.has_all):
            return []
        if gather.has_all:
            return self._finish(gather)
        late = ", ".join(sorted(self.awaited(key)))
        return self._finish(gather, RpcTimeoutError(f"{late} timed out in _all_gather after {seconds:.2f} seconds."))

    def fail(self, key: Key, error: BaseException) -> list[Action]:
        """The gather fails on this worker."""
        gather = self._open.get(key)
        return [] if gather is None else self._finish(gather, error)

    def _finish(self, gather: _Gather, error: BaseException | None = None) -> list[Action]:
        key = gather.key
        del self._open[key]
        if not gather.leads:
            return [Finish(gather.values, error)]
        if error is None and gather.unreached:
            first = next(iter(gather.unreached.values()))
            error = RpcTimeoutError(
                f"Followers {sorted(gather.unreached)} timed out in _all_gather after {gather.call_seconds:.2f} "
                f"seconds. The first error is {first!r}"
            )
            error.__cause__ = first
        if error is not None:
            self._failures[key.names] = key.number, Failure(_kind_of(error), str(error))
        releases: list[Action] = []
        for name in key.names[1:]:
            if not gather.has_all and name not in gather.values:
                continue  # its value will be refused
            reason = error if name in gather.unconfirmed or not gather.has_all else gather.unreached.get(name)
            failure = Failure(_kind_of(reason), str(reason) or repr(reason)) if reason else None
            releases.append(Release(name, failure))
        return [*releases, Finish(gather.values, error)]

    def validate(self) -> None:
        for key, gather in self._open.items():
            has_begun = key.number < self._begun.get(key.names, 0)
            assert has_begun == bool(gather.own)
            assert gather.leads or not gather.unconfirmed
            if gather.leads and gather.has_all:
                assert set(gather.values) == set(key.names)
                assert gather.unconfirmed, "all followers have confirmed, and the leader has not finished"
