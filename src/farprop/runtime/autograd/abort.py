"""Aborts failed backward passes: the origin is notified, every worker undoes the pass, and the origin raises.

Rules that hold here:

- A worker that notices a failure stops its part of the pass, and reports the failure to the origin. It undoes nothing
  by itself, because the pass may have ended.
- Only the origin knows whether the pass has ended. It asks every worker that may know the pass to undo it. If a worker
  on the way is gone, the origin asks all workers.
- The thread that called ``backward`` waits for them for a moment. Workers that are stopped or slow are asked in the
  background, and the next pass of the context waits for that: to undo a pass later would undo the next one, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from farprop.errors import ConnectionLostError, FarpropError, RpcTimeoutError, UsageError
from farprop.protocol.backward import PassId
from farprop.runtime.autograd.contexts import Context, ContextContainer
from farprop.runtime.autograd.engine import LocalPass
from farprop.runtime.autograd.messages import OneWayCall, PeerCaller, ask
from farprop.wire.message import Method

_log = logging.getLogger(__name__)

_ABORT_SECONDS = 5.0  # how long one worker is asked
_WAIT_SECONDS = 0.5  # how long the caller of ``backward`` waits for all of them
_TRIES = 3


class PassAbort:
    """The abort of a pass. The context's lock guards the two sets."""

    def __init__(self, local: LocalPass, own_rank: int) -> None:
        self.local = local
        self.asked = {own_rank}
        self.unanswered = {own_rank}  # with our own rank until all workers that we know are asked
        self.ended = threading.Event()


class PassAborter:
    """Fails and undoes passes on one worker. ``fail_waiter`` fails the caller that waits for a pass started here."""

    def __init__(
        self,
        own_rank: int,
        peers: PeerCaller,
        contexts: ContextContainer,
        fail_waiter: Callable[[PassId, BaseException], None],
    ) -> None:
        self._own_rank = own_rank
        self._peers = peers
        self._contexts = contexts
        self._fail_waiter = fail_waiter

    def fail(self, local: LocalPass, error: BaseException) -> None:
        """A pass failed on this worker: stop it here, and report the failure to its origin."""
        if self.stop(local):
            self._tell_origin(local, error)

    def on_partner_lost(self, local: LocalPass, error: BaseException) -> None:
        """The connection to a worker that takes part was lost.

        That is reported also if the pass has stopped here before: maybe only the lost worker was told, in an answer.
        """
        with local.lock:
            local.machine.fail()
            has_failed = local.machine.failed
        is_aborted = local.id.origin == self._own_rank and local.id.number in local.context.aborts
        if has_failed and not is_aborted:
            self._tell_origin(local, error)

    def _tell_origin(self, local: LocalPass, error: BaseException) -> None:
        if local.id.origin == self._own_rank:
            self._fail_waiter(local.id, error)
        else:
            failure = self._peers.dialect.encode_failure(error, self._peers.name_of_rank(self._own_rank))
            # On a thread of the pool: this may be the thread that polls, and the origin may have to be dialled.
            self._peers.submit(self._report, local.id, bytes(failure.payload), _TRIES)

    def _report(self, pass_id: PassId, failure: bytes, tries: int) -> None:
        def again(error: Exception) -> None:
            _log.info("%s: can't tell worker %d of a failed pass: %s", self._peers.label, pass_id.origin, error)
            if tries > 1:
                self._report(pass_id, failure, tries - 1)

        try:
            args = self._peers.dialect.encode_call(None, (*pass_id, failure), {})
            call = OneWayCall(self._peers, again)
            self._peers.send_method(pass_id.origin, Method.PASS_FAILED, args, call, system=True)
        except (FarpropError, OSError) as error:
            again(error)

    def stop(self, local: LocalPass) -> bool:
        """Stop a pass on this worker; False if it has stopped or ended before."""
        with local.lock:
            return local.machine.fail()

    def abort_everywhere(self, local: LocalPass) -> None:
        """At the origin, have every worker that may know the pass undo it, and wait a moment until all have."""
        self.stop(local)
        local.undo()
        context = local.context
        abort = PassAbort(local, self._own_rank)
        with context.lock:
            context.aborts[local.id.number] = abort
        self._ask_all(abort, context.known | local.partners)
        self._on_answer(abort, self._own_rank)
        if not abort.ended.is_set():
            with self._peers.blocked():
                abort.ended.wait(_WAIT_SECONDS)

    def _ask_all(self, abort: PassAbort, workers: Iterable[int]) -> None:
        """Ask those of these workers that were not asked yet, all at the same time."""
        with abort.local.context.lock:
            new = set(workers) - abort.asked
            abort.asked |= new
            abort.unanswered |= new
        for worker in new:
            self._peers.submit(self._ask, abort, worker)

    def _ask(self, abort: PassAbort, worker: int) -> None:
        try:
            self._ask_all(abort, self._ask_to_abort(worker, abort.local))
        finally:
            self._on_answer(abort, worker)

    def _on_answer(self, abort: PassAbort, worker: int) -> None:
        context = abort.local.context
        with context.lock:
            abort.unanswered.discard(worker)
            if abort.unanswered:
                return
            context.own_passes.pop(abort.local.id.number, None)
            context.aborts.pop(abort.local.id.number, None)
        abort.ended.set()

    def _ask_to_abort(self, worker: int, local: LocalPass) -> Iterable[int]:
        """Ask a worker to undo the pass; returns other workers that may know it: all of them if the worker is gone."""
        end = time.monotonic() + _ABORT_SECONDS
        for _ in range(_TRIES):
            try:
                timeout = max(0.05, end - time.monotonic())
                return list(ask(self._peers, worker, Method.ABORT, timeout, local.context.id, *local.id))
            except ConnectionLostError as error:
                _log.info("%s: can't tell worker %d that a pass failed: %s", self._peers.label, worker, error)
            except UsageError:
                return ()  # this worker has shut down
            except Exception as error:
                _log.warning("%s: could not tell worker %d that a pass failed: %s", self._peers.label, worker, error)
                break
        return self._peers.ranks()

    def await_aborts(self, context: Context, deadline: float | None) -> None:
        """Wait until earlier passes of a context, which failed here, are undone everywhere.

        Raises:
            RpcTimeoutError: they are not at the deadline.
        """
        with context.lock:
            aborts = list(context.aborts.values())
        for abort in aborts:
            with self._peers.blocked():
                if abort.ended.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    continue
            with context.lock:
                late = ", ".join(map(self._peers.name_of_rank, sorted(abort.unanswered)))
            raise RpcTimeoutError(
                f"An earlier backward pass of context {context.id} failed, and {late} did not undo it in time: it is "
                "slow or stopped. Pass a larger timeout to backward, or use a new context."
            )

    def on_pass_failed(self, caller: int, origin: int, number: int, failure: bytes) -> None:
        """Another worker reports that a pass of ours failed."""
        self._fail_waiter(PassId(origin, number), self._peers.dialect.decode_failure(failure))

    def on_abort(self, caller: int, context_id: int, origin: int, number: int) -> list[int]:
        """The origin aborts a pass: undo it here. Returns the other workers that may know the pass."""
        pass_id = PassId(origin, number)
        try:
            context = self._contexts.find(context_id)
        except UsageError:
            return []
        with context.lock:
            context.aborted.add(pass_id)
            local = context.passes.pop(pass_id, None)
            context.wanted.pop(pass_id, None)
        if local is None:
            return sorted(context.known)
        self.stop(local)
        local.undo()
        return sorted(context.known | local.partners)
