"""Asks other workers what they do, and says why a call has no answer and what ``shutdown`` waits for.

A question to another worker has a short deadline, and goes past the program's calls. A worker is asked once in a while
only, however many calls to it time out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from farprop.errors import ConnectionLostError, RpcTimeoutError
from farprop.protocol import waits
from farprop.protocol.inspection import (
    CALLS,
    GRAPH,
    RECENT,
    Answer,
    AwaitedCall,
    CallId,
    GraphPart,
    Member,
    Recent,
    Silence,
    Snapshot,
    from_json,
)
from farprop.protocol.roster import Entry
from farprop.runtime.autograd.contexts import ContextContainer
from farprop.runtime.first_failure import explained
from farprop.runtime.membership import Membership
from farprop.runtime.peers import Peers
from farprop.runtime.process_state import UNRESPONSIVE, silence_of
from farprop.runtime.snapshots import Snapshots, called, member_of
from farprop.runtime.thread_pool import ThreadPool
from farprop.wire.dialect import Dialect
from farprop.wire.message import ANSWER, Method

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

ASK_SECONDS = 0.3  # how much later than its deadline a call may end, to say why
_LEAST_SECONDS = 0.02
_AGAIN_SECONDS = 1.0  # a worker that was asked is not asked again so soon for a timeout
_FIRST_WORD_SECONDS = 5.0  # after which ``shutdown`` says what it waits for; then again after twice as long, and so on
_LONGEST_SILENCE_SECONDS = 600.0  # workers that only serve call shutdown at once, and wait for the whole job
_MOST_PARTNERS = 5  # that are asked about one pass
_now = time.monotonic


class Inspector:
    """Gets the snapshots of other workers, and reads them. Methods may be called from any thread."""

    def __init__(
        self,
        snapshots: Snapshots,
        membership: Membership,
        peers: Peers,
        threads: ThreadPool,
        contexts: ContextContainer,
        dialect: Dialect,
    ) -> None:
        self.snapshots = snapshots
        self.is_closed = False
        self._own = membership.own.name
        self._membership = membership
        self._peers = peers
        self._pool = threads
        self._contexts = contexts
        self._dialect = dialect
        self._asked: dict[str, tuple[float, Answer | None]] = {}  # by worker: when, and what it said

    def ask(self, worker: str, detail: int, seconds: float, number: int = 0) -> Answer:
        """Ask another worker, or this one.

        Args:
            worker: its name.
            detail: as for ``snapshot``.
            seconds: how long to wait for its answer.
            number: the number of this worker's call that is asked about, or 0.
        """
        if worker == self._own:
            return self.snapshots.snapshot(detail)
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
        state = silence_of(member, self.snapshots.member.net)
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
        return self._of_all(workers, lambda entry: self.ask(entry.name, detail, seconds))

    def recent(
        self, cursors: Mapping[str, int], seconds: float, workers: Iterable[str] | None = None
    ) -> dict[str, Recent | Silence]:
        """What all workers of the job, or these, have done since an earlier question.

        Args:
            cursors: by worker, the cursor in its answer to that question. Left out for the first one.
            seconds: how long to wait for their answers.
            workers: the names of some of them.

        Returns:
            Their answers by name, by rank.
        """

        def ask(entry: Entry) -> Recent | Silence:
            cursor = cursors.get(entry.name, 0)
            if entry.name == self._own:
                return self.snapshots.recent(cursor)
            return self._asked_for(entry, RECENT, seconds, cursor, Recent)

        return self._of_all(workers, ask)

    def _of_all(self, workers: Iterable[str] | None, ask_one: Callable[[Entry], _T]) -> dict[str, _T]:
        """Ask all workers, or these, at the same time."""
        self._membership.refresh()
        wanted = None if workers is None else set(workers)
        entries = [entry for entry in self._membership.entries.values() if wanted is None or entry.name in wanted]
        entries.sort(key=lambda entry: entry.rank)
        answers: dict[str, _T] = {}

        def ask(entry: Entry) -> None:
            answers[entry.name] = ask_one(entry)

        # Threads of its own: those of the pool may all be busy, which is why somebody asks.
        asking = [threading.Thread(target=ask, args=(entry,), name="farprop-ask", daemon=True) for entry in entries]
        for thread in asking:
            thread.start()
        with self._pool.blocked():
            for thread in asking:
                thread.join()
        return {entry.name: answers[entry.name] for entry in entries}

    def graphs(self, context_id: int, seconds: float) -> list[GraphPart | Silence]:
        """The parts of an autograd context on this worker and on those that take part in it, by rank.

        Raises:
            UsageError: there is no such context here.
        """
        self._contexts.find(context_id)  # raises
        parts: dict[int, GraphPart | Silence] = {self._membership.own.id: self.snapshots.graph(context_id)}
        deadline = _now() + seconds
        # All of them: a worker that takes part may have called others, of which this one does not know.
        for entry in list(self._membership.entries.values()):
            if entry.rank not in parts:
                asked = _now()
                left = max(_LEAST_SECONDS, deadline - asked)
                part = self._asked_for(entry, GRAPH, left, context_id, GraphPart)
                if isinstance(part, Silence):
                    parts[entry.rank] = part
                elif part.sends or part.received:
                    if entry.net != self.snapshots.member.net:  # another host has another clock
                        # It was read at some time between the question and the answer.
                        half = (_now() - asked) / 2
                        part = replace(part, clock_ahead=part.now - asked - half, clock_error=half)
                    parts[entry.rank] = part
        return [parts[rank] for rank in sorted(parts)]

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
        explained(error)

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
            return self.snapshots.snapshot(CALLS)
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
        self.snapshots.shutdown_began = _now()
        self._pool.loop.call_at(_now() + _FIRST_WORD_SECONDS, lambda: self._tell_soon(_FIRST_WORD_SECONDS))

    def _tell_soon(self, pause: float) -> None:
        self._pool.submit(self._tell, pause)  # not in the loop: it asks other workers

    def _tell(self, pause: float) -> None:
        began = self.snapshots.shutdown_began
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

        own = self.snapshots.snapshot(CALLS)
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
