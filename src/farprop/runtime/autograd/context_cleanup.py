"""The end of autograd contexts: on every worker that knows a context, and when workers are gone.

Rules that hold here:

- A worker that ends a context tells the workers that it exchanged messages of it with, except the one that told it.
- The end of a context travels with every request of a later context to such a worker, until one of them is answered.
  If none is within ``_RIDE_SECONDS``, the references' control channel carries it. To end a context twice does no harm.
- If the connection to a worker breaks, messages may be lost, so passes with it fail. The contexts stay.
- If the maker of a context is dead, the context ends. If another worker is dead that might have told this one of the
  context's end, its maker is asked, again and again until it answers or is found to be dead.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from farprop.errors import ConnectionLostError, UsageError
from farprop.runtime.autograd.abort import PassAborter
from farprop.runtime.autograd.contexts import Context, ContextContainer, maker_of
from farprop.runtime.autograd.messages import PeerCaller, ask
from farprop.runtime.first_failure import explained
from farprop.wire.message import MAX_ENDED, Method

_log = logging.getLogger(__name__)

_ASK_SECONDS = 20.0
_ASK_AGAIN_SECONDS = 1.0
_RIDE_SECONDS = 0.02  # most programs make their next call sooner


class EndedContexts:
    """The contexts whose end other workers have to learn, by rank. Methods may be called from any thread.

    They rely on the interpreter's lock: one operation on a dict or a deque is atomic.
    """

    def __init__(self, peers: PeerCaller) -> None:
        self._peers = peers
        self._ended: dict[int, deque[int]] = {}
        self._overdue: dict[int, int] = {}  # by rank: the last id that was there when the timer last ran
        self._timer_is_set = False

    def add(self, rank: int, context_id: int) -> None:
        self._ended.setdefault(rank, deque()).append(context_id)
        if not self._timer_is_set:
            self._set_timer()

    def for_request(self, rank: int) -> Sequence[int]:
        """The contexts that a request to this worker should name."""
        ended = self._ended.get(rank)
        return tuple(ended)[:MAX_ENDED] if ended else ()

    def on_answered(self, rank: int, told: Sequence[int]) -> None:
        """The worker has answered a request that named these contexts."""
        ended = self._ended.get(rank, ())
        for context_id in told:
            try:
                ended.remove(context_id)  # type: ignore[union-attr]
            except (ValueError, AttributeError):
                pass  # another request has told it, or the control channel does

    def _set_timer(self) -> None:
        try:
            self._timer_is_set = True
            self._peers.call_at(time.monotonic() + _RIDE_SECONDS, self._on_timer)
        except BaseException:
            self._timer_is_set = False  # there may be a timer too many now, but not one too few
            raise

    def _on_timer(self) -> None:
        """Send what no request has carried since the timer last ran."""
        self._timer_is_set = False
        overdue, self._overdue = self._overdue, {}
        for rank, ended in list(self._ended.items()):
            last = overdue.get(rank)
            if last in ended:
                self._send(rank, ended, last)
            if ended:
                self._overdue[rank] = ended[-1]
        if self._overdue and not self._timer_is_set:
            self._set_timer()

    def _send(self, rank: int, ended: deque[int], last: int | None) -> None:
        """Send the ids up to ``last`` on the control channel."""
        while ended:
            try:
                context_id = ended.popleft()
            except IndexError:
                return  # another thread was faster
            self._peers.clean_up(rank, context_id)
            if context_id == last:
                return

    def forget(self, rank: int) -> None:
        """A worker is dead."""
        self._ended.pop(rank, None)

    @property
    def is_empty(self) -> bool:
        return not any(self._ended.values())


class ContextCleanup:
    """Ends this worker's contexts. Methods may be called from any thread."""

    def __init__(self, own_rank: int, peers: PeerCaller, contexts: ContextContainer, aborter: PassAborter) -> None:
        self._own_rank = own_rank
        self._peers = peers
        self._contexts = contexts
        self._aborter = aborter
        self.ended = EndedContexts(peers)

    def release(self, context_id: int, told_by: int | None = None) -> None:
        """End a context here, and on every worker that this one exchanged messages of it with, except ``told_by``."""
        context = self._contexts.release(context_id)
        if context is None:
            return
        for worker in context.known - {told_by}:
            self.ended.add(worker, context_id)
        for local in context.all_passes():
            if local.machine.active:
                text = f"Could not find autograd context with id: {context_id}. It has ended, during a backward pass."
                self._aborter.fail(local, UsageError(text))
        context.forget_all()
        self._contexts.ending.pop(context_id, None)

    def release_soon(self, context_id: int) -> None:
        """End a context on a thread of the pool. Takes no lock."""
        self._peers.call_at_lockfree(time.monotonic(), partial(self._peers.submit, self.release, context_id))

    def on_connection_lost(self, rank: int) -> None:
        """The connection to a worker broke: messages in flight may be lost, so passes with it fail."""
        for context in self._contexts.all():
            for local in context.all_passes():
                # Our part may be done, but gradients that we sent may be lost. If the pass has ended, this is ignored.
                if rank in local.partners and not local.machine.ended:
                    name = self._peers.name_of_rank(rank)
                    error = ConnectionLostError(f"The connection to {name} was lost during a backward pass.")
                    error.worker = name
                    self._peers.submit(self._aborter.on_partner_lost, local, explained(error))

    def on_death(self, rank: int) -> None:
        """A worker is dead: its contexts and passes end, and it will not tell others when a context ends."""
        self.ended.forget(rank)
        for context in self._contexts.all():
            maker = maker_of(context.id)
            if maker == rank and not self._peers.is_static:
                # Another process may have the rank by now, and may have made this context: a third one may have brought
                # it here before this worker heard of any of that.
                self._peers.submit(self._ask_maker, context.id, maker)
                continue
            self._stop_passes(context, rank)
            if maker == rank:
                self.release(context.id)
            elif maker != self._own_rank and rank in context.known:
                self._peers.submit(self._ask_maker, context.id, maker)

    def _stop_passes(self, context: Context, origin: int) -> None:
        """The worker that started these passes is dead."""
        for local in context.all_passes():
            if local.id.origin == origin and local.machine.active:
                self._aborter.stop(local)
                local.undo()

    def on_orphaned(self, context_id: int) -> None:
        """A request of a context runs whose caller may have died before: nobody else may tell when the context ends."""
        maker = maker_of(context_id)
        if maker != self._own_rank:
            self._peers.submit(self._ask_maker, context_id, maker)

    def _ask_maker(self, context_id: int, maker: int) -> None:
        """The worker that brought a context here is dead, or the one that had the maker's rank: end the context if its
        maker does not have it any more.

        If the maker can't be asked, it may be dead, too, and this worker may have no connection to it that would tell.
        """
        context = self._contexts.get(context_id)
        if context is None:
            return  # it has ended meanwhile, with its maker
        try:
            exists = ask(self._peers, maker, Method.CONTEXT_EXISTS, _ASK_SECONDS, context_id)
        except Exception as error:
            _log.info("%s: can't ask worker %d for context %d: %s", self._peers.label, maker, context_id, error)
            if self._peers.is_dead(maker):
                self._stop_passes(context, maker)
                self.release(context_id)
                return
            self._peers.suspect(maker)
            again = partial(self._peers.submit, self._ask_maker, context_id, maker)
            self._peers.call_at(time.monotonic() + _ASK_AGAIN_SECONDS, again)
            return
        if not exists:
            self._stop_passes(context, maker)
            self.release(context_id)

    def on_context_exists(self, caller: int, context_id: int) -> bool:
        """Whether a context of ours still exists. If so, the caller will be told when it ends."""
        context = self._contexts.meet(context_id)
        if context is not None:
            context.known.add(caller)
        return context is not None

    def concerned_with(self, rank: int) -> bool:
        """Whether the death of a worker would change anything here."""
        return any(rank in context.known or maker_of(context.id) == rank for context in self._contexts.all())
