"""What this worker does, for whoever asks: a snapshot of its calls, threads, references and passes.

Rules that hold here:

- Nothing is recorded for inspection alone, except for what ``PendingReply.run``, ``Waiter`` and ``FutureCall.origin``
  hold. Texts are made when somebody asks.
- Nobody waits for a lock of the program's, or for another worker, to make a snapshot.
- A question to another worker has a short deadline, and goes past the program's calls. A worker is asked once in a
  while only, however many calls to it time out.
"""

from __future__ import annotations

import linecache
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch

from farprop.errors import ConnectionLostError, RpcTimeoutError
from farprop.protocol import waits
from farprop.protocol.inspection import (
    CALLS,
    GRAPH,
    HELD,
    QUEUED,
    RUNNING,
    STACKS,
    STATE,
    UNFINISHED,
    Answer,
    AwaitedCall,
    CallId,
    ConnectionState,
    Frame,
    GraphPart,
    GraphSend,
    Member,
    Pass,
    Reference,
    ServedCall,
    Silence,
    Snapshot,
    Thread,
    from_json,
    to_json,
)
from farprop.protocol.roster import Entry
from farprop.runtime.accepted_connections import AcceptedConnections
from farprop.runtime.autograd.driver import BackwardDriver
from farprop.runtime.autograd.graph import reach_from
from farprop.runtime.client_connection import FutureCall, Waiter
from farprop.runtime.futures import Future, wait_on_pool
from farprop.runtime.membership import Membership
from farprop.runtime.peers import Peers
from farprop.runtime.process_state import UNRESPONSIVE, is_computing, memory_bytes, silence_of
from farprop.runtime.server import PendingReply, Server
from farprop.runtime.thread_pool import ThreadPool
from farprop.transport.shared_memory import SegmentPool
from farprop.wire.dialect import Dialect
from farprop.wire.function_names import shown_name
from farprop.wire.message import ANSWER, SYSTEM, Message, Method

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

ASK_SECONDS = 0.3  # how much later than its deadline a call may end, to say why
_LEAST_SECONDS = 0.02
_AGAIN_SECONDS = 1.0  # a worker that was asked is not asked again so soon for a timeout
_FIRST_WORD_SECONDS = 5.0  # after which ``shutdown`` says what it waits for; then again after twice as long, and so on
_LONGEST_SILENCE_SECONDS = 60.0
_MOST_CALLS = 500
_MOST_PARTNERS = 5  # that are asked about one pass
_MOST_FRAMES = 100
_BARRIERS = b"farprop.rpc.api:_"  # the functions that all-gathers call
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_now = time.monotonic


# Python's own library is no code of the program's. What is installed inside of its directory is.
_NOT_PROGRAM = (_OURS, os.path.dirname(torch.__file__) + os.sep, "<")
_STANDARD = os.path.dirname(os.__file__) + os.sep


def _is_programs(file: str) -> bool:
    if file.startswith(_NOT_PROGRAM):
        return False
    return not file.startswith(_STANDARD) or "/site-packages/" in file or "/dist-packages/" in file


