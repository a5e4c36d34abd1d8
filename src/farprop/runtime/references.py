"""This worker's references: the protocol's machine with a lock around it and the network behind it.

Rules that hold here:

- The machine is touched only under ``_lock``; nothing of a user's runs under it (values are let go of outside).
- A finaliser only notes the reference and nudges the loop. Everything else happens on the loop's alarm.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from farprop.errors import (
    ConnectionLostError,
    FarpropError,
    ProtocolError,
    ReferenceLostError,
    UsageError,
    renewed,
    without_frames,
)
from farprop.ids import GlobalId, unguessable
from farprop.protocol.references.machine import References
from farprop.protocol.references.messages import (
    Batch,
    Fork,
    Kind,
    Reply,
    pack_forks,
    unpack_forks,
    unpack_operations,
    unpack_site,
)
from farprop.protocol.references.records import Effect, Happening, OwnedValue, UserReference
from farprop.protocol.references.states import USABLE, User, Value
from farprop.runtime.batches import COMPANY_SECONDS, Batches, Courier
from farprop.runtime.cells import Cell
from farprop.runtime.links import was_sent
from farprop.wire.codec import Encoded
from farprop.wire.frames import FORKS, REMOTE, Frame

_DROPPABLE = frozenset({User.CREATING, User.ARRIVED, User.CONFIRMED, User.DOUBTFUL, User.VOID})
_GIVING_UP = frozenset({Kind.RECALL, Kind.FORGO, Kind.DELETE})
_ID_BITS = 63
_REMEMBERED = 1000  # far more than requests of one worker that are read and not run yet
_get_ident = threading.get_ident
_R = TypeVar("_R")


class Held:
    """What the program holds of a value of another worker. When it is collected, the reference is dropped."""

    __slots__ = ("_space", "record")

    def __init__(self, space: ReferenceSpace, record: UserReference) -> None:
        self._space = space
        self.record = record

    def check(self, use: str) -> None:
        """Raise what is wrong with the reference, if anything is; ``use`` says what is about to be done with it."""
        self._space.check_usable(self.record, use)

    def __del__(self) -> None:
        self._space.drop_soon(self.record)


class Trail:
    """What the runtime knows of a user's reference, beside the protocol."""

    __slots__ = ("error", "site", "waiting")

    def __init__(self, site: str = "") -> None:
        self.site = site
        self.error: Exception | None = None
        self.waiting: list[Callable[[], None]] | None = None


class Arrivals:
    """What came in front of a message's pickle."""

    __slots__ = ("creation", "items")

    def __init__(self, creation: OwnedValue | None, items: list[Held | OwnedValue]) -> None:
        self.creation = creation
        self.items = items


