"""Autograd contexts: one worker's part of a forward pass, and its gradients."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from farprop.errors import ProtocolError, UsageError
from farprop.ids import GlobalId
from farprop.locks import make_lock
from farprop.protocol.backward import ROOTS, PassId, Target
from farprop.runtime.autograd import anomaly
from farprop.runtime.autograd.graph import Edge, Plan, Reach, reach_from
from farprop.runtime.autograd.nodes import SendRpcBackward, make_receive
from farprop.runtime.recorder import recorder
from farprop.wire.codec import decode_with
from farprop.wire.message import CONTEXT, AutogradHead, Message

if TYPE_CHECKING:
    from farprop.runtime.autograd.abort import PassAbort
    from farprop.runtime.autograd.engine import LocalPass
    from farprop.runtime.autograd.grad import Wanted

_R = TypeVar("_R")
COUNTER_BITS = 48
_REMEMBERED = 10_000

current_context: ContextVar[Context | None] = ContextVar("farprop_autograd_context", default=None)


def maker_of(context_id: int) -> int:
    """The rank of the worker that made a context."""
    return context_id >> COUNTER_BITS


def global_id_of(context_id: int) -> GlobalId:
    """The id of a context, as operations between workers have it."""
    return GlobalId(maker_of(context_id), context_id & (1 << COUNTER_BITS) - 1)


def context_id_of(global_id: GlobalId) -> int:
    return (global_id.created_on << COUNTER_BITS) + global_id.local_id


class Context:
    """One autograd context on one worker. Methods may be called from any thread."""

    def __init__(self, context_id: int, own_rank: int, new_message_id: Callable[[], int]) -> None:
        self.id = context_id
        self.own_rank = own_rank
        self.sends: dict[int, SendRpcBackward] = {}
        self.receives: dict[int, Any] = {}
        self.cancelled: set[int] = set()  # sends of calls that were cancelled: FAST passes don't wait for them
        # While somebody listens to events, for drawings: the bytes of a message's tensors and when it was encoded; when
        # one had arrived and was decoded.
        self.sent: dict[int, tuple[int, float]] = {}
        self.arrived: dict[int, float] = {}
        self.known: set[int] = set()  # ranks of the workers that have to be told when the context ends
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.passes: dict[PassId, LocalPass] = {}
        self.wanted: dict[PassId, Wanted] = {}  # by pass, the tensors of this worker whose gradients it computes
        # The numbers of the passes that were started here, until they have ended. Not a set: ``del`` is no call, so an
        # interrupt can't come between it and what belongs to it.
        self.own_passes: dict[int, None] = {}
        self.aborted: set[PassId] = set()
        self.aborts: dict[int, PassAbort] = {}  # by number: passes that failed here and are not undone everywhere yet
        self.lock = make_lock("context")
        self.is_released = False
        self.manager: Callable[[], object] | None = (
            None  # a weak reference to the ``with`` statement's, if there is one
        )
        # Calls that change gradients on other workers, and that nobody has waited for yet.
        self.settling: dict[torch.futures.Future[Any], None] = {}
        self.call_traces: dict[int, str] = {}  # in anomaly mode, by send: the calls that led to it
        self._new_message_id = new_message_id
        self._reaches: dict[int, Reach] = {}
        self._plan: tuple[tuple[int, int], tuple[Edge, ...], Plan] | None = None
        self._forgotten = 0  # how many sends were removed

    # Messages

    def attach(
        self,
        message: Message,
        to: int,
        tensors: Sequence[torch.Tensor] | None,
        answers: str = "",
        placed: bool = False,
        ended: Sequence[int] = (),
    ) -> None:
        """Add a message to this context before it is sent, unless the context has ended.

        Args:
            message: the message.
            to: the rank that it goes to.
            tensors: its tensors that require grad; None where grad is off.
            answers: for an answer in anomaly mode, the call trace of its call.
            placed: whether tensors change devices on the way.
            ended: for a request, contexts whose end the receiver should learn.
        """
        if self.settling:
            self.settle()
        if to != self.own_rank:
            self.known.add(to)
        # In this order: whoever releases the context now tells the receiver. If it is released already, by its maker
        # whose call was lost while the function goes on here, nobody would.
        if self.is_released:
            return
        message_id = 0
        if tensors:
            message_id = self._new_message_id()
            self.sends[message_id] = SendRpcBackward(tensors, placed)
            self._forget_if_released()
            if recorder.is_on:
                self.sent[message_id] = sum([tensor.nbytes for tensor in tensors]), time.monotonic()
        call_trace = ""
        if answers:
            self.call_traces[message_id] = answers
        elif anomaly.is_enabled():
            if message_id:
                self.call_traces[message_id] = anomaly.current_call_trace.get()
            call_trace = anomaly.call_trace_from_here(f"worker {self.own_rank}")
        message.autograd = AutogradHead(self.id, message_id, len(tensors or ()), call_trace, ended)
        message.flags |= CONTEXT

    def receive(
        self, sender: int, head: AutogradHead, refs: Sequence[Any], decoder: Callable[..., _R], *args: Any
    ) -> _R:
        """Decode a message of this context. Its tensors that require grad become outputs of a recv node.

        Args:
            sender: the rank of the sender.
            head: the message's autograd head.
            refs: the references of the message.
            decoder: called with ``args``.
            args: the decoder's arguments.

        Returns:
            The decoder's result.

        Raises:
            ProtocolError: the number of tensors differs from that in the head.
        """
        if sender != self.own_rank:
            self.known.add(sender)
        if not head.message_id or self.is_released:
            return decode_with(refs, None, decoder, *args) if refs else decoder(*args)
        tensors: list[torch.Tensor] = []
        value = decode_with(refs, tensors, decoder, *args)
        if len(tensors) != head.tensors:
            raise ProtocolError(f"a message should have {head.tensors} tensors that require grad, not {len(tensors)}")
        node = make_receive(tensors, self.id, Target(sender, head.message_id))
        if node is not None:
            self.receives[head.message_id] = node
            self._forget_if_released()
            if recorder.is_on:
                self.arrived[head.message_id] = time.monotonic()
        return value

    def on_cancelled(self, head: AutogradHead | None) -> None:
        """The call with this head in its request was cancelled. It may have run, and gradients may come for it."""
        if head is not None and head.message_id:
            self.cancelled.add(head.message_id)

    def settle(self) -> None:
        """Wait for the calls in ``settling``; raises the error of one that failed."""
        for call in list(self.settling):
            try:
                call.wait()
            finally:
                if call.done():
                    self.settling.pop(call, None)

    # Passes

    def new_pass(self, numbers: Iterator[int], begun: list[PassId]) -> PassId:
        """Begin a pass here; ``numbers`` counts the worker's passes. Whoever ends it finds its id in ``begun``."""
        # In one step: a pass that sends its messages sooner must not take this one for ended, see ``oldest_pass``.
        with self.lock:
            pass_id = PassId(self.own_rank, next(numbers))
            begun.append(pass_id)  # before it takes effect: an interrupt must not leave it behind
            self.own_passes[pass_id.number] = None
        return pass_id

    def oldest_pass(self, number: int) -> int:
        """The number of the oldest pass that was started here and has not ended. Pass ``number`` has not."""
        if len(self.own_passes) == 1:
            return number
        with self.lock:
            return min(self.own_passes)

    def all_passes(self) -> list[LocalPass]:
        """The passes that this worker knows now."""
        with self.lock:
            return list(self.passes.values())

    def forget_all(self) -> None:
        """The context has ended: let go of its graphs, gradients and passes, whoever has the context still.

        Otherwise they could stay for ever. A graph may hold a reference, in a checkpoint or in a function's ``ctx``,
        whose call has this context: a cycle through torch's graph, which the garbage collector does not see. A pass and
        its context refer to each other, too. Passes that were started here end by themselves.
        """
        with self.lock:
            # Freed when the lock is: that may run finalisers of the program.
            dropped = self.sends, self.receives, self.gradients, self.wanted, self._reaches, self._plan
            self.sends, self.receives, self.gradients, self.wanted, self._reaches, self._plan = {}, {}, {}, {}, {}, None
            theirs = [self.passes.pop(pass_id) for pass_id in list(self.passes) if pass_id.origin != self.own_rank]
        del dropped, theirs

    def _forget_if_released(self) -> None:
        """Another thread may have ended the context just now, before something was added to it."""
        if self.is_released:
            self.forget_all()

    # The graph

    def plan(self, roots: tuple[Edge, ...], again: bool, fast: bool = False) -> Plan:
        """How the sends and these roots share the graph.

        Args:
            roots: the edges that the pass starts from.
            again: whether another pass may start from the same roots.
            fast: whether it is for a FAST pass, which waits for every send in it.

        Returns:
            The plan. It is cached if it is constant.
        """
        known = self._plan
        forgotten = self._forgotten
        cancelled = self.cancelled.copy() if fast and self.cancelled else ()
        version = len(self.sends) + forgotten, len(cancelled)
        if known is not None and known[0] == version and known[1] == roots:
            return known[2]
        sources: dict[int, Reach] = {}
        sends = list(self.sends.items())
        for message_id, send in sends:
            if message_id in cancelled:
                continue
            reach = self._reaches.get(message_id)
            if reach is None:
                reach = self._reaches[message_id] = reach_from(send.edges or send.next_functions, self.id)
            sources[message_id] = reach
        if roots:
            sources[ROOTS] = reach_from(roots, self.id)
        plan = Plan(sources)
        # The plan keeps the roots' graph alive, so it is cached only if another pass may follow.
        if plan.is_constant and (again or not roots):
            self._plan = (len(sends) + forgotten, len(cancelled)), roots, plan
        return plan

    def reach_of(self, message_id: int) -> Reach | None:
        """What one of the sends reaches; None if there is no such send."""
        reach = self._reaches.get(message_id)
        if reach is None and (send := self.sends.get(message_id)) is not None:
            reach = self._reaches[message_id] = reach_from(send.edges or send.next_functions, self.id)
        return reach

    def forget_messages(self, message_ids: Iterable[int]) -> None:
        """Remove the messages of a recorded pass that failed: no later pass reaches them, or waits for them."""
        with self.lock:
            for message_id in message_ids:
                self._forgotten += self.sends.pop(message_id, None) is not None
                for table in (self.receives, self.sent, self.arrived, self.call_traces, self._reaches):
                    table.pop(message_id, None)

    # Under torch's names, for users and tests

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Any]:
        return dict(self.sends)

    def _recv_functions(self) -> dict[int, Any]:
        return dict(self.receives)

    def _known_worker_ids(self) -> set[int]:
        return set(self.known)

    def __repr__(self) -> str:
        return (
            f"<autograd context {self.id} of worker {maker_of(self.id)}: {len(self.sends)} sends, "
            f"{len(self.receives)} receives, {len(self.gradients)} gradients>"
        )