class Inspector:
    """Makes snapshots of this worker, and gets those of others. Methods may be called from any thread.

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
        dialect: Dialect,
    ) -> None:
        self.references: Callable[[], Iterable[Any]] = list
        self.barrier: Callable[[], list[str]] = list
        self.shutdown_began: float | None = None
        self.is_closed = False
        self.job = job
        self._own = membership.own.name
        self._membership = membership
        self._peers = peers
        self._pool = threads
        self._gradients = gradients
        self._dialect = dialect
        self._started = time.time()
        self._asked: dict[str, tuple[float, Answer | None]] = {}  # by worker: when, and what it said

    def bind(
        self, server: Server, accepted: AcceptedConnections, segments: SegmentPool, is_idle: Callable[[], bool]
    ) -> None:
        """Set the parts whose constructors need this object."""
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

    # This worker

    def on_question(self, caller: int, detail: int, number: int) -> bytes:
        """Another worker asks. ``number`` is that of the call that it asks about, or 0; for a graph, its context."""
        if detail == GRAPH:
            return to_json(self._graph(number))
        about = CallId(self._membership.name_of(caller), self._own, number)
        return to_json(self.snapshot(detail, about, discreet=self._dialect.restricted))

    def snapshot(self, detail: int = STATE, about: CallId | None = None, discreet: bool = False) -> Snapshot:
        """What this worker does now.

        Args:
            detail: ``CALLS`` for what ``why`` needs, ``STATE`` for everything but stacks, ``STACKS`` for all.
            about: a call that must not be left out, however many there are.
            discreet: whether to leave out what workers of a restricted job don't tell each other: lines of code, and
                the ids of contexts and references, which are keys to them.
        """
        threads = _Threads(not discreet)
        try:
            return self._snapshot(threads, detail, about, discreet)
        finally:
            threads.frames.clear()  # one of them is this one's: a cycle, which would keep what all threads work on

    def _snapshot(self, threads: _Threads, detail: int, about: CallId | None, discreet: bool) -> Snapshot:
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

    def _awaited(self, now: float, threads: _Threads) -> tuple[dict[CallId, AwaitedCall], dict[int, CallId]]:
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
        for ident, frame in threads.frames.items():
            if ident not in waited_by:
                future = _awaited_future(frame)
                waiting_for = None if future is None else ids.get(future.call)
                if waiting_for is not None:
                    waited_by[ident] = waiting_for
        waited = set(waited_by.values())
        return {
            call_id: call if call_id not in waited else replace(call, is_waited_for=True)
            for call_id, call in calls.items()
        }, waited_by

    def _describe(
        self, call: Waiter | FutureCall, call_id: CallId, deadline: float | None, now: float, threads: _Threads
    ) -> AwaitedCall | None:
        if isinstance(call, Waiter):
            message = call.message
            if message is None:
                return None
            name = message.name or getattr(message, "function_name", b"")
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
            system=_is_system(name, flags),
        )

    def _served(
        self,
        now: float,
        threads: _Threads,
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
            slot = threads.awaited_slot(ident)
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
            system=_is_system(name, reply.flags),
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

    def _graph(self, context_id: int) -> GraphPart:
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
            sends.append(GraphSend(message_id, len(edges), len(reach.nodes), len(reach.leaves), reached))
        received: dict[str, list[int]] = {}
        for message_id, node in sorted(context.receives.copy().items()):
            received.setdefault(self._membership.name_of(node.target.worker), []).append(message_id)
        return GraphPart(self._own, len(nodes), len(leaves), sends, received, len(context.gradients))

    def graphs(self, context_id: int, seconds: float) -> list[GraphPart | Silence]:
        """The parts of an autograd context on this worker and on those that take part in it, by rank.

        Raises:
            UsageError: there is no such context here.
        """
        self._gradients.contexts.find(context_id)  # raises
        parts: dict[int, GraphPart | Silence] = {self._membership.own.id: self._graph(context_id)}
        deadline = _now() + seconds
        # All of them: a worker that takes part may have called others, of which this one does not know.
        for entry in list(self._membership.entries.values()):
            if entry.rank not in parts:
                left = max(_LEAST_SECONDS, deadline - _now())
                part = self._asked_for(entry, GRAPH, left, context_id, GraphPart)
                if isinstance(part, Silence) or part.sends or part.received:
                    parts[entry.rank] = part
        return [parts[rank] for rank in sorted(parts)]

    # Other workers

    def ask(self, worker: str, detail: int, seconds: float, number: int = 0) -> Answer:
        """Ask another worker, or this one.

        Args:
            worker: its name.
            detail: as for ``snapshot``.
            seconds: how long to wait for its answer.
            number: the number of this worker's call that is asked about, or 0.
        """
        if worker == self._own:
            return self.snapshot(detail)
        entry = self._membership.find(worker)
        if entry is None:
            return Silence(Member(worker, -1, "", 0, ""), "is not a worker of this job")
        return self._asked_for(entry, detail, seconds, number, Snapshot)

    def _asked_for(self, entry: Entry, detail: int, seconds: float, number: int, kind: type[_T]) -> _T | Silence:
        message = self._dialect.encode_call(None, (detail, number), {})
        try:
            answer = self._peers.call_method(entry.rank, Method.INSPECT, message, seconds, system=True)
            if answer.kind != ANSWER:
                raise self._dialect.decode_failure(answer.payload)
            return from_json(self._dialect.decode_value(answer.payload, answer.buffers, answer.flags), kind)
        except RpcTimeoutError:
            return self._silence(entry, None)
        except Exception as error:
            return self._silence(entry, error)

    def _silence(self, entry: Entry, error: Exception | None) -> Silence:
        member = member_of(entry)
        state = silence_of(member, self.member.net)
        if isinstance(error, ConnectionLostError):
            return Silence(member, f"can't be reached: {state or 'it has died, or the network is cut'}")
        if error is not None:
            return Silence(member, f"can't be asked: {error}")
        return Silence(member, f"answers nothing: {state or UNRESPONSIVE}")

    def ask_all(self, detail: int, seconds: float, workers: Iterable[str] | None = None) -> dict[str, Answer]:
        """Ask all workers of the job at the same time, or these.

        Returns:
            Their answers by name, by rank.
        """
        self._membership.refresh()
        wanted = None if workers is None else set(workers)
        entries = [entry for entry in self._membership.entries.values() if wanted is None or entry.name in wanted]
        entries.sort(key=lambda entry: entry.rank)
        answers: dict[str, Answer] = {}

        def ask(name: str) -> None:
            answers[name] = self.ask(name, detail, seconds)

        # Threads of its own: those of the pool may all be busy, which is why somebody asks.
        asking = [
            threading.Thread(target=ask, args=(entry.name,), name="farprop-ask", daemon=True) for entry in entries
        ]
        for thread in asking:
            thread.start()
        with self._pool.blocked():
            for thread in asking:
                thread.join()
        return {entry.name: answers[entry.name] for entry in entries}

    # Why

    def on_timeout(self, error: RpcTimeoutError, timeout: float) -> None:
        """Say in the error of a call that timed out what became of it. Takes ``ASK_SECONDS`` at most, roughly."""
        caller, _, rest = (error.call_id or "").partition(">")
        callee, _, number = rest.rpartition("#")
        call = AwaitedCall(
            CallId(caller, callee, int(number)), error.function or "", timeout, 0.0, "", True, None, None
        )
        deadline = _now() + max(_LEAST_SECONDS, min(ASK_SECONDS, timeout))
        reason = waits.explain(call, lambda worker: self._ask_soon(worker, deadline, call.id))
        error.args = (timeout_text(call, timeout, reason.state),)
        error.add_note(reason.sentence)

    def on_pass_timeout(self, error: RpcTimeoutError, partners: Iterable[int]) -> None:
        """Say in the error of a backward pass what the workers that take part in it do with its gradients."""
        deadline = _now() + ASK_SECONDS
        gradients = called(Method.GRADIENTS.value)
        for rank in sorted(partners)[:_MOST_PARTNERS]:
            name = self._membership.name_of(rank)
            nothing = CallId(self._own, name, 0)
            answer = self._ask_soon(name, deadline, nothing)
            if isinstance(answer, Silence):
                error.add_note(f"{name} {answer.reason}")
                continue
            for served in answer.served:
                if served.function == gradients:
                    call = AwaitedCall(served.id, gradients, served.seconds or 0.0, None, "", True, None, None)
                    ask = partial(self._ask_soon, deadline=deadline, about=nothing)
                    error.add_note(waits.explain(call, ask).sentence)

    def _ask_soon(self, worker: str, deadline: float, about: CallId) -> Answer:
        """Ask a worker, unless somebody has asked it a moment ago: then what it said then counts."""
        if worker == self._own:
            return self.snapshot(CALLS)
        now = _now()
        when, said = self._asked.get(worker, (0.0, None))
        if now - when < _AGAIN_SECONDS:
            if said is not None:
                return said
            return Silence(Member(worker, -1, "", 0, ""), "was asked a moment ago, and has not said yet")
        if deadline - now <= 0:
            return Silence(Member(worker, -1, "", 0, ""), "was not asked: there was no time left")
        self._asked[worker] = now, None
        if len(self._asked) > 1000:
            self._asked = {name: entry for name, entry in self._asked.items() if now - entry[0] < _AGAIN_SECONDS}
        number = about.number if worker == about.callee else 0
        answer = self.ask(worker, CALLS, deadline - now, number)
        self._asked[worker] = now, answer
        return answer

    # Shutdown

    def on_shutdown(self) -> None:
        """``shutdown`` begins: say what it waits for, if it takes long. The end of the agent ends this."""
        self.shutdown_began = _now()
        self._pool.loop.call_at(_now() + _FIRST_WORD_SECONDS, lambda: self._tell_soon(_FIRST_WORD_SECONDS))

    def _tell_soon(self, pause: float) -> None:
        self._pool.submit(self._tell, pause)  # not in the loop: it asks other workers

    def _tell(self, pause: float) -> None:
        began = self.shutdown_began
        if self.is_closed or began is None:
            return
        what = self.what_shutdown_waits_for(ASK_SECONDS)
        if not self.is_closed:
            text = "%s: shutdown has waited %s for %s"
            _log.warning(text, self._membership.own.label, waits.seconds_text(_now() - began), what)
            pause = min(2 * pause, _LONGEST_SILENCE_SECONDS)
            self._pool.loop.call_at(_now() + pause, lambda: self._tell_soon(pause))

    def what_shutdown_waits_for(self, seconds: float) -> str:
        """What ``shutdown`` on this worker waits for: other workers that have not called it, or work that is left."""
        deadline = _now() + seconds

        def ask(worker: str) -> Answer:
            return self.ask(worker, CALLS, max(_LEAST_SECONDS, deadline - _now()))

        own = self.snapshot(CALLS)
        asked = {worker: ask(worker) for worker in own.barrier[:5]}
        # The others wait for the leader of the barrier, and the leader knows for whom it waits.
        later = {
            name: ask(name)
            for answer in list(asked.values())
            if isinstance(answer, Snapshot) and answer.shutting_down is not None
            for name in answer.barrier[:5]
            if name not in asked and name != self._own
        }
        late = {name: answer for name, answer in {**asked, **later}.items() if not _is_shutting_down(answer)}
        if late:
            what = [waits.doings(answer, ask) for answer in late.values()]
            return f"{waits.listed(late)} to call shutdown: {'; '.join(what)}"
        busy = {name: answer for name, answer in {self._own: own, **asked, **later}.items() if _has_work(answer)}
        if busy:
            what = [waits.doings(answer, ask) for answer in busy.values()]
            return f"work that is left: {'; '.join(what)}"
        return f"{waits.listed(own.barrier)} to answer" if own.barrier else "the last answers"


def _is_shutting_down(answer: Answer) -> bool:
    return isinstance(answer, Snapshot) and answer.shutting_down is not None


def _has_work(answer: Answer) -> bool:
    if isinstance(answer, Silence):
        return True
    return any(not call.system for call in answer.served) or any(not call.system for call in answer.awaited)


def timeout_text(call: AwaitedCall, timeout: float, state: str) -> str:
    """The text of a call's timeout. Its beginning is torch's."""
    became = {
        waits.QUEUED_THERE: "It was queued there, and has not started",
        waits.RUNNING_THERE: "It is still running there",
        waits.UNKNOWN: "It may still be running there",
    }[state]
    return (
        f"RPC ran for more than set timeout ({timeout * 1000:.0f} ms) without an answer from {call.id.callee} to "
        f"{call.function}. {became}. Pass a larger timeout to the call, or 0 to disable it."
    )


def called(name: bytes, function: Any = None) -> str:
    """How a function is shown."""
    return shown_name(name, function).removeprefix(":")


def _is_system(name: bytes, flags: int) -> bool:
    """Whether a call is farprop's own: those of barriers count as work of the program only for ``shutdown``."""
    return bool(flags & SYSTEM) or name.startswith(_BARRIERS)