class ReferenceSpace:
    """See the module's rules."""

    def __init__(
        self, me: int, worker: str, courier: Courier, on_context_ended: Callable[[GlobalId, int], None]
    ) -> None:
        self.me = me
        self._on_context_ended = on_context_ended
        self._worker = worker
        self._courier = courier
        # In a restricted job a value can be reached by those alone who were given a reference to it.
        self._machine = References(me, unguessable(_ID_BITS) if courier.dialect.restricted else None)
        self._batches = Batches(courier, self._outgoing, self._replied)
        self._lock = threading.Lock()
        self._inside = 0  # the thread that is at the machine
        self._effects: deque[Effect] = deque()
        self._freed: deque[OwnedValue] = deque()
        self._letting_go = False
        self._drops: deque[UserReference] = deque()
        self._nudged = False
        self._early: dict[GlobalId, Cell] = {}  # values that were asked for before the call that makes them came
        self._given_up: dict[GlobalId, None] = {}  # those that were given up last, in order
        self._own_calls: dict[GlobalId, OwnedValue] = {}  # values that calls to ourselves will make
        self._instances: dict[int, str] = {}
        self._closed = False

    def _do(self, action: Callable[..., _R], *args: Any) -> _R:
        """One step of the machine, and what follows from it."""
        if not self._lock.acquire(False):
            self._wait_for_lock()
        self._inside = _get_ident()
        try:
            result = action(*args)
            effects = self._machine.effects
            if effects:
                self._effects.extend(effects)
                effects.clear()
        finally:
            self._inside = 0
            self._lock.release()
        if self._effects:
            self._perform()
        return result

    def _wait_for_lock(self) -> None:
        if self._inside == _get_ident():
            raise UsageError(
                "A finaliser made a call while its thread was inside farprop. Don't make calls in __del__: note "
                "what is to be done, and do it elsewhere."
            )
        self._lock.acquire()

    def _perform(self) -> None:
        """Do what the machine wants done, whoever asked it. What an interrupt leaves undone waits for the next."""
        while self._effects:
            try:
                effect = self._effects.popleft()
            except IndexError:
                return  # another thread was faster
            try:
                self._do_effect(effect)
            except BaseException:
                self._effects.appendleft(effect)
                self._courier.nudge(time.monotonic())
                raise

    def _do_effect(self, effect: Effect) -> None:
        happening, subject = effect
        if happening is Happening.SEND:
            self._batches.send(subject)
        elif happening is Happening.SEND_LATER:
            self._batches.send_later(subject)
        elif happening is Happening.BROKEN:
            with self._lock:
                cell = self._cell(subject)
            cell.fail(self._never_made(subject.rref))
        elif happening is Happening.SETTLED:
            self._settle(subject)
        elif happening is Happening.FREED:
            # What a finaliser does is the user's business: it runs on a thread where that may take its time.
            self._freed.append(subject)
            if not self._letting_go:
                self._letting_go = True
                try:
                    self._courier.submit(self._let_go)
                except BaseException:
                    self._letting_go = False
                    raise

    def _let_go(self) -> None:
        self._letting_go = False  # before the look: what comes after it has somebody else come
        try:
            while self._freed:
                self._freed.popleft()
        except IndexError:
            pass  # another thread was faster

    def _settle(self, record: UserReference) -> None:
        """A reference is confirmed or void: those who waited for that go on."""
        trail = record.cell
        if trail is not None and trail.waiting:
            with self._lock:
                waiting, trail.waiting = trail.waiting, None
            for callback in waiting or ():
                callback()

    # References of this program

    def create(self, owner: int, site: str) -> UserReference:
        record = self._do(self._machine.create, owner)
        record.cell = Trail(site)
        return record

    def created(self, record: UserReference) -> None:
        self._do(self._machine.made, record)

    def creation_failed(self, record: UserReference, error: Exception) -> None:
        record.cell.error = creation_error(self._courier.name_of_rank(record.owner), error)
        if was_sent(error):
            self._do(self._machine.unanswered, record, isinstance(error, ConnectionLostError))
        else:
            self._do(self._machine.unsent, record)

    def abandon(self, subject: UserReference | OwnedValue, sent: bool) -> None:
        """``remote()`` raises: the program never gets the reference. ``sent``: the call may be out."""
        if isinstance(subject, OwnedValue):
            self.own_call_ended(subject)
            return

        def give_up() -> None:
            if sent:
                self._machine.unanswered(subject, lost=True)
            else:
                self._machine.unsent(subject)
            self._machine.drop(subject)

        self._do(give_up)

    def own(self, cell: Cell) -> OwnedValue:
        value = self._do(self._machine.own)
        value.cell = cell
        return value

    def own_call(self, value: OwnedValue) -> Fork:
        """A call to ourselves is about to make this value."""
        fork = self._do(self._machine.new_id)
        self._own_calls[value.rref] = value
        return Fork(self.me, value.rref, fork, exists=False)

    def own_call_ended(self, value: OwnedValue) -> None:
        self._own_calls.pop(value.rref, None)

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Run something on a thread of the pool."""
        self._courier.submit(function, *args)

    def hold(self, record: UserReference) -> Held:
        return Held(self, record)

    def drop_soon(self, record: UserReference) -> None:
        """Called by the garbage collector, at any moment and in any thread."""
        self._drops.append(record)
        if not self._nudged:
            self._nudged = True
            self._courier.nudge(time.monotonic() + COMPANY_SECONDS)

    def _drop_noted(self) -> None:
        def drop() -> None:
            for _ in range(len(self._drops)):
                record = self._drops.popleft()
                if record.state in _DROPPABLE:
                    self._machine.drop(record)

        self._do(drop)

    def drop_all(self) -> None:
        """The job ends: every reference is dropped, whether the program can reach it or not."""

        def drop() -> None:
            for record in list(self._machine.users.values()):
                if record.state in _DROPPABLE:
                    self._machine.drop(record)

        self._do(drop)

    def check_usable(self, record: UserReference, use: str) -> None:
        """Raise what is wrong with a reference that is about to be used."""
        if record.state in USABLE:
            return
        owner = self._courier.name_of_rank(record.owner)
        if record.state not in (User.DOUBTFUL, User.VOID):
            raise UsageError(f"{describe(record)} has been deleted. Cannot call {use} after deletion.")
        if record.owner in self._machine.dead:
            raise ReferenceLostError(f"{owner}, which owned {describe(record)}, has died: the value is lost.")
        if record.cell.error is not None:
            raise renewed(record.cell.error)
        raise ReferenceLostError(
            f"{describe(record)} is of no use: {owner} does not have the value any more, because a worker that held "
            "it for this one died, or the message that brought it was given up as lost."
        )

    def _never_made(self, rref: GlobalId) -> ReferenceLostError:
        creator = self._courier.name_of_rank(rref.created_on)
        return ReferenceLostError(
            f"RRef {rref} was never made on {self._worker}: {creator}, which called for it, died or lost the link."
        )

    def clean_up(self, rank: int, context: GlobalId) -> None:
        """Tell another worker that an autograd context has ended."""
        self._do(self._machine.clean_up, rank, context)

    # Messages that leave

    def depart(
        self, encoded: Encoded, to: int, route: object, creation: Fork | None = None, site: str = ""
    ) -> tuple[Encoded, list[Fork]]:
        """The message with its references in front. Raises, and sends nothing, if one of them can't be used."""
        forks: list[Fork] = []
        if encoded.travellers:
            sources = [traveller._source("fork an UserRRef") for traveller in encoded.travellers]
            forks = self._do(self._fork_all, sources, to, route)
        try:
            flags = encoded.flags | FORKS
            if creation is None:
                head = pack_forks(forks)
            else:
                flags |= REMOTE
                place = site.encode()[:0xFFFF]
                head = pack_forks([creation, *forks]) + len(place).to_bytes(2, "little") + place
            return Encoded(head + encoded.meta, encoded.buffers, encoded.keep, flags), forks
        except BaseException:
            self.not_sent(forks)
            raise

    def _fork_all(self, sources: Sequence[UserReference | OwnedValue], to: int, route: object) -> list[Fork]:
        return [self._machine.fork(source, to, route) for source in sources]

    def not_sent(self, forks: list[Fork]) -> None:
        if forks:
            self._do(self._machine.undelivered, forks)

    def doubted(self, forks: list[Fork]) -> None:
        """These may have been sent or not: the receiver is asked."""
        if forks:
            self._do(self._machine.doubted, forks)

    def route_lost(self, route: object, peer: int) -> None:
        """A connection closed: ask after what was on it, and see whether the worker lives."""
        if self._closed:
            return
        with self._lock:
            concerned = self._machine.concerns(peer)
        if concerned:
            self._do(self._machine.route_lost, route)
            self._courier.look_after(peer)

    # Messages that come

    def arrive(self, sender: int, frame: Frame) -> list[UserReference]:
        """Take the references in front of a message's pickle; those that their owners don't count yet are returned."""
        meta = frame.meta
        forks, end = unpack_forks(meta)
        creation: OwnedValue | None = None
        if frame.flags & REMOTE:
            if not forks:
                raise ProtocolError("a call that makes a value does not say which")
            site, end = unpack_site(meta, end)
            creation = self._do(self._make, sender, forks.pop(0), frame.name, site)
        frame.meta = memoryview(meta)[end:]
        if not forks:
            frame.arrivals = Arrivals(creation, [])
            return []
        records = self._do(self._arrive_all, forks, sender)
        frame.arrivals = Arrivals(creation, [self._kept(record) for record in records])
        return [r for r in records if isinstance(r, UserReference) and r.state is User.ARRIVED]

    def _make(self, sender: int, first: Fork, maker: bytes, site: bytes) -> OwnedValue | None:
        if sender == self.me:
            return self._own_calls.get(first.rref)
        value = self._machine.make(sender, first.rref, first.fork)
        if value is not None:
            cell = self._cell(value)
            cell.maker, cell.site = maker, site
        return value

    def _cell(self, value: OwnedValue) -> Cell:
        """The cell of a value, made on first sight. Called under the lock."""
        cell = value.cell
        if cell is None:
            cell = value.cell = self._early.pop(value.rref, None) or Cell()
            if value.state is Value.BROKEN:
                cell.fail(self._never_made(value.rref))
        return cell  # type: ignore[no-any-return]

    def _arrive_all(self, forks: list[Fork], sender: int) -> list[UserReference | OwnedValue]:
        records = [self._machine.arrive(fork, sender) for fork in forks]
        for record in records:
            if isinstance(record, UserReference):
                record.cell = Trail()
            else:
                self._cell(record)
        return records

    def _kept(self, record: UserReference | OwnedValue) -> Held | OwnedValue:
        return Held(self, record) if isinstance(record, UserReference) else record

    def when_confirmed(self, records: list[UserReference], callback: Callable[[], None]) -> None:
        """Call it once none of these is unconfirmed any more; some are now, or were a moment ago."""
        left = [len(records)]
        lock = threading.Lock()

        def one_less() -> None:
            with lock:
                left[0] -= 1
                last = not left[0]
            if last:
                callback()

        for record in records:
            with self._lock:
                waits = record.state in (User.ARRIVED, User.ARRIVED_DROPPED)
                if waits:
                    record.cell.waiting = [*(record.cell.waiting or ()), one_less]
            if not waits:
                one_less()

    def cell_of(self, rref: GlobalId, exists: bool) -> Cell:
        """The cell of a value of ours that another worker asks for, which may be one that is still to be made."""
        with self._lock:
            value = self._machine.find(rref)
            if value is not None:
                return self._cell(value)
            if not exists and rref not in self._given_up and self._machine.may_come(rref):
                return self._early.setdefault(rref, Cell())
        raise ReferenceLostError(
            f"{self._worker} does not have the value of RRef {rref}: it was freed because a worker that held it died "
            "or was taken for dead, or the call that should have made it is lost."
        )

    # Batches

    def operate(self, peer: int, instance: str, number: int, operations: bytes) -> bytes:
        """A batch came from another worker."""
        batch = Batch(number, unpack_operations(operations))
        broken: list[tuple[GlobalId, Cell]] = []

        def take() -> bytes:
            if peer in self._machine.dead or self._instances.get(peer, instance) != instance:
                raise ConnectionLostError(f"{self._worker} has taken this worker for dead.")
            results = self._machine.incoming(peer, batch).results
            for operation in batch.operations:
                # Whoever asked for a value before the call came that makes it need not wait any more. Nor whoever asked
                # before this, and is looked at after it: requests run in any order.
                if operation.kind in _GIVING_UP and self._machine.find(operation.rref) is None:
                    self._given_up[operation.rref] = None
                    if len(self._given_up) > _REMEMBERED:
                        del self._given_up[next(iter(self._given_up))]
                    cell = self._early.pop(operation.rref, None)
                    if cell is not None:
                        broken.append((operation.rref, cell))
            return results

        results = self._do(take)
        for rref, cell in broken:
            cell.fail(self._never_made(rref))
        for operation in batch.operations:
            if operation.kind is Kind.CLEANUP:  # to end a context twice does no harm
                self._on_context_ended(operation.rref, peer)
        return results

    def _outgoing(self, peer: int) -> Batch | None:
        with self._lock:
            return self._machine.outgoing(peer)

    def _replied(self, peer: int, reply: Reply) -> None:
        self._do(self._machine.replied, peer, reply)

    def expire(self, now: float) -> float:
        """Called on the loop's alarm: do and send what is due; when to look again (0: not)."""
        if self._nudged:
            self._nudged = False
            self._drop_noted()
        if self._effects:
            self._perform()
        return self._batches.expire(now)

    # Who lives

    def meet(self, rank: int, instance: str) -> None:
        """A worker has proved itself: one that takes the place of another means that the other is gone."""
        with self._lock:
            if self._instances.setdefault(rank, instance) == instance:
                return
        self.died(rank)

        def replace() -> None:
            if self._instances.get(rank) != instance:
                self._instances[rank] = instance
                self._machine.dead.discard(rank)

        self._do(replace)

    def instance_of(self, rank: int) -> str | None:
        """Which start of a worker we have met; None if none."""
        return self._instances.get(rank)

    def is_dead(self, rank: int, instance: str) -> bool:
        return rank in self._machine.dead and self._instances.get(rank, instance) == instance

    def concerned_with(self, rank: int) -> bool:
        with self._lock:
            return self._machine.concerns(rank)

    def died(self, rank: int) -> None:
        def die() -> list[Cell]:
            self._machine.died(rank)
            self._given_up = {rref: None for rref in self._given_up if rref.created_on != rank}
            return [self._early.pop(rref) for rref in list(self._early) if rref.created_on == rank]

        self._batches.forget(rank)
        for cell in self._do(die):
            cell.fail(ReferenceLostError(f"{self._courier.name_of_rank(rank)} died before it made the value."))

    # State

    @property
    def settled(self) -> bool:
        """Nothing is on its way to another worker."""
        with self._lock:
            return not self._drops and not self._effects and not self._freed and self._machine.settled

    def counts(self) -> dict[str, int]:
        with self._lock:
            return {**self._machine.counts(), "num_pending_futures": self._batches.under_way}

    def snapshot(self) -> tuple[list[UserReference], list[tuple[OwnedValue, list[int]]]]:
        """The references to values of others, and the values that others refer to, with the ranks of those."""
        with self._lock:
            owned = [(value, list(value.forks.values())) for value in self._machine.owned.values()]
            return list(self._machine.users.values()), owned

    def close(self) -> None:
        self._closed = True
        self._batches.close()


def describe(record: UserReference) -> str:
    return f"UserRRef(RRefId = {record.rref}, ForkId = {record.fork})"


def creation_error(owner: str, error: Exception) -> Exception:
    """The error of every use of a reference whose ``remote()`` had no answer."""
    kind = type(error) if isinstance(error, FarpropError) else FarpropError
    if isinstance(error, ConnectionLostError):
        kind = ReferenceLostError
    try:
        made = kind(f"RRef creation via rpc.remote() on {owner} failed, and the value may not exist there: {error}")
    except TypeError:
        made = FarpropError(f"RRef creation via rpc.remote() on {owner} failed: {error!r}")
    made.__cause__ = without_frames(error)
    return made
