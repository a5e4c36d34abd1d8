"""What the workers of a job said, put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from farprop.protocol import waits
from farprop.protocol.inspection import (
    Answer,
    AwaitedCall,
    CallId,
    Pass,
    Reference,
    ServedCall,
    Silence,
    Snapshot,
    roots,
)
from farprop.protocol.waits import Reason


@dataclass(frozen=True)
class CallRow:
    """A call, as both of its ends know it."""

    id: str
    function: str
    caller: str
    callee: str
    state: str
    """``running``, ``queued``, ``held`` or ``unfinished`` at the callee; ``awaited`` if only the caller knows of it."""
    seconds: float | None
    """Its age."""
    left: float | None
    """The seconds until its deadline; None if it has none."""
    thread: str
    """The callee's thread that runs it, else the caller's."""
    context: int | None
    root: str
    """The id of the call at the beginning of the chain of nested calls that it is part of."""
    place: str
    """Where the callee's thread is in the program."""
    system: bool


class Job:
    """The workers of a job, and what each of them said.

    Args:
        id: the random name of the job.
        answers: by worker, what it said, or why it said nothing.
        name: the name of the job, for people.
    """

    def __init__(self, id: str, answers: dict[str, Answer], name: str = "") -> None:
        self.id = id
        self.name = name or id[:8]
        self.answers = answers

    @property
    def workers(self) -> list[Answer]:
        """The workers, by rank: a ``Snapshot`` each, or a ``Silence`` with a reason."""
        return sorted(self.answers.values(), key=lambda answer: answer.member.rank)

    @property
    def snapshots(self) -> list[Snapshot]:
        """The workers that answered, by rank."""
        return [answer for answer in self.workers if isinstance(answer, Snapshot)]

    @property
    def calls(self) -> list[CallRow]:
        """The calls of the program, oldest first."""
        return [row for row in self.all_calls if not row.system]

    @property
    def all_calls(self) -> list[CallRow]:
        """As ``calls``, with farprop's own."""
        awaited: dict[CallId, AwaitedCall] = {}
        served: dict[CallId, ServedCall] = {}
        for snapshot in self.snapshots:
            awaited.update({call.id: call for call in snapshot.awaited})
            served.update({call.id: call for call in snapshot.served})
        first = roots(self.answers)
        rows = [_row(call, awaited.get(call), served.get(call), first[call]) for call in {**awaited, **served}]
        return sorted(rows, key=lambda row: -(row.seconds or 0.0))

    @property
    def references(self) -> list[tuple[str, Reference]]:
        """The references with the workers that have them, those to the largest values first."""
        found = [(snapshot.name, reference) for snapshot in self.snapshots for reference in snapshot.references]
        return sorted(found, key=lambda pair: -pair[1].nbytes)

    @property
    def passes(self) -> list[tuple[str, Pass]]:
        """The backward passes, with the workers that take part in them."""
        return [(snapshot.name, found) for snapshot in self.snapshots for found in snapshot.passes]

    def why(self) -> list[Reason]:
        """Why calls have no answers yet.

        Returns:
            A reason for each call that no other call has made, oldest first.
        """
        return waits.reasons(self.answers)

    def doings(self) -> dict[str, str]:
        """What each worker does.

        Returns:
            A sentence for each, by name.
        """
        return {answer.name: waits.doings(answer, self.answers.__getitem__) for answer in self.workers}

    def to_builtins(self) -> dict[str, Any]:
        """The job as dictionaries, lists and numbers, as ``--json`` prints it.

        Returns:
            The dictionary.
        """
        silent = [answer for answer in self.workers if isinstance(answer, Silence)]
        return {
            "id": self.id,
            "name": self.name,
            "workers": msgspec.to_builtins(self.snapshots),
            "silent": msgspec.to_builtins(silent),
        }


def _row(call: CallId, awaited: AwaitedCall | None, served: ServedCall | None, root: CallId) -> CallRow:
    known = awaited or served
    assert known is not None
    seconds = awaited.seconds if awaited is not None else None if served is None else served.seconds
    return CallRow(
        id=str(call),
        function=known.function,
        caller=call.caller,
        callee=call.callee,
        state="awaited" if served is None else served.state,
        seconds=seconds,
        left=known.left,
        thread=served.thread if served is not None and served.thread else awaited.thread if awaited else "",
        context=known.context,
        root=str(root),
        place=str(served.place) if served is not None and served.place is not None else "",
        system=known.system,
    )