def member_of(entry: Entry) -> Member:
    return Member(entry.name, entry.rank, entry.host, entry.pid, entry.net)


def _oldest(calls: Iterable[AwaitedCall], discreet: bool) -> list[AwaitedCall]:
    found = sorted(calls, key=lambda call: -call.seconds)[:_MOST_CALLS]
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
        system=_is_system(message.name, message.flags),
    )


class _Threads:
    """The threads of this process, as they are now. ``shows``: whether places in the program may be told."""

    def __init__(self, shows: bool) -> None:
        self.frames: dict[int, FrameType] = sys._current_frames()
        self._known = {thread.ident: thread for thread in threading.enumerate()}
        self._shows = shows

    def idents(self) -> list[int]:
        return [ident for ident in self.frames if ident in self._known]

    def name_of(self, ident: int) -> str:
        thread = self._known.get(ident)
        return "" if thread is None else thread.name

    def native_id(self, ident: int) -> int:
        thread = self._known.get(ident)
        if thread is threading.main_thread():
            return os.getpid()  # Python keeps that of the parent after a fork
        return (thread.native_id or 0) if thread is not None else 0

    def computes(self, ident: int) -> bool | None:
        if ident == threading.get_ident():
            return None  # it makes this snapshot
        return is_computing(self.native_id(ident))

    def place_of(self, ident: int) -> Frame | None:
        """The innermost line of the program's own code."""
        frame = self.frames.get(ident)
        if frame is None or not self._shows:
            return None
        while frame is not None:
            file = frame.f_code.co_filename
            if _is_programs(file):
                return Frame(file, frame.f_lineno or 0, frame.f_code.co_name)
            frame = frame.f_back
        return None

    def waits_for_futures(self, ident: int) -> bool:
        """Whether a thread waits for a future that is none of a call: one of ``then`` or ``collect_all``, say."""
        return any(
            frame.f_code is wait_on_pool.__code__ or frame.f_code.co_filename.endswith("torch/futures/__init__.py")
            for frame in self._stack(ident)[:6]
        )

    def awaited_slot(self, ident: int) -> Any:
        """The slot of a value that a thread waits for on its owner."""
        for frame in self._stack(ident)[:6]:
            if frame.f_code.co_name == "wait" and frame.f_code.co_filename.endswith("references/owned_values.py"):
                return frame.f_locals.get("self")
        return None

    def describe(self, ident: int, serves: CallId | None, waits_for: CallId | None, with_frames: bool) -> Thread:
        frames = [_frame(frame) for frame in self._stack(ident)] if with_frames else []
        return Thread(
            self.name_of(ident),
            self.native_id(ident),
            self.computes(ident),
            serves,
            waits_for,
            self.place_of(ident),
            frames,
        )

    def _stack(self, ident: int) -> list[FrameType]:
        found: list[FrameType] = []
        frame = self.frames.get(ident)
        while frame is not None and len(found) < _MOST_FRAMES:
            found.append(frame)
            frame = frame.f_back
        return found


def _frame(frame: FrameType) -> Frame:
    code = frame.f_code
    line = frame.f_lineno or 0
    return Frame(code.co_filename, line, code.co_name, linecache.getline(code.co_filename, line).strip())


def _awaited_future(frame: FrameType | None) -> Future | None:
    """The future of a call that the thread with this innermost frame waits for."""
    depth = 0
    while frame is not None and depth < 6:
        if frame.f_code is wait_on_pool.__code__:
            future = frame.f_locals.get("future")
            return future if isinstance(future, Future) else None
        frame, depth = frame.f_back, depth + 1
    return None
