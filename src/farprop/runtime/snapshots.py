"""What this worker does, for whoever asks: a snapshot of its calls, threads, references and passes.

Rules that hold here:

- Nothing is recorded for inspection alone, except for what ``PendingReply.run``, ``Waiter`` and ``FutureCall.origin``
  hold. Texts are made when somebody asks.
- Nobody waits for a lock of the program's, or for another worker, to make a snapshot.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from farprop.protocol.inspection import (
    GRAPH,
    HELD,
    QUEUED,
    RECENT,
    RUNNING,
    STACKS,
    STATE,
    UNFINISHED,
    AwaitedCall,
    CallId,
    ConnectionState,
    GraphPart,
    GraphSend,
    Member,
    Pass,
    Recent,
    Reference,
    ServedCall,
    Snapshot,
    to_json,
)
from farprop.protocol.roster import Entry
from farprop.runtime.accepted_connections import AcceptedConnections
from farprop.runtime.answer_reader import Waiter
from farprop.runtime.autograd.driver import BackwardDriver
from farprop.runtime.autograd.graph import reach_from
from farprop.runtime.call_records import called_name, is_system
from farprop.runtime.future_call import FutureCall
from farprop.runtime.futures import Future
from farprop.runtime.membership import Membership
from farprop.runtime.peers import Peers
from farprop.runtime.process_state import memory_bytes
from farprop.runtime.python_threads import PythonThreads
from farprop.runtime.recent_work import RecentWork
from farprop.runtime.server import PendingReply, Server
from farprop.runtime.sync import awaited_by
from farprop.runtime.thread_pool import ThreadPool
from farprop.transport.shared_memory import SegmentPool
from farprop.wire.function_names import shown_name
from farprop.wire.message import Message, Method

_MOST_CALLS = 500
_now = time.monotonic


class Snapshots:
    """Makes snapshots of this worker. Methods may be called from any thread.

    ``references`` and ``barrier`` are set by the layers above: the references of this worker, and the workers that a
    barrier here waits for.
    """

    def __init__(
        self,
        job: str,
        membership: Membership,
        peers: Peers,
        threads: ThreadPool,
        gradients: BackwardDriver,
        restricted: bool,
    ) -> None:
        self.references: Callable[[], Iterable[Any]] = list
        self.barrier: Callable[[], list[str]] = list
        self.shutdown_began: float | None = None
        self.job = job
        self._own = membership.own.name
        self._membership = membership
        self._peers = peers
        self._pool = threads
        self._gradients = gradients
        self._restricted = restricted
        self._started = time.time()
        self._recent_work = RecentWork(threads.loop.call_at, threads.submit)
        self.close = self._recent_work.close

    def bind(
        self, server: Server, accepted: AcceptedConnections, segments: SegmentPool, is_idle: Callable[[], bool]
    ) -> None:
        """Set the parts that are made later than this object."""
        self._server = server
        self._accepted = accepted
        self._segments = segments
        self._is_idle = is_idle

    @property
    def member(self) -> Member:
        """This worker, as the others know it."""
        entry = self._membership.find(self._own)
        if entry is None:
            return Member(self._own, self._membership.own.id, "", os.getpid(), "")
        return member_of(entry)

    def on_question(self, caller: int, detail: int, number: int) -> bytes:
        """Another worker asks. ``number`` is that of the call that it asks about, or 0; for a graph, its context; for
        recent work, the cursor.
        """
        if detail == GRAPH:
            return to_json(self.graph(number))
        if detail == RECENT:
            return to_json(self.recent(number, discreet=self._restricted))
        about = CallId(self._membership.name_of(caller), self._own, number)
        return to_json(self.snapshot(detail, about, discreet=self._restricted))

    def recent(self, cursor: int, discreet: bool = False) -> Recent:
        """What this worker has done since an earlier question; ``discreet`` as for ``snapshot``."""
        return self._recent_work.since(cursor, self.member, discreet)

    def snapshot(self, detail: int = STATE, about: CallId | None = None, discreet: bool = False) -> Snapshot:
        """What this worker does now.

        Args:
            detail: ``CALLS`` for what ``why`` needs, ``STATE`` for everything but stacks, ``STACKS`` for all.
            about: a call that must not be left out, however many there are.
            discreet: whether to leave out what workers of a restricted job don't tell each other: lines of code, and
                the ids of contexts and references, which are keys to them.
        """
        threads = PythonThreads(not discreet)
        now = _now()
        awaited, waited_by = self._awaited(now, threads)
        served = self._served(now, threads, awaited, waited_by, about)
        facts = self._pool.facts()
        more: dict[str, Any] = {}
        if detail >= STATE:
            more = {
                "members": [member_of(entry) for entry in list(self._membership.entries.values())],
                "references": [] if discreet else self._references(),
                "passes": [] if discreet else self._passes(awaited),
                "connections": self._connections(),
                "memory_bytes": memory_bytes(),
                "shared_bytes": self._shared_bytes(),
            }
        serves = {ident: self._id_of(reply) for ident, reply in list(self._pool.serving.items()) if reply is not None}
        if detail >= STACKS:
            more["threads"] = [
                threads.describe(ident, serves.get(ident), waited_by.get(ident), with_frames=not discreet)
                for ident in threads.idents()
            ]
        main = threading.main_thread().ident or 0
        return Snapshot(
            member=self.member,
            job=self.job,
            discreet=discreet,
            started=self._started,
            thread_limit=facts["limit"],
            threads_busy=facts["running"],
            idle=self._is_idle(),
            awaited=_oldest(awaited.values(), discreet),
            served=[replace(call, context=None) for call in served] if discreet else served,
            queued=facts["queued"],
            main=threads.describe(main, serves.get(main), waited_by.get(main), with_frames=False),
            barrier=self.barrier(),
            shutting_down=None if self.shutdown_began is None else now - self.shutdown_began,
            **more,
        )

    def _id_of(self, reply: PendingReply) -> CallId:
        return CallId(reply.connection.peer, self._own, reply.call_id)

    def _awaited(self, now: float, threads: PythonThreads) -> tuple[dict[CallId, AwaitedCall], dict[int, CallId]]:
        """The calls of this worker, and which of them each thread waits for."""
        calls: dict[CallId, AwaitedCall] = {}
        waited_by: dict[int, CallId] = {}
        ids: dict[object, CallId] = {}
        for connection in list(self._peers.connections.values()):
            for position, (number, call, deadline) in enumerate(connection.pending()):
                waiter = call if isinstance(call, Waiter) else getattr(call, "waiter", None)
                if position >= _MOST_CALLS and waiter is None:
                    continue  # there may be hundreds of thousands
                call_id = ids[call] = CallId(self._own, connection.peer, number)
                described = self._describe(call, call_id, deadline, now, threads)
                if described is not None:
                    calls[call_id] = described
                if waiter is not None:
                    waited_by[waiter.thread] = call_id
        for ident in threads.idents():
            if ident not in waited_by:
                future = awaited_by.get(ident)
                waiting_for = ids.get(future.call) if isinstance(future, Future) else None
                if waiting_for is not None:
                    waited_by[ident] = waiting_for
        waited = set(waited_by.values())
        return {
            call_id: call if call_id not in waited else replace(call, is_waited_for=True)
            for call_id, call in calls.items()
        }, waited_by

    def _describe(
        self, call: Waiter | FutureCall, call_id: CallId, deadline: float | None, now: float, threads: PythonThreads
    ) -> AwaitedCall | None:
        if isinstance(call, Waiter):
            message = call.message
            if message is None:
                return None
            name = called_name(message)
            serves = self._pool.serving.get(call.thread)
            parent = None if serves is None else self._id_of(serves)
            flags, head, began, thread = message.flags, message.autograd, call.began, call.thread
            deadline = None if call.timeout is None else began + call.timeout
        else:
            origin = getattr(call, "origin", None)
            if origin is None:
                return None
            name, flags, head, began, thread, made_for = origin
            parent = None if made_for is None else CallId(made_for[0], self._own, made_for[1])
        return AwaitedCall(
            id=call_id,
            function=called(name),
            seconds=now - began,
            left=None if deadline is None else deadline - now,
            thread=threads.name_of(thread),
            is_waited_for=False,
            context=None if head is None else head.context_id,
            parent=parent,
            system=is_system(name, flags),
        )

    def _served(
        self,
        now: float,
        threads: PythonThreads,
        awaited: dict[CallId, AwaitedCall],
        waited_by: dict[int, CallId],
        about: CallId | None,
    ) -> list[ServedCall]:
        running = [(ident, reply) for ident, reply in list(self._pool.serving.items()) if reply is not None]
        unfinished = list(self._server.unfinished.items())
        # Who makes the value in a slot.
        makers = {
            id(reply.creation.slot): self._id_of(reply)
            for reply in [*(reply for _, reply in running), *(reply for reply, _ in unfinished)]
            if reply.creation is not None
        }
        children: dict[CallId, list[CallId]] = {}
        for call in sorted(awaited.values(), key=lambda call: -call.seconds):
            if call.parent is not None:
                children.setdefault(call.parent, []).append(call.id)
        found: list[ServedCall] = []
        resumed = {reply for _, reply in running}
        for ident, reply in running:
            call_id = self._id_of(reply)
            waits_for = [waited_by[ident]] if ident in waited_by else []
            if not waits_for and threads.waits_for_futures(ident):
                waits_for = children.get(call_id, [])
            slot = awaited_by.get(ident)
            found.append(
                self._served_call(
                    reply,
                    RUNNING,
                    now,
                    thread=threads.name_of(ident),
                    place=threads.place_of(ident),
                    computes=threads.computes(ident),
                    waits_for=waits_for,
                    value_of=None if slot is None else makers.get(id(slot)),
                )
            )
        for reply, subscribe in unfinished:
            if reply not in resumed:
                slot = getattr(subscribe, "__self__", None)
                value_of = makers.get(id(slot))
                waits_for = children.get(self._id_of(reply), [])
                found.append(self._served_call(reply, UNFINISHED, now, waits_for=waits_for, value_of=value_of))
        for state, requests in ((HELD, self._server.held()), (QUEUED, self._pool.queued())):
            for position, (_, _, args) in enumerate(requests):
                if len(args) == 3 and isinstance(args[1], Message):
                    connection, message, counted_from = args
                    call_id = CallId(connection.peer, self._own, message.call_id)
                    if position < _MOST_CALLS or call_id == about:
                        found.append(_queued_call(call_id, message, state, counted_from, now))
        return found

    def _served_call(self, reply: PendingReply, state: str, now: float, **more: Any) -> ServedCall:
        name, function, started, seconds, counted_from = reply.run
        return ServedCall(
            id=self._id_of(reply),
            function=called(name, function),
            state=state,
            seconds=now - started,
            left=None if seconds is None else counted_from + seconds - now,
            context=None if reply.context is None else reply.context.id,
            system=is_system(name, reply.flags),
            **more,
        )

    def _references(self) -> list[Reference]:
        return [
            Reference(
                id=f"{found.id.created_on}:{found.id.local_id}",
                role=found.role,
                owner=found.owner,
                state=found.state,
                type=found.type,
                nbytes=found.nbytes,
                holders=list(found.holders),
                made_by=found.made_by,
                created_at=found.created_at,
                seconds=found.seconds,
            )
            for found in self.references()
        ]

    def _passes(self, awaited: dict[CallId, AwaitedCall]) -> list[Pass]:
        gradients = called(Method.GRADIENTS.value)
        name_of = self._membership.name_of
        found = []
        for local, seconds in self._gradients.running_passes():
            found.append(
                Pass(
                    context=local.context.id,
                    origin=name_of(local.id.origin),
                    number=local.id.number,
                    mode="fast" if local.fast else "smart",
                    runs=local.machine.active,
                    missing=len(local.machine.missing),
                    partners=sorted(map(name_of, list(local.partners))),
                    waits_for=[
                        call.id
                        for call in awaited.values()
                        if call.function == gradients and call.id.callee in map(name_of, list(local.partners))
                    ],
                    seconds=seconds,
                )
            )
        return found

    def _connections(self) -> list[ConnectionState]:
        served: dict[str, int] = {}
        for reply in [*self._pool.serving.values(), *self._server.unfinished]:
            if reply is not None:
                served[reply.connection.peer] = served.get(reply.connection.peer, 0) + 1
        dialled = [
            ConnectionState(connection.peer, True, connection.open_calls, connection.outbox_bytes)
            for connection in list(self._peers.connections.values())
        ]
        accepted = [
            ConnectionState(connection.peer, False, served.get(connection.peer, 0), connection.outbox_bytes)
            for connection in self._accepted.all()
        ]
        return dialled + accepted

    def _shared_bytes(self) -> int:
        lent = sum(connection.lent_bytes for connection in list(self._peers.connections.values()))
        return self._segments.free_bytes + lent + sum(found.sender.lent_bytes for found in self._accepted.all())

    def graph(self, context_id: int) -> GraphPart:
        """The part of an autograd context on this worker."""
        context = self._gradients.contexts.get(context_id)
        if context is None:
            return GraphPart(self._own, 0, 0, [], {}, 0)
        nodes: set[Any] = set()
        leaves: set[Any] = set()
        sends = []
        for message_id, send in sorted(context.sends.copy().items()):
            edges = send.next_functions
            reach = reach_from(edges, None)
            nodes |= reach.nodes
            leaves.update(reach.leaves)
            reached = sorted(target.message_id for target in reach.targets)
            sizes = len(edges), len(reach.nodes), len(reach.leaves)
            sends.append(GraphSend(message_id, *sizes, reached, *context.sent.get(message_id, (None, None))))
        received: dict[str, list[int]] = {}
        for message_id, node in sorted(context.receives.copy().items()):
            received.setdefault(self._membership.name_of(node.target.worker), []).append(message_id)
        arrived = context.arrived.copy()
        return GraphPart(self._own, len(nodes), len(leaves), sends, received, len(context.gradients), arrived, _now())


def called(name: bytes, function: Any = None) -> str:
    """How a function is shown."""
    return shown_name(name, function).removeprefix(":")


def member_of(entry: Entry) -> Member:
    return Member(entry.name, entry.rank, entry.host, entry.pid, entry.net)


def _oldest(calls: Iterable[AwaitedCall], discreet: bool) -> list[AwaitedCall]:
    # Those that somebody waits for in any case: they say why, and are few.
    found = sorted(calls, key=lambda call: (not call.is_waited_for, -call.seconds))[:_MOST_CALLS]
    return [replace(call, context=None) for call in found] if discreet else found


def _queued_call(call_id: CallId, message: Message, state: str, counted_from: float, now: float) -> ServedCall:
    head = message.autograd
    return ServedCall(
        id=call_id,
        function=called(message.name or b":a function"),
        state=state,
        seconds=now - counted_from if counted_from else None,
        left=None if message.seconds is None else counted_from + message.seconds - now,
        context=None if head is None else head.context_id,
        system=is_system(message.name, message.flags),
    )
