"""The roster of a job: the entry that each worker publishes about itself, and rank 0's decision on all entries.

Entries travel as signed JSON through the store (``protocol/signing.py``). Rules that hold here:

- Rank 0 checks all entries and publishes one decision, so that every worker sees the same roster or the same error.
- Any text yields a value, or raises ``RendezvousError``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from farprop.errors import ProtocolError, RendezvousError, UsageError
from farprop.ids import WorkerInfo, check_worker_name
from farprop.protocol.json_decoding import decode

_Text = Annotated[str, msgspec.Meta(max_length=1024)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Port = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_T = TypeVar("_T")


class Identity(NamedTuple):
    """A worker's identity in a handshake, and the largest message that it accepts."""

    name: str
    rank: int
    instance: str
    max_message_bytes: int

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Parse authenticated bytes; raises ``ProtocolError`` if they are malformed."""
        try:
            identity = decode(data, cls)
            check_worker_name(identity.name)
        except (msgspec.MsgspecError, ValueError, RecursionError, UsageError) as error:
            raise ProtocolError(f"a peer's identity makes no sense: {error}") from error
        return identity

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, self.rank)


@dataclass(frozen=True)
class Entry:
    """One worker: its name and rank, where it listens, and how it authenticates."""

    name: str
    rank: _Count
    world_size: _Count  # 0 in a group that workers join and leave
    instance: _Text  # random; distinguishes a process from a later one with the same name
    tcp: tuple[_Text, _Port]
    unix: _Text  # abstract socket name, or "" when it listens on TCP alone
    net: _Text  # network namespace in which the abstract name is known
    host: _Text  # for error texts
    pid: int  # for error texts
    own_secret: bool  # made by the workers of one host, not given by FARPROP_SECRET
    tls: bool = True  # whether its TCP connections are encrypted
    max_message_bytes: int = 1 << 34  # the largest message that it accepts
    # By callee, from devices of this worker to devices of the callee: {"w1": {"cuda:0": "cuda:1"}}
    device_maps: dict[_Text, dict[_Text, _Text]] = field(default_factory=dict)
    devices: list[_Text] = field(default_factory=list)  # devices that it uses in calls; empty if not given
    cuda_devices: _Count = 0
    restricted: bool = False  # calls exposed functions only, with data only

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.rank, self.instance, self.max_message_bytes)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Entry:
        entry = _decoded(text, cls, "a worker's entry")
        _check_name(entry)
        return entry


@dataclass(frozen=True)
class _Decision:
    problem: str | None
    workers: list[Entry]


def _decoded(text: str | bytes, kind: type[_T], what: str) -> _T:
    try:
        return decode(text, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RendezvousError(
            f"The store holds something else where {what} should be ({error}). Do all workers run the same farprop, "
            "and is the store used by this job alone?"
        ) from error


def _check_name(entry: Entry) -> None:
    try:
        check_worker_name(entry.name)
    except UsageError as error:
        raise RendezvousError(f"The store holds a worker's entry with a bad name: {error}") from error


def check_roster(entries: Sequence[Entry]) -> str | None:
    """Return why these workers can't be one job, with advice; None if they can."""
    for name, times in Counter(entry.name for entry in entries).items():
        if times > 1:
            where = ", ".join(f"rank {e.rank} on {e.host}" for e in entries if e.name == name)
            return f"Worker name {name!r} is not unique: {where} use it. Give each worker its own name in init_rpc."
    sizes = {entry.world_size for entry in entries}
    if len(sizes) > 1:
        said = ", ".join(f"{e.name} says {e.world_size}" for e in entries)
        return f"The workers do not agree on world_size: {said}. Pass the same world_size everywhere."
    plain = [entry.name for entry in entries if not entry.tls]
    if plain and len(plain) < len(entries):
        return (
            f"FARPROP_TLS=0 is set on {', '.join(plain)} and not on the other workers, so they can't talk to each "
            "other. Set it on all of them or on none."
        )
    return _check_modes(entries)


def different_secrets(own: Entry, text: bytes, where: str) -> str:
    """The error for an entry that is signed with another secret. ``text`` is not trusted: it only helps to explain."""
    try:
        other = Entry.from_json(text)
    except RendezvousError:
        return (
            f"{where!r} in the store is not signed with this job's secret: it was altered, or somebody else wrote it. "
            "Only the workers of the job should be able to reach the store."
        )
    first, second = sorted((own, other), key=lambda entry: entry.rank)
    if own.own_secret and other.own_secret:
        return (
            f"{first.name} ({first.host}) and {second.name} ({second.host}) share no secret: they are on different "
            "hosts, belong to different users, or one is left from an earlier start that used the same store. Set "
            "FARPROP_SECRET to the same long random text on every worker (for example the output of: python -c "
            '"import secrets; print(secrets.token_hex(32))"), or FARPROP_SECRET_FILE to a file that holds it. '
            "FARPROP_INSECURE=1 lets anyone who can reach the workers run code on them."
        )
    without = [e.name for e in (first, second) if e.own_secret]
    if without:
        return f"{without[0]} has no FARPROP_SECRET while other workers have one. Set the same on every worker."
    return (
        f"{first.name} and {second.name} have different secrets, or somebody else has written to the store. Set "
        "FARPROP_SECRET (or FARPROP_SECRET_FILE, or FARPROP_INSECURE) to the same on every worker."
    )


def _check_modes(entries: Sequence[Entry]) -> str | None:
    restricted = [entry.name for entry in entries if entry.restricted]
    others = [entry.name for entry in entries if not entry.restricted]
    if not restricted or not others:
        return None
    return (
        f"{restricted[0]} is in restricted mode, and {others[0]} is not: they could not read each other's messages. "
        "Give restricted=True to init_rpc on every worker, or set FARPROP_RESTRICTED=1 for all of them; or for none."
    )


def decision_to_json(entries: Sequence[Entry], problem: str | None) -> str:
    return msgspec.json.encode(_Decision(problem, [] if problem else list(entries))).decode()


def decision_from_json(text: str | bytes) -> list[Entry]:
    """Parse rank 0's decision; returns the roster, or raises ``RendezvousError`` with rank 0's reason."""
    decision = _decoded(text, _Decision, "rank 0's roster")
    if decision.problem:
        raise RendezvousError(decision.problem)
    for entry in decision.workers:
        _check_name(entry)
    return decision.workers
