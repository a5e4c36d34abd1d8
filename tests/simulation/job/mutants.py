"""Mutants of farprop's runtime, to see that whole jobs kill them. Each replaces one method.

Whole jobs have to kill some of the mutants of the single protocols, too: ``SHARED`` names them.
"""

from __future__ import annotations

from typing import Any

from farprop.distributed.native.group_state import CollectiveCall, GroupState
from farprop.distributed.native.matching import MessageMatcher
from farprop.errors import ConnectionLostError
from farprop.protocol.pending_calls import PendingCalls
from farprop.protocol.served_calls import ServedCalls
from farprop.runtime import liveness
from farprop.runtime.autograd.abort import PassAborter
from farprop.runtime.autograd.context_cleanup import ContextCleanup, EndedContexts
from farprop.runtime.autograd.driver import BackwardDriver
from farprop.runtime.autograd.engine import LocalPass
from farprop.runtime.calls import Calls
from farprop.runtime.client_connection import ClientConnection
from farprop.runtime.liveness import PeerInstances
from farprop.runtime.membership import Membership
from farprop.runtime.peers import Peers
from farprop.runtime.references.control_sender import ControlSender
from farprop.runtime.references.owned_values import ValueSlot
from farprop.runtime.references.rref_context import RRefContext
from farprop.runtime.rendezvous import Places
from farprop.runtime.server import PendingReply, Server
from farprop.runtime.watch import Watch
from farprop.wire.message import cancel
from tests.simulation.harness import mutant

SHARED = (
    "dead-holders-listed",
    "dead-receivers-waited-for",
    "accepted-is-gone",
    "doubtful-ends-silently",
)


def job_mutant(owner: Any, method: str) -> Any:
    return mutant(owner, method, kind="job")


# Calls

_lost_error = ClientConnection._lost_error
_call_sync = Calls.call_sync
_accept_request = Server._accept_request
_lost = PendingCalls.lost


@job_mutant(PendingCalls, "lost")
def lost_calls_never_end(self: PendingCalls[Any]) -> list[Any]:
    """A broken connection ends all of its calls but the last one."""
    return _lost(self)[:-1]


@job_mutant(ClientConnection, "_lost_error")
def lost_calls_said_not_to_have_run(self: ClientConnection) -> ConnectionLostError:
    """The caller is told that the function has not run, though its request was sent."""
    error = _lost_error(self)
    error.may_have_run = False
    return error


@job_mutant(Calls, "call_sync")
def lost_calls_made_again(self: Calls, *args: Any) -> Any:
    """A call whose connection breaks is made again, whether it has run or not."""
    try:
        return _call_sync(self, *args)
    except ConnectionLostError:
        return _call_sync(self, *args)


@job_mutant(Server, "_accept_request")
def late_requests_run(self: Server, connection: Any, message: Any, counted_from: float) -> None:
    """A request runs although its caller has given it up."""
    _accept_request(self, connection, message, counted_from + 1000.0)


@job_mutant(PendingReply, "is_cancelled")
@property
def cancelled_requests_run(self: PendingReply) -> bool:
    """A request runs although its caller has cancelled it."""
    return False


@job_mutant(ServedCalls, "answered")
def cancelled_requests_kept(self: ServedCalls[Any], call_id: int) -> None:
    """A worker remembers for ever that a call was cancelled."""
    self.open.pop(call_id, None)


@job_mutant(ClientConnection, "_end_cancelled")
def cancelled_calls_never_end(self: ClientConnection, call: Any, call_id: int, error: Any) -> None:
    """The callee is told, and the caller is not."""
    self._connection.send(cancel(call_id))


# References


@job_mutant(RRefContext, "route_lost")
def lost_messages_forgotten(self: RRefContext, route: object, peer: int) -> None:
    """References in messages on a broken connection are neither revoked nor recalled."""


@job_mutant(RRefContext, "died")
def deaths_kept_from_references(self: RRefContext, rank: int, instance: str | None = None) -> bool:
    """The references' state machine does not learn that a worker has died."""
    return True


@job_mutant(ControlSender, "unanswered")
def batches_sent_once(self: ControlSender, peer: int) -> None:
    """A batch without a reply is not sent again."""


@job_mutant(ValueSlot, "_finish")
def errors_kept_from_values(self: ValueSlot, value: Any, error: BaseException | None) -> None:
    """A value that can't be made is awaited for ever."""
    if error is None:
        _finish(self, value, error)


_finish = ValueSlot._finish

# Passes, and their contexts


@job_mutant(ContextCleanup, "on_connection_lost")
def passes_wait_for_lost_messages(self: ContextCleanup, rank: int) -> None:
    """A pass does not fail when gradients may be lost."""


@job_mutant(ContextCleanup, "on_death")
def contexts_of_the_dead_kept(self: ContextCleanup, rank: int) -> None:
    """Contexts and passes of a dead worker stay."""


@job_mutant(EndedContexts, "_on_timer")
def ends_wait_for_a_request(self: EndedContexts) -> None:
    """Nobody is told that a context has ended, unless another request goes there."""
    self._timer_is_set = False


@job_mutant(PassAborter, "_ask_all")
def failed_passes_kept(self: PassAborter, abort: Any, workers: Any) -> None:
    """Other workers are not asked to undo a failed pass."""


@job_mutant(LocalPass, "undo")
def gradients_of_failed_passes_kept(self: LocalPass) -> None:
    """A failed pass leaves its gradients in the context."""


@job_mutant(BackwardDriver, "on_credit")
def returned_credit_lost(self: BackwardDriver, caller: int, data: bytes) -> None:
    """The origin ignores credit that comes in a message of its own."""


@job_mutant(PassAborter, "_report")
def failures_not_reported_to_the_origin(self: PassAborter, *args: Any) -> None:
    """The origin is not told that a pass failed on another worker."""


# Membership


@job_mutant(Membership, "refresh")
def newcomers_unknown(self: Membership) -> None:
    """Workers that join later are not found."""


@job_mutant(Places, "leave")
def leavers_stay_listed(self: Places) -> None:
    """A worker that leaves stays in the store's list, so it looks as if it had died."""


@job_mutant(Watch, "died")
def deaths_not_told(self: Watch, rank: int, instance: str | None, reason: str, unless: str = "") -> None:
    """Callbacks of on_failure are not called."""


@job_mutant(liveness, "is_certain")
def silence_taken_for_death(error: BaseException | None) -> bool:
    """A worker that can't be reached for a moment is taken for dead."""
    return True


@job_mutant(PeerInstances, "meet")
def replacements_unnoticed(self: PeerInstances, rank: int, instance: str) -> None:
    """A process that has taken the rank of a dead one is taken for it."""
    self._instances[rank] = instance


# Groups


@job_mutant(MessageMatcher, "post")
def early_messages_forgotten(self: MessageMatcher, recv: Any) -> None:
    """A message that came before its receive was posted is not found."""
    with self._lock:
        self._posted.append(recv)


_begin = GroupState.begin


@job_mutant(GroupState, "begin")
def fingerprints_alike(self: GroupState, fingerprint: str, seconds: float) -> CollectiveCall:
    """Nobody notices that a rank calls another collective."""
    return _begin(self, "a collective", seconds)


# Several parts together


@job_mutant(Peers, "open_work")
@property
def own_calls_are_work(self: Peers) -> int:
    """Farprop's own calls count as work, also those that end a round of the shutdown."""
    return self.open_calls
