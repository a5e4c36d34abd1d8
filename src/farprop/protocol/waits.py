"""Why something takes so long: follows waits from worker to worker, and says it in a sentence.

Rules that hold here:

- ``ask`` is called for each worker on the way, once. What it does not know, the sentence does not claim.
- Every chain ends: at a worker that does not answer, at a call that waits for no other, or at a cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from farprop.protocol.inspection import (
    HELD,
    QUEUED,
    UNFINISHED,
    Answer,
    AwaitedCall,
    CallId,
    ServedCall,
    Silence,
    Snapshot,
)

Ask = Callable[[str], Answer]

QUEUED_THERE, RUNNING_THERE, UNKNOWN = "queued", "running", "unknown"
_MOST_HOPS = 64


@dataclass(frozen=True)
class Reason:
    """Why a call has no answer."""

    call: CallId
    seconds: float | None
    sentence: str
    state: str
    """Of the call at its callee: ``queued``, ``running`` or ``unknown``."""
    chain: list[CallId]
    """The call, and those that it waits for, one after the other."""
    is_cycle: bool = False


class _Chain:
    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._answers: dict[str, Answer] = {}
        self.calls: list[CallId] = []
        self.is_cycle = False

    def answer_of(self, worker: str) -> Answer:
        if worker not in self._answers:
            self._answers[worker] = self._ask(worker)
        return self._answers[worker]

    def follow(self, call: CallId) -> tuple[list[str], str]:
        """The clauses of the sentence from this call on, and the state of the call at its callee."""
        clauses: list[str] = []
        state = UNKNOWN
        while True:
            self.calls.append(call)
            answer = self.answer_of(call.callee)
            if isinstance(answer, Silence):
                clauses.append(f"{call.callee} {answer.reason}")
                return clauses, state
            served = answer.served_call(call)
            if len(self.calls) == 1:
                state = _state_of(served)
            following = None if served is None or len(self.calls) >= _MOST_HOPS else self._next(answer, served)
            if following is None:
                clauses.append(self._end(answer, served))
                return clauses, state
            said, call = following
            clauses.append(said)
            if call in self.calls:
                self.is_cycle = True
                clauses.append("a cycle")
                return clauses, state

    def _next(self, worker: Snapshot, served: ServedCall) -> tuple[str, CallId] | None:
        """The call that a served call waits for, and the clause that says so."""
        if served.value_of is not None:
            maker = worker.served_call(served.value_of)
            function = "another call" if maker is None else short(maker.function)
            return f"which waits for the value that {worker.name}.{function} makes{_age(maker)}", served.value_of
        for call in served.waits_for:
            awaited = worker.awaited_call(call)
            if awaited is not None:
                return f"which waits for {_target(awaited)}", call
        return None

    def _end(self, worker: Snapshot, served: ServedCall | None) -> str:
        name = worker.name
        if served is None:
            return f"{name} does not have it: it is on its way, or {name} has just answered it"
        if served.state == QUEUED:
            return f"{name} has not started it: {busy_with(worker)}"
        if served.state == HELD:
            return f"{name} holds it back: a barrier has not ended there, or {served.id.caller} reads no answers"
        if served.state == UNFINISHED:
            return f"{name}.{short(served.function)} has returned a future that is not done{_since(served.seconds)}"
        says = f"{name} has been in {_where(served)}"
        if served.computes is not None:
            says += ", computing" if served.computes else ", asleep"
        if not served.computes and name in {call.caller for call in self.calls}:
            says += f": back on {name}, so this is a cycle if it waits for a lock that is held there"
        return says


def _where(served: ServedCall) -> str:
    """The function, and the line of the program if it is known."""
    function, place = short(served.function), served.place
    if place is None:
        return f"`{function}`{_for(served.seconds)}"
    if place.function == function.rpartition(".")[2]:
        return f"{place} `{function}`{_for(served.seconds)}"
    return f"`{function}`{_for(served.seconds)}, now at {place} `{place.function}`"


def _state_of(served: ServedCall | None) -> str:
    if served is None:
        return UNKNOWN
    return QUEUED_THERE if served.state in (QUEUED, HELD) else RUNNING_THERE


def explain(call: AwaitedCall, ask: Ask) -> Reason:
    """Why a call has no answer yet."""
    chain = _Chain(ask)
    clauses, state = chain.follow(call.id)
    head = f"{call.id.caller} waits for {_target(call)}"
    return Reason(call.id, call.seconds, _joined(head, clauses), state, chain.calls, chain.is_cycle)


def _joined(head: str, clauses: Sequence[str]) -> str:
    text = head
    for clause in clauses:
        # What continues the sentence, and what ends it.
        text += f", {clause}" if clause.startswith("which ") else f": {clause}"
    return text


def reasons(answers: dict[str, Answer]) -> list[Reason]:
    """Why calls of a job have no answers: the calls that threads wait for and no other call made, oldest first."""
    waited = [
        call
        for answer in answers.values()
        if isinstance(answer, Snapshot)
        for call in answer.awaited
        if call.parent is None and not call.system
    ]
    waited.sort(key=lambda call: -call.seconds)
    found: list[Reason] = []
    for call in waited:
        found.append(explain(call, lambda name: answers[name]))
    return found


def doings(answer: Answer, ask: Ask) -> str:
    """What a worker does, in a sentence: for those who wait for it without a call, in a barrier or in ``shutdown``."""
    name = answer.name
    if isinstance(answer, Silence):
        return f"{name} {answer.reason}"
    own = [call for call in answer.awaited if call.parent is None and call.is_waited_for and not call.system]
    if own:
        return explain(max(own, key=lambda call: call.seconds), ask).sentence
    running = [call for call in answer.served if not call.system]
    if answer.shutting_down is None and answer.main is not None and answer.main.place is not None:
        place = answer.main.place
        doing = {True: ", computing", False: ", asleep", None: ""}[answer.main.computes]
        return f"the main thread of {name} is in {place} `{place.function}`{doing}"
    if running:
        oldest = max(running, key=lambda call: call.seconds or 0.0)
        return f"{name} runs `{short(oldest.function)}`{_for(oldest.seconds)} for {oldest.id.caller}"
    calls = [call for call in answer.awaited if not call.system]
    if calls:
        return explain(max(calls, key=lambda call: call.seconds), ask).sentence
    if answer.barrier:
        return f"{name} waits for {listed(answer.barrier)}"
    return f"{name} has nothing to do"


def brief(answer: Answer) -> str:
    """What a worker does, in a few words."""
    if isinstance(answer, Silence):
        return answer.reason
    parts = []
    awaited = [call for call in answer.awaited if not call.system and (call.is_waited_for or call.parent is None)]
    if awaited:
        parts.append(f"waits for {_target(max(awaited, key=lambda call: call.seconds))}{_more(awaited)}")
    running = [call for call in answer.served if not call.system and call.state not in (QUEUED, HELD)]
    if running:
        oldest = max(running, key=lambda call: call.seconds or 0.0)
        parts.append(f"runs `{short(oldest.function)}`{_since(oldest.seconds)} for {oldest.id.caller}{_more(running)}")
    if answer.shutting_down is not None:
        others = f" for {listed(answer.barrier)}" if answer.barrier else ""
        parts.append(f"waits in shutdown ({seconds_text(answer.shutting_down)}){others}")
    elif not awaited and answer.main is not None and answer.main.place is not None:
        parts.append(f"main thread {'computes' if answer.main.computes else 'is'} at {answer.main.place}")
    return "; ".join(parts) or "nothing"


def _more(calls: Sequence[object]) -> str:
    return f" and {len(calls) - 1} more" if len(calls) > 1 else ""


def busy_with(worker: Snapshot) -> str:
    """What the threads of a worker are busy with."""
    running = [call for call in worker.served if call.state == "running" and not call.system and not call.waits_for]
    functions = Counter(short(call.function) for call in running).most_common(3)
    names = ", ".join(f"`{function}`" for function, _ in functions)
    some = f"{worker.threads_busy} of {worker.thread_limit} threads are busy"
    return f"{some} with {names}" if names else some


def short(function: str) -> str:
    """A function's name without its module."""
    return function.rpartition(":")[2]


def listed(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def seconds_text(seconds: float) -> str:
    """A duration, for people."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def _target(call: AwaitedCall) -> str:
    return f"{call.id.callee}.{short(call.function)} ({seconds_text(call.seconds)})"


def _age(call: ServedCall | None) -> str:
    return "" if call is None or call.seconds is None else f" ({seconds_text(call.seconds)})"


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f" for {seconds_text(seconds)}"


def _since(seconds: float | None) -> str:
    return "" if seconds is None else f" ({seconds_text(seconds)})"
