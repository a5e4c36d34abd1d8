"""The end of autograd contexts: on every worker that knows a context, and when workers are gone.

Rules that hold here:

- A worker that ends a context tells the workers that it exchanged messages of it with, except the one that told it.
- If the connection to a worker breaks, messages may be lost, so passes with it fail. The contexts stay.
- If the maker of a context is dead, the context ends. If another worker is dead that might have told this one of the
  context's end, its maker is asked.
"""

from __future__ import annotations

import logging

from farprop.errors import ConnectionLostError, UsageError
from farprop.runtime.autograd.abort import PassAborter
from farprop.runtime.autograd.contexts import ContextContainer, maker_of
from farprop.runtime.autograd.messages import PeerCaller, ask
from farprop.wire.message import Method

_log = logging.getLogger(__name__)

_ASK_SECONDS = 20.0


class ContextCleanup:
    """Ends this worker's contexts. Methods may be called from any thread."""

    def __init__(self, own_rank: int, peers: PeerCaller, contexts: ContextContainer, aborter: PassAborter) -> None:
        self._own_rank = own_rank
        self._peers = peers
        self._contexts = contexts
        self._aborter = aborter

    def release(self, context_id: int, told_by: int | None = None) -> None:
        """End a context here, and on every worker that this one exchanged messages of it with, except ``told_by``."""
        context = self._contexts.release(context_id)
        if context is None:
            return
        for worker in context.known - {told_by}:
            self._peers.clean_up(worker, context_id)
        for local in list(context.passes.values()):
            if local.machine.active:
                text = f"Could not find autograd context with id: {context_id}. It has ended, during a backward pass."
                self._aborter.fail(local, UsageError(text))

    def on_connection_lost(self, rank: int) -> None:
        """The connection to a worker broke: messages in flight may be lost, so passes with it fail."""
        for context in self._contexts.all():
            for local in list(context.passes.values()):
                # Our part may be done, but gradients that we sent may be lost. If the pass has ended, this is ignored.
                if rank in local.partners and not local.machine.failed and not local.machine.ended:
                    name = self._peers.name_of_rank(rank)
                    error = ConnectionLostError(f"The connection to {name} was lost during a backward pass.")
                    self._peers.submit(self._aborter.fail, local, error)

    def on_death(self, rank: int) -> None:
        """A worker is dead: its contexts and passes end, and it will not tell others when a context ends."""
        for context in self._contexts.all():
            for pass_id, local in list(context.passes.items()):
                if pass_id.origin == rank and local.machine.active:
                    self._aborter.stop(local)
                    local.undo()
            maker = maker_of(context.id)
            if maker == rank:
                self.release(context.id)
            elif maker != self._own_rank and rank in context.known:
                self._peers.submit(self._ask_maker, context.id, maker)

    def _ask_maker(self, context_id: int, maker: int) -> None:
        """The worker that brought a context here is dead: end the context if its maker does not have it any more."""
        try:
            exists = ask(self._peers, maker, Method.CONTEXT_EXISTS, _ASK_SECONDS, context_id)
        except Exception as error:
            _log.info("%s: can't ask worker %d for context %d: %s", self._peers.label, maker, context_id, error)
            return
        if not exists:
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
