"""This worker's part in distributed autograd: its contexts, and the passes that run through them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable

import torch

from farprop.errors import BackwardError, ConnectionLostError, FarpropError, RpcTimeoutError, UsageError
from farprop.ids import unguessable
from farprop.protocol.credit import NONE
from farprop.protocol.pass_messages import PassHead, unpack_head
from farprop.protocol.passes import ROOTS, Ended, PassId, Share, Survey, Target
from farprop.runtime.gradients.contexts import COUNTER_BITS, Context, Contexts
from farprop.runtime.gradients.execution import Gradient
from farprop.runtime.gradients.failing import Failures
from farprop.runtime.gradients.graph import Edge
from farprop.runtime.gradients.local import LocalPass
from farprop.runtime.gradients.origins import Origin, Origins
from farprop.runtime.gradients.payload import encode_gradients, restored
from farprop.runtime.gradients.performing import Performer, seconds_to
from farprop.runtime.gradients.post import Post, answer, ask
from farprop.runtime.gradients.records import PASS, recorded
from farprop.wire.codec import Encoded

_log = logging.getLogger("farprop.autograd")

_SURVEY = b"farprop.runtime.gradients.calls:survey"
_EXISTS = b"farprop.runtime.gradients.calls:exists"
_ASK_SECONDS = 20.0


class GradientSpace:
    """Methods may be called from any thread."""

    def __init__(self, me: int, post: Post) -> None:
        self.me = me
        # In a restricted job nobody takes part in the passes of others' contexts.
        self.contexts = Contexts(me, unguessable(COUNTER_BITS) if post.dialect.restricted else None)
        self.origins = Origins()
        self.failures = Failures(me, post, self.contexts, self.origins)
        self._post = post
        self._performer = Performer(
            me, post, lambda local, action: self.origins.tell(local.id, action), self.failures.fail
        )
        self._numbers = itertools.count(1)

    # Starting a pass

    def backward(
        self,
        context: Context,
        roots: tuple[Edge, ...],
        gradients: list[Gradient],
        keep_graph: bool,
        fast: bool,
        timeout: float,
    ) -> None:
        """Run a pass from these edges with these gradients. Returns when it has ended everywhere."""
        pass_id = PassId(self.me, next(self._numbers))
        local = LocalPass(context, self.me, pass_id, fast, keep_graph, torch.is_anomaly_enabled(), roots)
        origin = self.origins.start(pass_id, timeout)
        context.passes[pass_id] = local
        try:
            with recorded(PASS):
                self._performer.start(local, gradients, origin.deadline)
                self._wait(local, origin)
        except BaseException as error:
            self.failures.abort_everywhere(local)
            if origin.error is None or not isinstance(error, Exception):
                raise
            raise origin.error from None
        finally:
            self.origins.end(pass_id)
            context.passes.pop(pass_id, None)

    def _wait(self, local: LocalPass, origin: Origin) -> None:
        while True:
            action = origin.next(self._post.blocked)
            if action is None:
                raise RpcTimeoutError(_out_of_time(local, origin.timeout))
            if isinstance(action, Ended):
                return
            if isinstance(action, Survey):
                used = self._survey(local, origin.deadline)
                with local.lock:
                    actions = local.machine.surveyed(used)
                self._performer.perform(local, actions, deadline=origin.deadline, waits=True)

    def _survey(self, local: LocalPass, deadline: float) -> dict[int, frozenset[int]]:
        """All sends that the roots reach, by worker."""
        found: dict[int, set[int]] = {}
        news = local.machine.reach([ROOTS])
        while news:
            asked: dict[int, list[int]] = {}
            for worker, pair in news:
                pairs = found.setdefault(worker, set())
                if pair not in pairs:
                    pairs.add(pair)
                    asked.setdefault(worker, []).append(pair)
            news = set()
            for worker, new_pairs in asked.items():
                news |= self._ask_reach(local, worker, new_pairs, deadline)
        return {worker: frozenset(pairs) for worker, pairs in found.items()}

    def _ask_reach(self, local: LocalPass, worker: int, pairs: list[int], deadline: float) -> set[Target]:
        if worker == self.me:
            return local.machine.reach(pairs)
        head = self._performer.head(local, 0, Share(NONE, {}))
        return {Target(*target) for target in ask(self._post, worker, _SURVEY, seconds_to(deadline), head, pairs)}

    # Messages of passes that come

    def propagate(self, sender: int, data: bytes, gradients: tuple[Gradient, ...]) -> Encoded:
        """Gradients came; the answer has those that go back to where they came from."""
        head = unpack_head(data)
        local = self._local(head)
        local.partners.add(sender)
        try:
            back = self._performer.serve(local, head.pair, restored(gradients), head.share, sender)
        except BaseException as error:
            self.failures.stop(local)
            if isinstance(error, BackwardError):
                _log.warning("worker %d: a backward pass failed: %s", self.me, error, exc_info=error)
            raise
        return encode_gradients(self._post.dialect, tuple(back))

    def _local(self, head: PassHead) -> LocalPass:
        context = self.contexts.find(head.context_id)
        with context.lock:
            local = context.passes.get(head.pass_id)
            if local is not None:
                return local
            if head.pass_id in context.aborted or head.pass_id.origin == self.me:
                raise FarpropError(f"The backward pass of context {context.id} has ended with an error.")
            for old in [i for i in context.passes if i.origin == head.pass_id.origin and i.number < head.oldest]:
                del context.passes[old]
        local = LocalPass(context, self.me, head.pass_id, head.fast, head.keep_graph, head.anomaly)
        with context.lock:
            if head.pass_id in context.aborted:
                raise FarpropError(f"The backward pass of context {context.id} has ended with an error.")
            return context.passes.setdefault(head.pass_id, local)

    def give_back(self, data: bytes) -> None:
        head = unpack_head(data)
        local = self.contexts.find(head.context_id).passes.get(head.pass_id)
        if local is not None:  # else it has failed meanwhile
            with local.lock:
                actions = local.machine.returned(head.share)
            self._performer.perform(local, actions)

    def release_sources(self, data: bytes, used: Iterable[int]) -> None:
        head = unpack_head(data)
        local = self._local(head)
        try:
            with local.lock:
                actions = local.machine.release(used, head.share)
            self._performer.perform(local, actions)
        except BaseException:
            self.failures.stop(local)
            raise

    def survey(self, data: bytes, pairs: list[int]) -> Encoded:
        local = self._local(unpack_head(data))
        with local.lock:
            return answer(self._post.dialect, [tuple(target) for target in local.machine.reach(pairs)])

    # The ends of contexts and workers

    def release(self, context_id: int, told_by: int = -1) -> None:
        """End a context here, and have every worker that this one knows of it end it too, but for ``told_by``."""
        context = self.contexts.release(context_id)
        if context is None:
            return
        for worker in context.known - {told_by}:
            self._post.clean_up(worker, context_id)
        for local in list(context.passes.values()):
            if local.machine.active:
                text = f"Could not find autograd context with id: {context_id}. It has ended, during a backward pass."
                self.failures.fail(local, UsageError(text))

    def lost(self, rank: int) -> None:
        """The connection to a worker broke: what was on its way may be lost."""
        for context in self.contexts.all():
            for local in list(context.passes.values()):
                # Our part may be done, but what we sent may be lost with it. If the pass has ended, nobody listens.
                if rank in local.partners and not local.machine.failed and not local.machine.ended:
                    name = self._post.name_of_rank(rank)
                    error = ConnectionLostError(f"The connection to {name} was lost during a backward pass.")
                    self._post.submit(self.failures.fail, local, error)

    def died(self, rank: int) -> None:
        """A worker is dead: its contexts and passes have ended, and it passes no clean-up on any more."""
        for context in self.contexts.all():
            for pass_id, local in list(context.passes.items()):
                if pass_id.origin == rank and local.machine.active:
                    self.failures.stop(local)
                    local.undo()
            maker = context.id >> COUNTER_BITS
            if maker == rank:
                self.release(context.id)
            elif maker != self.me and rank in context.known:
                self._post.submit(self._ask_maker, context.id, maker)

    def _ask_maker(self, context_id: int, maker: int) -> None:
        """Whoever brought a context here is gone. If its maker does not have it any more either, it has ended."""
        try:
            exists = ask(self._post, maker, _EXISTS, _ASK_SECONDS, context_id, self.me)
        except Exception as error:
            _log.info("can't ask worker %d for context %d: %s", maker, context_id, error)
            return
        if not exists:
            self.release(context_id)

    def exists(self, context_id: int, asker: int) -> Encoded:
        """Whether a context of ours still exists. If so, clean-up goes to whoever asks, too."""
        context = self.contexts.meet(context_id)
        if context is not None:
            context.known.add(asker)
        return answer(self._post.dialect, context is not None)

    def concerned_with(self, rank: int) -> bool:
        """Whether the death of a worker would change anything here."""
        return any(rank in context.known or context.id >> COUNTER_BITS == rank for context in self.contexts.all())

    def debug_info(self) -> dict[str, int]:
        """Counts, under torch's names."""
        passes = [local for context in self.contexts.all() for local in list(context.passes.values())]
        return {
            "num_current_backward_passes": sum(local.machine.active for local in passes),
            "num_autograd_contexts": len(self.contexts),
        }


def _out_of_time(local: LocalPass, timeout: float) -> str:
    text = f"The backward pass of context {local.context.id} did not end within {timeout:.1f} s."
    if local.fast:
        return (
            f"{text} In FAST mode it waits for the gradients of every tensor that was sent, also of those whose "
            "results were not used. Use mode='smart', or use all results."
        )
    return f"{text} A worker is slow or stands still. Pass a larger timeout to backward, or 0 for none."
