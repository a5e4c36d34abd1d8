"""What is shown of a job: made of snapshots and of what the workers have done of late, one look after the other.

No sockets, threads or clocks here: whoever looks brings the answers. The live page and ``farprop top`` show the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from farprop.dashboard.rates import Rate, Rates
from farprop.dashboard.task_stream import StreamPart, stream_part
from farprop.inspect.job import CallRow, Job
from farprop.protocol import waits
from farprop.protocol.call_stats import CLIENT, SERVER
from farprop.protocol.events import MOST_MESSAGE, OK, ClientCall, ServedCall, Span
from farprop.protocol.foreign_text import one_line
from farprop.protocol.inspection import Answer, Member, Recent, Silence
from farprop.runtime.process_state import UNRESPONSIVE

OLD_SECONDS = 1.0
"""A call that is older has a sentence that says why."""
_MOST_CALLS = 50
_MOST_REASONS = 20
_MOST_FUNCTIONS = 100
_MOST_REFERENCES = 40
_MOST_ERRORS = 100
_MOST_PASSES = 50
_MOST_KNOWN = 4096
_MOST_GONE = 16
_MOST_MISSED = 3
_MOST_TEXT = 500  # characters of a name or a sentence

ErrorKind = tuple[str, str, str, str]  # function, caller, callee, and type of the exception


@dataclass(frozen=True)
class WorkerCard:
    """A worker."""

    name: str
    rank: int
    host: str
    pid: int
    doing: str
    silent: str = ""
    """Why it says nothing; empty if it answers."""
    started: float = 0.0
    threads_busy: int = 0
    thread_limit: int = 0
    running: int = 0
    queued: int = 0
    awaited: int = 0
    memory_bytes: int = 0
    shared_bytes: int = 0
    served: Rate | None = None
    made: Rate | None = None


@dataclass(frozen=True)
class Pair:
    """Who calls whom."""

    caller: str
    callee: str
    rate: Rate


@dataclass(frozen=True)
class FunctionRow:
    function: str
    rate: Rate


@dataclass(frozen=True)
class OpenCall:
    """A call without an answer."""

    id: str
    function: str
    caller: str
    callee: str
    state: str
    seconds: float | None
    left: float | None
    place: str
    part_of: str
    """The call at the beginning of the chain; empty if that is this one."""
    why: str


@dataclass(frozen=True)
class HeldValue:
    """A value that references lead to."""

    owner: str
    id: str
    type: str
    nbytes: int
    state: str
    holders: int
    made_by: str
    created_at: str
    seconds: float


@dataclass(frozen=True)
class OwnerRow:
    """The values of one owner."""

    owner: str
    values: int
    nbytes: int


@dataclass(frozen=True)
class PassPart:
    worker: str
    runs: bool
    missing: int
    waits_for: list[str]


@dataclass(frozen=True)
class PassRow:
    """A backward pass, and what each worker does for it."""

    context: int
    origin: str
    number: int
    mode: str
    seconds: float | None
    parts: list[PassPart]


@dataclass(frozen=True)
class ErrorRow:
    """Calls of one function between two workers that failed in the same way."""

    time: float
    """Of the last one."""
    function: str
    caller: str
    callee: str
    type: str
    seconds: float
    """How long the last one took."""
    message: str
    """What the last one said. Empty if nobody tells."""
    count: int = 1


@dataclass(frozen=True)
class State:
    """All that is shown of a job but the task stream."""

    id: str
    name: str
    time: float
    ended: bool
    workers: list[WorkerCard] = field(default_factory=list)
    all: Rate = field(default_factory=Rate)
    pairs: list[Pair] = field(default_factory=list)
    functions: list[FunctionRow] = field(default_factory=list)
    calls: list[OpenCall] = field(default_factory=list)
    more_calls: int = 0
    references: list[HeldValue] = field(default_factory=list)
    owners: list[OwnerRow] = field(default_factory=list)
    passes: list[PassRow] = field(default_factory=list)
    errors: list[ErrorRow] = field(default_factory=list)


@dataclass(frozen=True)
class WorkerSample:
    """A point of a worker's charts."""

    worker: str
    served: float | None
    made: float | None


@dataclass(frozen=True)
class Part:
    """What one look adds to what is drawn over time."""

    time: float
    workers: list[WorkerSample]
    p50: float | None
    p99: float | None
    calls: float
    stream: StreamPart


