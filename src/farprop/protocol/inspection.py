"""What a worker says about itself when it is asked: plain data, which travels as JSON.

A call is known by the same id at both of its ends: who calls whom, and the number that the caller's connection gave it.
So who waits for whom can be followed from worker to worker, although no message carries an id for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from farprop.errors import ProtocolError
from farprop.protocol.call_stats import CallStat
from farprop.protocol.events import Event
from farprop.protocol.json_decoding import decode

_T = TypeVar("_T")

# How much a question asks for. The last ones ask for something else: the graph of an autograd context, and what the
# worker has done since an earlier question.
CALLS, STATE, STACKS, GRAPH, RECENT = range(5)

RUNNING, QUEUED, HELD, UNFINISHED = "running", "queued", "held", "unfinished"


@dataclass(frozen=True)
class CallId:
    """The id of a call, the same at the caller and at the callee."""

    caller: str
    callee: str
    number: int

    def __str__(self) -> str:
        return f"{self.caller}>{self.callee}#{self.number}"


@dataclass(frozen=True)
class Frame:
    """A line of the program that a thread is at."""

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"


@dataclass(frozen=True)
class AwaitedCall:
    """A call of this worker that has no answer yet."""

    id: CallId
    function: str
    seconds: float
    left: float | None
    """The seconds until its deadline; None if it has none."""
    thread: str
    """The thread that made it, or waits for it."""
    is_waited_for: bool
    """Whether a thread waits for it now. Nobody may wait for an asynchronous call yet."""
    context: int | None
    """The autograd context that it was made in."""
    parent: CallId | None
    """The call that this worker was running when it made this one."""
    system: bool = False


@dataclass(frozen=True)
class ServedCall:
    """A call of another worker, or of this one, that this worker has not answered yet."""

    id: CallId
    function: str
    state: str
    """``running``; ``queued`` until a thread is free; ``held`` back by a barrier, or because its caller reads no
    answers; ``unfinished``: the function has returned, and what it returned is not done."""
    seconds: float | None
    """Since when it runs or, while it is queued, since it arrived; None if that is not known here."""
    left: float | None
    thread: str = ""
    context: int | None = None
    place: Frame | None = None
    """Where its thread is now, in the program's own code."""
    computes: bool | None = None
    """Whether its thread uses the processor, and does not sleep; None if that is not known."""
    waits_for: list[CallId] = field(default_factory=list)
    value_of: CallId | None = None
    """The call that makes the value which it waits for."""
    system: bool = False


@dataclass(frozen=True)
class Reference:
    """A reference of this worker: to a value of its own (``owner``), or to one of another worker (``user``)."""

    id: str
    role: str
    owner: str
    state: str
    type: str
    nbytes: int
    holders: list[str]
    made_by: str
    created_at: str
    seconds: float


@dataclass(frozen=True)
class Pass:
    """A backward pass that this worker takes part in."""

    context: int
    origin: str
    number: int
    mode: str
    runs: bool
    missing: int
    """The messages whose gradients have not arrived here."""
    partners: list[str]
    """The workers that gradients were exchanged with."""
    waits_for: list[CallId]
    seconds: float | None
    """Since when it runs; known where it was started."""


@dataclass(frozen=True)
class ConnectionState:
    """A connection of a worker."""

    peer: str
    dialled: bool
    """Whether this worker dialled it: then it carries this worker's calls, else those of the peer."""
    calls: int
    """Calls without an answer."""
    outbox_bytes: int
    """Bytes that the kernel has not taken yet."""


@dataclass(frozen=True)
class Thread:
    """A thread that works or waits."""

    name: str
    native_id: int
    computes: bool | None
    serves: CallId | None
    waits_for: CallId | None
    place: Frame | None
    frames: list[Frame]
    """The innermost first. Empty unless stacks were asked for."""


@dataclass(frozen=True)
class Member:
    """A worker of the job, as another one knows it."""

    name: str
    rank: int
    host: str
    pid: int
    net: str


@dataclass(frozen=True)
class Snapshot:
    """What a worker does at one moment."""

    member: Member
    job: str
    discreet: bool
    """Whether it leaves out what workers of a restricted job don't tell each other."""
    started: float
    """When it was started, by the time of day."""
    thread_limit: int
    threads_busy: int
    idle: bool
    awaited: list[AwaitedCall]
    served: list[ServedCall]
    queued: int
    """All of the queue. ``served`` has its first calls only."""
    main: Thread | None = None
    barrier: list[str] = field(default_factory=list)
    """The workers that a barrier or ``shutdown`` on this one waits for."""
    shutting_down: float | None = None
    """Since when ``shutdown`` runs, in seconds."""
    members: list[Member] = field(default_factory=list)
    threads: list[Thread] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    connections: list[ConnectionState] = field(default_factory=list)
    memory_bytes: int = 0
    shared_bytes: int = 0
    """Shared memory that this worker has made: lent to others, or kept for the next message."""

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.member.name

    def served_call(self, call: CallId) -> ServedCall | None:
        """Find a call that this worker serves.

        Args:
            call: its id.

        Returns:
            The call; None if the worker does not have it.
        """
        return next((served for served in self.served if served.id == call), None)

    def awaited_call(self, call: CallId) -> AwaitedCall | None:
        """Find a call that this worker waits for.

        Args:
            call: its id.

        Returns:
            The call; None if the worker does not wait for it.
        """
        return next((awaited for awaited in self.awaited if awaited.id == call), None)


