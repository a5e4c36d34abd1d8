"""All workers say something, all hear everything: one worker's view of the gatherings that it takes part in.

The worker whose name sorts first leads. A gathering goes through three steps, and is known by its workers and a number
that counts on every one of them:

1. each follower *speaks*: it sends its word to the leader;
2. the leader, when it has all words, *tells* them to each follower, and each confirms;
3. when all have confirmed, or failed to, the leader is through, and *releases* the followers.

Rules that hold:

- A follower is through after its leader, unless the leader is lost or time is up. What a follower does next is often to
  call the leader, and expects it to be as far as itself.
- Who has the words returns them, whatever becomes of the others. But a leader that could not tell somebody raises.
- A leader that fails releases those who have spoken with the reason, and refuses those who speak later: nobody waits
  for a gathering that was given up.
- What comes for a gathering that is over here changes nothing. A word may come before the leader has begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from farprop.errors import ConnectionLostError, FarpropError, ProtocolError, RpcTimeoutError, UsageError

_KINDS = {kind.__name__: kind for kind in (ConnectionLostError, RpcTimeoutError)}
_ADVICE = "All workers must make the same gatherings in the same order."


class Key(NamedTuple):
    """The same on all workers of a gathering."""

    names: tuple[str, ...]
    number: int

    @classmethod
    def of(cls, word: Any) -> Key:
        """What came in a message, which may be plain tuples."""
        match word:
            case (tuple() as names, int() as number) if all(isinstance(name, str) for name in names):
                return cls(names, number)
        raise ProtocolError("a word of a gathering does not say of which")

    def __str__(self) -> str:
        return f"gathering {self.number} of {', '.join(self.names)}"


class Speak(NamedTuple):
    """Send our word to the leader."""

    leader: str


class Tell(NamedTuple):
    """Send all words to these followers; ``confirm`` wants to know what became of each."""

    followers: tuple[str, ...]
    words: dict[str, Any]


class Hurry(NamedTuple):
    """The words are here; wait for the release no longer than a call may take."""


class Failure(NamedTuple):
    """Why a follower gets no words."""

    kind: str
    text: str

    @classmethod
    def of(cls, word: Any) -> Failure:
        """What came in a message, which may be a plain tuple."""
        match word:
            case (str() as kind, str() as text):
                return cls(kind, text)
        raise ProtocolError("the reason why a gathering failed makes no sense")


class Release(NamedTuple):
    """Let a follower go."""

    follower: str
    failure: Failure | None


class Finish(NamedTuple):
    """This worker is through: it returns the words, or raises the error."""

    words: dict[str, Any]
    error: BaseException | None


Action = Speak | Tell | Hurry | Release | Finish


class _Gathering:
    def __init__(self, key: Key) -> None:
        self.key = key
        self.own = ""  # this worker's name, once it has begun
        self.call_seconds = 0.0
        self.words: dict[str, Any] = {}
        self.has_all = False
        self.unconfirmed: set[str] = set()
        self.untold: dict[str, BaseException] = {}

    @property
    def leads(self) -> bool:
        return self.own == self.key.names[0]


class Gatherings:
    """Events go in as method calls; each returns what is to be done for that gathering, in order."""

    def __init__(self) -> None:
        self._begun: dict[tuple[str, ...], int] = {}
        self._open: dict[Key, _Gathering] = {}
        self._failures: dict[tuple[str, ...], tuple[int, str]] = {}  # the last one of each set of workers

    def begin(self, own: str, names: Iterable[str], word: Any, call_seconds: float) -> tuple[Key, list[Action]]:
        """This worker takes part in the next gathering of these workers. A call may take ``call_seconds``."""
        group = tuple(sorted(names))
        number = self._begun.get(group, 0)
        self._begun[group] = number + 1
        key = Key(group, number)
        gathering = self._open.setdefault(key, _Gathering(key))
        gathering.own = own
        gathering.call_seconds = call_seconds
        return key, self.hear(key, own, word) if gathering.leads else [Speak(group[0])]

    def hear(self, key: Key, worker: str, word: Any) -> list[Action]:
        """On the leader: a worker's word has come."""
        gathering = self._open.get(key)
        if gathering is None:
            if key.number < self._begun.get(key.names, 0):
                number, why = self._failures.get(key.names, (-1, ""))
                because = f": {why}" if number == key.number else "."
                raise UsageError(f"{worker} came too late: {key.names[0]} is through with {key}{because}")
            gathering = self._open[key] = _Gathering(key)
        if worker not in key.names or worker in gathering.words:
            raise UsageError(f"{worker} does not belong to {key}, or has spoken already. {_ADVICE}")
        gathering.words[worker] = word
        if len(gathering.words) < len(key.names):
            return []
        gathering.has_all = True
        followers = key.names[1:]
        gathering.unconfirmed = set(followers)
        return [Tell(followers, gathering.words)] if followers else self._finish(gathering)

    def confirm(self, key: Key, follower: str, error: BaseException | None) -> list[Action]:
        """On the leader: a follower has the words, or could not be told."""
        gathering = self._open.get(key)
        if gathering is None or follower not in gathering.unconfirmed:
            return []
        gathering.unconfirmed.remove(follower)
        if error is not None:
            gathering.untold[follower] = error
        return [] if gathering.unconfirmed else self._finish(gathering)

    def be_told(self, key: Key, words: dict[str, Any]) -> list[Action]:
        """On a follower: all have spoken."""
        gathering = self._open.get(key)
        if gathering is None or gathering.has_all:
            return []
        gathering.words, gathering.has_all = words, True
        return [Hurry()]

    def be_released(self, key: Key, failure: Failure | None) -> list[Action]:
        """On a follower: the leader is through."""
        gathering = self._open.get(key)
        if gathering is None:
            return []
        if failure is None or gathering.has_all:
            return self._finish(gathering)
        kind = _KINDS.get(failure.kind, FarpropError)
        return self._finish(gathering, kind(f"{key.names[0]} gave up {key}: {failure.text}"))

    def awaited(self, key: Key) -> set[str]:
        """Those without whom it can't go on. Whoever is to confirm is watched by the call that tells it."""
        gathering = self._open.get(key)
        if gathering is None:
            return set()
        if not gathering.leads:
            return {key.names[0]}
        return set() if gathering.has_all else set(key.names) - set(gathering.words)

    def lose(self, key: Key, worker: str, error: ConnectionLostError) -> list[Action]:
        """A worker can't be reached any more."""
        gathering = self._open.get(key)
        if gathering is None or worker not in self.awaited(key):
            return []
        return self._finish(gathering, None if gathering.has_all else error)

    def run_out(self, key: Key, seconds: float) -> list[Action]:
        """Time is up. It does not end the telling: those calls have a timeout of their own."""
        gathering = self._open.get(key)
        if gathering is None or (gathering.leads and gathering.has_all):
            return []
        if gathering.has_all:
            return self._finish(gathering)
        late = ", ".join(sorted(self.awaited(key)))
        return self._finish(gathering, RpcTimeoutError(f"{late} timed out in _all_gather after {seconds:.2f} seconds."))

    def fail(self, key: Key, error: BaseException) -> list[Action]:
        """This worker can't go on with it."""
        gathering = self._open.get(key)
        return [] if gathering is None else self._finish(gathering, error)

    def _finish(self, gathering: _Gathering, error: BaseException | None = None) -> list[Action]:
        key = gathering.key
        del self._open[key]
        if not gathering.leads:
            return [Finish(gathering.words, error)]
        if error is None and gathering.untold:
            first = next(iter(gathering.untold.values()))
            error = RpcTimeoutError(
                f"Followers {sorted(gathering.untold)} timed out in _all_gather after {gathering.call_seconds:.2f} "
                f"seconds. The first error is {first!r}"
            )
            error.__cause__ = first
        if error is not None:
            self._failures[key.names] = key.number, str(error)
        releases: list[Action] = []
        for name in key.names[1:]:
            if not gathering.has_all and name not in gathering.words:
                continue  # it is refused when it speaks
            reason = error if name in gathering.unconfirmed or not gathering.has_all else gathering.untold.get(name)
            failure = Failure(type(reason).__name__, str(reason) or repr(reason)) if reason else None
            releases.append(Release(name, failure))
        return [*releases, Finish(gathering.words, error)]

    def validate(self) -> None:
        for key, gathering in self._open.items():
            has_begun = key.number < self._begun.get(key.names, 0)
            assert has_begun == bool(gathering.own)
            assert gathering.leads or not gathering.unconfirmed
            if gathering.leads and gathering.has_all:
                assert set(gathering.words) == set(key.names)
                assert gathering.unconfirmed, "all have confirmed, and the leader is not through"