class Picture:
    """What is known of one job from one look to the next."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.cursors: dict[str, int] = {}
        """For the next question about recent events."""
        self._rates = Rates()
        self._missed: dict[str, int] = {}
        self._cards_before: dict[str, WorkerCard] = {}
        self._late: dict[str, int] = {}
        self._members: dict[str, Member] = {}
        self._gone: dict[str, str] = {}
        self._errors: dict[ErrorKind, ErrorRow] = {}
        self._known_errors: dict[tuple[str, str, int], ErrorKind] = {}

    def look(self, job: Job, told: dict[str, Recent | Silence], now: float) -> Part:
        """Take in what the workers said. The new picture is ``state``.

        Args:
            job: the snapshots.
            told: by worker, what it has done since the last look.
            now: the time of day.

        Returns:
            What is new since the last look, for drawings over time.
        """
        recent = [one for one in told.values() if isinstance(one, Recent)]
        for one in recent:
            self.cursors[one.name] = one.cursor
            self._rates.add(one)
        self._forget_silent(job, told)
        self._note_errors(recent)
        cards = self._cards(job)
        everything = job.calls
        self.state = State(
            id=job.id,
            name=job.name,
            time=now,
            ended=False,
            workers=cards,
            all=self._rates.of_job(),
            pairs=[Pair(*pair, rate) for pair, rate in sorted(self._rates.by_pair().items())],
            functions=_functions(self._rates.by_function()),
            calls=_open_calls(job, everything),
            more_calls=max(0, len(everything) - _MOST_CALLS),
            references=_references(job),
            owners=_owners(job),
            passes=_passes(job),
            errors=sorted(self._errors.values(), key=lambda row: -row.time),
        )
        whole = self._rates.of_job(last_only=True)
        main_threads = {one.name: one.main.native_id for one in job.snapshots if one.main is not None}
        return Part(
            now,
            [self._sample(card.name) for card in cards if not card.silent],
            whole.p50,
            whole.p99,
            whole.calls,
            stream_part(recent, main_threads, now),
        )

    def _forget_silent(self, job: Job, told: dict[str, Recent | Silence]) -> None:
        """A worker that says nothing for long has no rates. One answer that came too late is forgiven."""
        answered = {name for name, one in told.items() if isinstance(one, Recent)}
        self._missed = {name: 0 if name in answered else self._missed.get(name, 0) + 1 for name in job.answers}
        self._rates.keep(name for name, missed in self._missed.items() if missed < _MOST_MISSED)

    def end(self) -> None:
        """The job has ended: what was seen last stays."""
        if self.state is not None:
            self.state = replace(self.state, ended=True)

    def _sample(self, worker: str) -> WorkerSample:
        served = self._rates.of_worker(worker, SERVER, last_only=True)
        made = self._rates.of_worker(worker, CLIENT, last_only=True)
        return WorkerSample(worker, served.calls if served else None, made.calls if made else None)

    def _cards(self, job: Job) -> list[WorkerCard]:
        cards = []
        for answer in job.workers:
            self._members[answer.name] = answer.member
            self._gone.pop(answer.name, None)
            cards.append(self._card(answer))
        # A worker that others have forgotten was there a moment ago: it does not vanish without a word.
        for name in self._members.keys() - job.answers.keys():
            self._gone.setdefault(name, "has left the job, or has died")
        for name in list(self._gone)[:-_MOST_GONE]:
            del self._gone[name], self._members[name]
            self._cards_before.pop(name, None)
            self._late.pop(name, None)
        cards += [self._card(Silence(self._members[name], reason)) for name, reason in self._gone.items()]
        return sorted(cards, key=lambda card: (card.rank, card.name))

    def _card(self, answer: Answer) -> WorkerCard:
        member = answer.member
        card = WorkerCard(answer.name, member.rank, member.host, member.pid, _text(waits.brief(answer)))
        if isinstance(answer, Silence):
            late = self._late[answer.name] = self._late.get(answer.name, 0) + 1
            before = self._cards_before.get(answer.name)
            # On a busy host an answer may be late. Somebody who looks at a page should not be alarmed by one.
            if before is not None and answer.reason.endswith(UNRESPONSIVE) and late < _MOST_MISSED:
                return before
            return replace(card, silent=answer.reason)
        self._late.pop(answer.name, None)
        card = self._cards_before[answer.name] = replace(
            card,
            started=answer.started,
            threads_busy=answer.threads_busy,
            thread_limit=answer.thread_limit,
            running=sum(call.state in ("running", "unfinished") and not call.system for call in answer.served),
            queued=answer.queued,
            awaited=sum(not call.system for call in answer.awaited),
            memory_bytes=answer.memory_bytes,
            shared_bytes=answer.shared_bytes,
            served=self._rates.of_worker(answer.name, SERVER),
            made=self._rates.of_worker(answer.name, CLIENT),
        )
        return card

    # Errors

    def _note_errors(self, recent: list[Recent]) -> None:
        """Both ends of a call tell of its error. The one that tells first is believed, and the other one if only that
        one has a message.
        """
        for one in recent:
            to_wall = one.wall - one.now
            for event in one.events:
                if not isinstance(event, Span) and event.outcome != OK:
                    self._note_error(one.name, event, to_wall)
        for oldest in list(self._errors)[:-_MOST_ERRORS]:
            del self._errors[oldest]
        for known in list(self._known_errors)[:-_MOST_KNOWN]:
            del self._known_errors[known]

    def _note_error(self, worker: str, event: ClientCall | ServedCall, to_wall: float) -> None:
        if isinstance(event, ClientCall):
            caller, callee, began = worker, event.callee, event.began
        else:
            caller, callee, began = event.caller, worker, event.arrived
        message = one_line(event.message, MOST_MESSAGE)
        call = caller, callee, event.number
        kind = self._known_errors.get(call)
        if kind is not None:
            known = self._errors.get(kind)
            if known is not None and not known.message:
                self._errors[kind] = replace(known, message=message)
            return
        function, type_name = _text(event.function), _text(event.outcome)
        kind = self._known_errors[call] = function, caller, callee, type_name
        before = self._errors.pop(kind, None)
        count = 1 if before is None else before.count + 1
        when, seconds = event.ended + to_wall, event.ended - began
        self._errors[kind] = ErrorRow(when, function, caller, callee, type_name, seconds, message, count)


def _text(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"


def _functions(rates: dict[str, Rate]) -> list[FunctionRow]:
    """Those that are called most often first."""
    rows = [FunctionRow(_text(function), rate) for function, rate in rates.items()]
    rows.sort(key=lambda row: (-row.rate.calls, -row.rate.total, row.function))
    return rows[:_MOST_FUNCTIONS]


def _open_calls(job: Job, rows: list[CallRow]) -> list[OpenCall]:
    reasons = _reasons(job)
    return [
        OpenCall(
            row.id,
            _text(row.function),
            row.caller,
            row.callee,
            row.state,
            row.seconds,
            row.left,
            row.place,
            "" if row.root == row.id else row.root,
            reasons.get(row.id, ""),
        )
        for row in rows[:_MOST_CALLS]
    ]


def _reasons(job: Job) -> dict[str, str]:
    """By call, why the oldest calls that no other call has made have no answer."""
    old = [
        call
        for snapshot in job.snapshots
        for call in snapshot.awaited
        if call.parent is None and not call.system and call.seconds >= OLD_SECONDS
    ]
    old.sort(key=lambda call: -call.seconds)

    def ask(worker: str) -> Answer:
        return job.answers.get(worker) or Silence(Member(worker, -1, "", 0, ""), "is not a worker of this job any more")

    return {str(call.id): _text(waits.explain(call, ask).sentence) for call in old[:_MOST_REASONS]}


def _references(job: Job) -> list[HeldValue]:
    owned = [found for _, found in job.references if found.role == "owner"]
    return [
        HeldValue(
            found.owner,
            found.id,
            _text(found.type),
            found.nbytes,
            found.state,
            len(found.holders),
            _text(found.made_by),
            _text(found.created_at),
            found.seconds,
        )
        for found in owned[:_MOST_REFERENCES]
    ]


def _owners(job: Job) -> list[OwnerRow]:
    counts: dict[str, tuple[int, int]] = {}
    for _, found in job.references:
        if found.role == "owner":
            values, nbytes = counts.get(found.owner, (0, 0))
            counts[found.owner] = values + 1, nbytes + found.nbytes
    rows = [OwnerRow(owner, values, nbytes) for owner, (values, nbytes) in counts.items()]
    return sorted(rows, key=lambda row: -row.nbytes)


def _passes(job: Job) -> list[PassRow]:
    found: dict[tuple[int, str, int], PassRow] = {}
    for worker, one in job.passes:
        key = one.context, one.origin, one.number
        row = found.get(key) or PassRow(*key, one.mode, None, [])
        row.parts.append(PassPart(worker, one.runs, one.missing, [str(call) for call in one.waits_for[:5]]))
        found[key] = row if one.seconds is None else replace(row, seconds=one.seconds)
    return sorted(found.values(), key=lambda row: -(row.seconds or 0.0))[:_MOST_PASSES]