@dataclass(frozen=True)
class GraphSend:
    """A message of an autograd context, and the local graph behind its tensors."""

    message_id: int
    tensors: int
    nodes: int
    leaves: int
    receives: list[int]
    """The messages that the graph leads to."""
    nbytes: int | None = None
    """The bytes of its tensors that require grad, if somebody listened to events when it was sent."""
    sent: float | None = None
    """When it was encoded, by this worker's clock."""


@dataclass(frozen=True)
class GraphPart:
    """One worker's part of an autograd context."""

    worker: str
    nodes: int
    """All nodes behind its messages; a node behind two of them counts once."""
    leaves: int
    sends: list[GraphSend]
    received: dict[str, list[int]]
    """By worker, the messages that came from it."""
    gradients: int
    """How many leaves have a gradient in this context."""
    arrived: dict[int, float] = field(default_factory=dict)
    """When messages had arrived and were decoded, by this worker's clock, if somebody listened to events."""
    now: float = 0.0
    """This worker's clock when it said this."""
    clock_ahead: float = 0.0
    """By how much its clock is ahead of that of the worker which asked. That one fills it in, as it does the next."""
    clock_error: float = 0.0
    """How wrong that may be."""


@dataclass(frozen=True)
class Silence:
    """A worker that did not answer the question, and why, as far as the one that asked knows."""

    member: Member
    reason: str

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.member.name


Answer = Snapshot | Silence


@dataclass(frozen=True)
class Recent:
    """What a worker has done since an earlier question."""

    member: Member
    now: float
    """Its monotonic clock, whose times events have."""
    wall: float
    """The same moment by the time of day."""
    since: float
    """When it began to listen: ``stats`` count from then."""
    cursor: int
    """For the next question."""
    missing: int
    """Events that were dropped before somebody asked."""
    events: list[Event]
    """The newest, in the order in which they ended. Farprop's own calls are left out."""
    stats: list[CallStat]

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.member.name


def to_json(value: object) -> bytes:
    return msgspec.json.encode(value)


def from_json(data: bytes, kind: type[_T]) -> _T:
    """Parse what another worker said; raises ``ProtocolError`` if it makes no sense."""
    try:
        return decode(data, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"what a worker says about itself makes no sense: {error}") from error


def roots(answers: dict[str, Answer]) -> dict[CallId, CallId]:
    """For each call, the call at the beginning of the chain that it is part of; itself if no other call made it."""
    parents = {
        awaited.id: awaited.parent
        for answer in answers.values()
        if isinstance(answer, Snapshot)
        for awaited in answer.awaited
    }

    def line(call: CallId) -> Iterator[CallId]:
        seen: set[CallId] = set()
        while call not in seen:
            seen.add(call)
            yield call
            parent = parents.get(call)
            if parent is not None:
                call = parent

    served = [call.id for answer in answers.values() if isinstance(answer, Snapshot) for call in answer.served]
    return {call: list(line(call))[-1] for call in [*parents, *served]}


# From outside of the job

CHANNEL = b"inspect"  # the channel of the handshake
OBSERVER = b"observer"  # the identity of who asks
LENGTH = 8  # bytes in front of a question or a reply, little-endian
MAX_QUESTION = 1 << 20
MAX_REPLY = 1 << 30


@dataclass(frozen=True)
class JobFile:
    """What a worker writes about itself for those who look into the job from outside, in a file of its user's alone."""

    job: str
    name: str
    """The name of the job: ``FARPROP_JOB_NAME``, or the first characters of ``job``."""
    member: Member
    identity: str
    socket: str
    """The name of the abstract Unix socket on which it answers questions."""
    key: str
    """Proves to the worker that who asks has read this file. It opens nothing else."""


@dataclass(frozen=True)
class Question:
    detail: int
    others: list[str] = field(default_factory=list)
    """The workers that it shall ask in turn; empty if it is asked about itself."""
    cursors: dict[str, int] = field(default_factory=dict)
    """For ``RECENT``, by worker: since when."""
    record: bytes = b""
    """Instead of all this: a command about a recording (``protocol/recording.py``), packed. So is the reply."""


@dataclass(frozen=True)
class Reply:
    snapshots: list[Snapshot]
    silent: list[Silence]
    recent: list[Recent] = field(default_factory=list)

    @property
    def answers(self) -> dict[str, Answer]:
        answers: list[Answer] = [*self.snapshots, *self.silent]
        return {answer.name: answer for answer in answers}

    @property
    def recent_answers(self) -> dict[str, Recent | Silence]:
        """The same for ``RECENT``."""
        answers: list[Recent | Silence] = [*self.recent, *self.silent]
        return {answer.name: answer for answer in answers}

    @classmethod
    def of(cls, answers: Iterable[Answer | Recent]) -> Reply:
        answers = list(answers)
        return cls(
            [answer for answer in answers if isinstance(answer, Snapshot)],
            [answer for answer in answers if isinstance(answer, Silence)],
            [answer for answer in answers if isinstance(answer, Recent)],
        )