class ContextContainer:
    """All contexts of a worker."""

    def __init__(self, own_rank: int, numbers: Iterator[int] | None = None) -> None:
        """``numbers`` yields the local parts of ids; by default they are counted."""
        self._own_rank = own_rank
        self._base = own_rank << COUNTER_BITS
        self._lock = make_lock("contexts")
        self._contexts: dict[int, Context] = {}
        self.get = self._contexts.get  # returns the context with an id, or None
        self.ending: dict[int, Context] = {}  # released, and the others are still to be told
        self._ended: OrderedDict[int, None] = OrderedDict()  # so that a late message does not create one again
        self.on_released: Callable[[int], None] | None = None  # is told of each context that ends
        self._context_numbers = itertools.count(1) if numbers is None else numbers
        self._message_numbers = itertools.count(1) if numbers is None else numbers

    @property
    def max_id(self) -> int:
        return self._base + (1 << COUNTER_BITS) - 1

    def new_message_id(self) -> int:
        return self._base + next(self._message_numbers)

    def new(self) -> Context:
        context = Context(self._base + next(self._context_numbers), self._own_rank, self.new_message_id)
        self._contexts[context.id] = context
        return context

    def find(self, context_id: int) -> Context:
        context = self._contexts.get(context_id)
        if context is None:
            ended = " It has ended." if context_id in self._ended else ""
            raise UsageError(f"Could not find autograd context with id: {context_id}.{ended}")
        return context

    def meet(self, context_id: int) -> Context | None:
        """The context of a message that arrived; made if it is unknown, None if it has ended."""
        context = self._contexts.get(context_id)
        if context is None:
            with self._lock:
                context = self._contexts.get(context_id)
                # One of ours that is not there has ended, however long ago that was.
                if context is None and context_id not in self._ended and maker_of(context_id) != self._own_rank:
                    context = self._contexts[context_id] = Context(context_id, self._own_rank, self.new_message_id)
        return context

    def release(self, context_id: int) -> Context | None:
        """Remove a context.

        Returns:
            The context, until it is taken out of ``ending``: an interrupted thread has another one tell the others.
            None if there is none.
        """
        with self._lock:
            context = self._contexts.get(context_id)
            self._ended[context_id] = None
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
            if context is None:
                return self.ending.get(context_id)
            # An interrupt finds it in the one or in the other: nothing is called here.
            self.ending[context_id] = context
            del self._contexts[context_id]
            context.is_released = True
        if self.on_released is not None:
            self.on_released(context_id)
        return context

    def has_ended(self, context_id: int) -> bool:
        return context_id in self._ended

    def all(self) -> list[Context]:
        return list(self._contexts.values())

    def __len__(self) -> int:
        return len(self._contexts)
