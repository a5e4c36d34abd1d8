"""Drives backward passes: starts them, runs this worker's part of them, and exchanges their messages.

Rules that hold here:

- A pass's state machine is touched under the pass's lock; graphs run and messages are sent outside of it.
- The thread that reports an event to the machine performs the actions that the machine returns, and those that follow
  from them. No thread waits for another, except for the thread that called ``backward``.
- A source that shares no nodes with others takes a short cut (``start_unshared``) at the top of ``_start`` and
  ``on_gradients``. All other cases use the machine's actions and ``_perform``.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch

from farprop.errors import BackwardError, FarpropError, RpcTimeoutError, UsageError
from farprop.ids import distinct, unguessable
from farprop.protocol import events
from farprop.protocol.backward import (
    ALL,
    ALONE,
    NONE,
    ROOTS,
    Announcer,
    CreditShare,
    Ended,
    GiveBack,
    PassAction,
    PassId,
    Release,
    Run,
    Send,
    Series,
    Survey,
    Target,
    UnknownSource,
    passed_on,
)
from farprop.protocol.needed_sends import pack_reached, unpack_needed
from farprop.runtime.autograd.abort import PassAborter
from farprop.runtime.autograd.contexts import COUNTER_BITS, Context, ContextContainer
from farprop.runtime.autograd.engine import PASS, SEND, LocalPass, Outgoing, profiled, size_of
from farprop.runtime.autograd.grad import GradPass, GradRequest, find_needed
from farprop.runtime.autograd.graph import Edge
from farprop.runtime.autograd.messages import (
    LEAST_SECONDS,
    CallbackCall,
    GradientReply,
    OneWayCall,
    PeerCaller,
    encode_recorded,
    record_gradients,
    survey,
)
from farprop.runtime.recorder import recorder
from farprop.runtime.sync import Waker
from farprop.wire.message import (
    ANSWER,
    Bundle,
    Gradient,
    GradientAnswer,
    GradientPart,
    Message,
    Method,
    PassHead,
    encode_gradients,
    gradients_of,
)

_log = logging.getLogger(__name__)
_GRADIENTS = "wait for gradients"

# Gradients for several sends of a worker travel in one message up to this size. Larger ones are not worth waiting for
# each other, and must not become too large for a message together.
_BUNDLE_BYTES = 256 * 1024


class PassWaiter:
    """The thread that called ``backward``, and the actions that it waits for."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.error: BaseException | None = None
        self._events: deque[PassAction] = deque()
        self._waker: Waker | None = None  # made when the thread first waits: a chain ends without a wait

    def left(self) -> float | None:
        """The seconds that a call of this thread may take."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), LEAST_SECONDS)

    def tell(self, action: PassAction) -> None:
        self._events.append(action)
        self._wake()

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self._wake()

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    def next(self, peers: PeerCaller) -> PassAction | None:
        """Wait for the next action; returns None when the time is up, raises if the pass failed."""
        while self.error is None:
            if self._events:
                return self._events.popleft()
            if self._waker is None:
                self._waker = Waker()
                continue  # the waking thread reads the waker last, so it may have missed the new one: check again
            left = None if self.deadline is None else self.deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            began = recorder.begin_wait(_GRADIENTS) if recorder.is_on else 0.0
            try:
                with peers.blocked():
                    self._waker.wait(timeout=-1 if left is None else left)
            finally:
                if began:
                    recorder.end_wait(_GRADIENTS, began)
        raise self.error


class BackwardDriver:
    """Runs the backward passes of this worker's contexts. Methods may be called from any thread."""

    def __init__(self, own_rank: int, peers: PeerCaller) -> None:
        self.own_rank = own_rank
        # In a restricted job the ids of contexts are secret: a worker takes part only in contexts that it was told of.
        numbers = unguessable(COUNTER_BITS) if peers.dialect.restricted else None
        if numbers is None and not peers.is_static:
            numbers = distinct(COUNTER_BITS)
        self.contexts = ContextContainer(own_rank, numbers)
        self.aborter = PassAborter(own_rank, peers, self.contexts, self._fail_waiter)
        self._peers = peers
        self._waiters: dict[PassId, PassWaiter] = {}  # by pass, for passes that were started here
        self._numbers = itertools.count(1)
        # Explains why a pass took too long, from the workers that take part in it; the agent sets it.
        self.on_timeout: Callable[[RpcTimeoutError, Iterable[int]], None] = lambda error, partners: None

    # Starting a pass

    def backward(
        self,
        context_id: int,
        roots: Sequence[Any],
        keep_graph: bool,
        fast: bool,
        timeout: float | None,
        create_graph: bool = False,
    ) -> None:
        """Run the backward pass of a context from these scalars. Returns when it has ended everywhere.

        Raises:
            UsageError: there is no such context, or the roots can't be differentiated.
            RpcTimeoutError: the pass did not end in time.
            BackwardError: it failed on another worker.
        """
        context = self.contexts.find(context_id)
        if not roots:
            raise UsageError("No tensors provided for gradient computation.")
        edges: list[Edge] = []
        gradients: list[Gradient] = []
        for root in roots:
            edges.append(_edge_of(root))
            gradients.append(torch.ones_like(root, requires_grad=False))
        self.backward_from_edges(
            context, tuple(edges), gradients, keep_graph or create_graph, fast, timeout, create_graph
        )

    def backward_from_edges(
        self,
        context: Context,
        edges: tuple[Edge, ...],
        gradients: list[Gradient],
        keep_graph: bool,
        fast: bool,
        timeout: float | None,
        create_graph: bool = False,
        request: GradRequest | None = None,
    ) -> None:
        """Run a backward pass from edges of the graph, with a gradient for each.

        With a ``request``, compute the gradients that it wants, and accumulate none.
        """
        waiter = PassWaiter(timeout)
        if context.aborts:
            self.aborter.await_aborts(context, waiter.deadline)
        if context.settling:
            context.settle()
        begun: list[PassId] = []
        try:
            pass_id = context.new_pass(self._numbers, begun)
            _log.debug("%s: backward pass %d of context %d begins", self._peers.label, pass_id.number, context.id)
            anomaly = torch.is_anomaly_enabled()
            kind = LocalPass if request is None else GradPass
            local = kind(context, self.own_rank, pass_id, fast, keep_graph, anomaly, edges, create_graph)
            self._waiters[pass_id] = waiter
            with context.lock:
                context.passes[pass_id] = local
            self._run_pass(local, gradients, waiter, request)
        finally:
            # Nothing is called here, so an interrupt can't come between these.
            for pass_id in begun:
                if pass_id in self._waiters:
                    del self._waiters[pass_id]
                if pass_id in context.passes:
                    del context.passes[pass_id]
                # One that is being aborted counts as running until that is done.
                if pass_id.number not in context.aborts and pass_id.number in context.own_passes:
                    del context.own_passes[pass_id.number]

    def _run_pass(
        self, local: LocalPass, gradients: Sequence[Gradient], waiter: PassWaiter, request: GradRequest | None
    ) -> None:
        """Run a pass that is registered; if it fails, have it undone everywhere."""
        began = time.monotonic() if recorder.is_on else 0.0
        try:
            with profiled(PASS):
                if request is not None:
                    self._run_grad(cast(GradPass, local), gradients, waiter, request)
                elif not self._start(local, gradients, waiter):
                    self._wait(local, waiter)
            if began:
                recorder.span(events.PASS, "backward pass", began, **local.details)
        except BaseException as error:
            # What others report after the deadline comes of the abort.
            is_cause = not isinstance(error, Exception) or (isinstance(error, RpcTimeoutError) and waiter.error is None)
            if isinstance(error, RpcTimeoutError):
                self.on_timeout(error, local.partners)  # before the others forget the pass
            self.aborter.abort_everywhere(local)
            if is_cause or waiter.error is None:
                raise
            raise waiter.error from None

    def _run_grad(
        self, local: GradPass, gradients: Sequence[Gradient], waiter: PassWaiter, request: GradRequest
    ) -> None:
        """Find out which workers the pass needs, then run it, and take the gradients."""
        local.context.wanted[local.id] = request.wanted
        request.register(local.id, waiter.left())
        head = self._head(local, 0, CreditShare(NONE, {}))
        needed = find_needed(self._peers, local, head, waiter.deadline)
        if needed:
            local.prepare(needed[self.own_rank])
            if not self._start(local, gradients, waiter):
                self._wait(local, waiter)
        request.collect(local.id, local.take(), waiter.left())

    def _start(self, local: LocalPass, gradients: Sequence[Gradient], waiter: PassWaiter) -> bool:
        """Run the pass from its roots, as far as this thread can; returns whether it has ended."""
        source = ROOTS
        while (targets := local.start_unshared(source)) is not None:
            outgoing = local.run_unshared(source, gradients)
            if len(targets) != 1 or targets[0].worker == self.own_rank:
                actions = self._follow(local, targets, outgoing, ALL)
                break
            target = targets[0]
            part = GradientPart(target.message_id, ALL, 0)
            message = self._gradient_message(local, target.worker, (part,), ALONE, outgoing.get(target, ()))
            answer, gradients = self._exchange(local, target.worker, message, waiter.deadline)
            parts = answer.parts
            if len(parts) != 1 or parts[0].share is not ALL or answer.credit is not None:
                actions = self._take_answer(local, answer, gradients)
                break
            source = parts[0].message_id  # a chain: all of the credit returned, with gradients for one send
        else:
            actions = self._on_gradient(local, source, gradients, ALL)
        return self._perform(local, actions, waiter)

    def _wait(self, local: LocalPass, waiter: PassWaiter) -> None:
        while True:
            action = waiter.next(self._peers)
            if action is None:
                raise RpcTimeoutError(_out_of_time(local, cast(float, waiter.timeout)))
            if isinstance(action, Ended):
                return
            if isinstance(action, Survey):
                head = self._head(local, 0, CreditShare(NONE, {}))
                used = survey(self._peers, local, head, waiter.deadline)
                with local.lock:
                    actions = local.machine.on_surveyed(used)
                if self._perform(local, actions, waiter):
                    return

    # Performing the machine's actions

    def _perform(
        self,
        local: LocalPass,
        actions: list[PassAction],
        waiter: PassWaiter | None = None,
        back_to: int | None = None,
        reply: GradientReply | None = None,
        announcer: Announcer | None = None,
    ) -> bool:
        """Perform actions, and those that follow from them.

        Args:
            local: the pass.
            actions: the actions.
            waiter: given by the thread that called ``backward``.
            back_to: the rank of the worker that ``reply`` goes to.
            reply: collects the gradients and the credit for that worker.
            announcer: knows the messages that follow to the same workers.

        Returns:
            Whether the pass has ended, for the thread that called ``backward``.
        """
        ended = False
        sends: deque[Send] = deque()
        todo = deque(actions)
        while (todo or sends) and not local.machine.failed:
            if not todo:
                worker = sends[0].target.worker
                parts, gradients, share = self._bundled(local, sends)
                place = ALONE if announcer is None else announcer.next(worker)
                message = self._gradient_message(local, worker, parts, place, gradients)
                # This message carries all of the credit: no other message of the pass is in flight anywhere.
                if waiter is not None and share.credit.is_whole:
                    answer, came = self._exchange(local, worker, message, waiter.deadline)
                    todo.extend(self._take_answer(local, answer, came))
                else:
                    timeout = self._peers.rpc_timeout if waiter is None else waiter.left()
                    call = CallbackCall(timeout, partial(self._on_answer, local, worker))
                    self._peers.send_method(worker, Method.GRADIENTS, message, call, system=False)
                continue
            action = todo.popleft()
            if isinstance(action, Run):
                todo.extend(self._run(local, action))
            elif isinstance(action, Send):
                target = action.target
                if target.worker == back_to and reply is not None:
                    reply.add(target.message_id, action.share, local.take_gradients(target))
                elif target.worker == self.own_rank:
                    gradients = local.take_gradients(target)
                    todo.extend(self._on_gradient(local, target.message_id, gradients, action.share))
                else:
                    sends.append(action)
            elif isinstance(action, GiveBack):
                if back_to == local.id.origin and reply is not None:
                    reply.add_credit(action.share)
                    continue
                with local.lock:
                    is_kept = local.machine.keep(action.share)
                if not is_kept:
                    self._notify(local, local.id.origin, Method.RETURN_CREDIT, self._head(local, 0, action.share))
            elif isinstance(action, Release):
                todo.extend(self._release(local, action))
            elif waiter is not None and isinstance(action, Ended):
                ended = True
            else:
                found = self._waiters.get(local.id)
                if found is not None:
                    found.tell(action)
        return ended

    def _follow(
        self, local: LocalPass, targets: Sequence[Target], outgoing: Outgoing, share: CreditShare
    ) -> list[PassAction]:
        """The actions that follow when an unshared source has run."""
        if targets:
            local.store_outgoing(outgoing)
            return passed_on(share, targets)
        with local.lock:
            return local.machine.done_with(share)

    def _run(self, local: LocalPass, run: Run) -> list[PassAction]:
        if run.source:
            with profiled(SEND):
                local.run(run)
        else:
            local.run(run)
        with local.lock:
            return local.machine.on_ran(run)

    def _on_gradient(
        self, local: LocalPass, message_id: int, gradients: Sequence[Gradient], share: CreditShare
    ) -> list[PassAction]:
        """Gradients for the roots or one of our sends arrived; an empty list if none of its tensors was used."""
        local.store(message_id, gradients)
        with local.lock:
            try:
                return local.machine.on_gradient(message_id, share)
            except UnknownSource:
                raise FarpropError(
                    f"worker {self.own_rank} got gradients for message {message_id} of context {local.context.id}, "
                    "which it did not send, or got them twice"
                ) from None

    def _release(self, local: LocalPass, action: Release) -> list[PassAction]:
        if action.worker == self.own_rank:
            with local.lock:
                return local.machine.on_release(action.used, action.share)
        local.partners.add(action.worker)
        self._notify(local, action.worker, Method.RELEASE, self._head(local, 0, action.share), *action.used)
        return []

    # Outgoing messages

    def _head(self, local: LocalPass, message_id: int, share: CreditShare, bundle: Bundle | None = None) -> bytes:
        oldest = 0
        if local.id.origin == self.own_rank:
            oldest = local.context.oldest_pass(local.id.number)
        return PassHead(
            local.context.id,
            message_id,
            local.id,
            oldest,
            local.fast,
            local.keep_graph,
            local.anomaly,
            share,
            bundle,
            local.create_graph,
        ).pack()

    def _bundled(self, local: LocalPass, sends: deque[Send]) -> tuple[list[GradientPart], list[Gradient], CreditShare]:
        """Take the first of these and, up to a size, others to the same worker: their parts of a message, its
        gradients, and the credit of all of them.
        """
        target, share = sends.popleft()
        gradients = local.take_gradients(target)
        parts = [GradientPart(target.message_id, share, len(gradients))]
        if not sends:
            return parts, gradients, share
        size = size_of(gradients)
        rest: list[Send] = []
        for send in sends:
            more_bytes = local.outgoing_bytes(send.target)
            if send.target.worker != target.worker or size + more_bytes > _BUNDLE_BYTES:
                rest.append(send)
                continue
            size += more_bytes
            more = local.take_gradients(send.target)
            parts.append(GradientPart(send.target.message_id, send.share, len(more)))
            gradients += more
            share = share.plus(send.share)
        sends.clear()
        sends.extend(rest)
        return parts, gradients, share

    def _gradient_message(
        self,
        local: LocalPass,
        worker: int,
        parts: Sequence[GradientPart],
        series: Series,
        gradients: Sequence[Gradient],
    ) -> Message:
        local.partners.add(worker)
        began = time.monotonic() if recorder.is_on else 0.0
        if len(parts) == 1 and series is ALONE:
            head = self._head(local, parts[0].message_id, parts[0].share)
        else:
            head = self._head(local, 0, CreditShare(NONE, {}), Bundle(parts, series))
        encode_call = self._peers.dialect.encode_call
        if local.create_graph:
            message = encode_recorded(encode_call, local, worker, head, gradients)
        else:
            message = encode_gradients(encode_call, head, gradients)
        if began:
            record_gradients(local, parts, began)
        return message

    def _exchange(
        self, local: LocalPass, worker: int, message: Message, deadline: float | None
    ) -> tuple[GradientAnswer, Sequence[Gradient]]:
        """Send gradients and wait for the answer."""
        timeout = None if deadline is None else max(deadline - time.monotonic(), LEAST_SECONDS)
        answer = self._peers.call_method(worker, Method.GRADIENTS, message, timeout, system=False)
        return self._decode(local, worker, answer)

    def _decode(self, local: LocalPass, worker: int, answer: Message) -> tuple[GradientAnswer, Sequence[Gradient]]:
        dialect = self._peers.dialect
        if answer.kind != ANSWER:
            raise dialect.decode_failure(answer.payload)
        if answer.autograd is None:
            (head, *items), _ = dialect.decode_call(answer.payload, answer.buffers, answer.flags)
            return GradientAnswer.parse(head), gradients_of(items)
        with torch.enable_grad():  # a recv node is made
            (head, *items), _ = local.context.receive(
                worker, answer.autograd, (), dialect.decode_call, answer.payload, answer.buffers, answer.flags
            )
        gradients = gradients_of(items)
        local.note_received(gradients)
        return GradientAnswer.parse(head), gradients

    def _notify(self, local: LocalPass, worker: int, method: Method, *args: Any) -> None:
        call = OneWayCall(self._peers, lambda error: self.aborter.fail(local, error))
        self._peers.send_method(worker, method, self._peers.dialect.encode_call(None, args, {}), call, system=False)

    # Incoming answers

    def _take_answer(self, local: LocalPass, answer: GradientAnswer, gradients: Sequence[Gradient]) -> list[PassAction]:
        actions = self._on_parts(local, answer.parts, gradients) if answer.parts else []
        if answer.credit is not None:
            with local.lock:
                actions += local.machine.on_credit(answer.credit)
        return actions

    def _on_parts(
        self, local: LocalPass, parts: Sequence[GradientPart], gradients: Sequence[Gradient]
    ) -> list[PassAction]:
        """Gradients for some of our sends arrived in an answer."""
        received = _divided(parts, gradients)
        if len(parts) > 1:
            actions = self._run_together(local, parts, received, None)
            if actions is not None:
                return actions
        actions = []
        for part, own in zip(parts, received, strict=True):
            actions += self._on_gradient(local, part.message_id, own, part.share)
        return actions

    def _run_together(
        self,
        local: LocalPass,
        parts: Sequence[GradientPart],
        received: Sequence[Sequence[Gradient]],
        to: int | None,
    ) -> list[PassAction] | None:
        """If these gradients lead to no other worker than ``to``, run the engine once for all of them.

        Returns:
            The actions that follow; None if they have to be run one by one.
        """
        started = local.start_together([part.message_id for part in parts], to)
        if started is None:
            return None
        local.store_outgoing(local.run_together([part.message_id for part in parts], received))
        actions: list[PassAction] = []
        rest: CreditShare | None = None
        for (_, share, _), targets in zip(parts, started, strict=True):
            if targets:
                actions += passed_on(share, targets)
            else:
                rest = share if rest is None else rest.plus(share)
        if rest is not None:
            with local.lock:
                actions += local.machine.done_with(rest)
        return actions

    def _on_answer(self, local: LocalPass, worker: int, answer: Message | None, error: Exception | None) -> None:
        """The answer to gradients that this worker sent arrived, or the call failed."""
        try:
            if answer is None:
                raise error if error is not None else FarpropError("A call with gradients ended without an outcome.")
            self._perform(local, self._take_answer(local, *self._decode(local, worker, answer)))
        except Exception as raised:
            self.aborter.fail(local, raised)

    # Incoming messages. ``caller`` is the rank of the caller.

    def methods(self) -> dict[Method, Callable[..., Any]]:
        return {
            Method.GRADIENTS: self.on_gradients,
            Method.RETURN_CREDIT: self.on_credit,
            Method.RELEASE: self.on_release,
            Method.SURVEY: self.on_survey,
            Method.REACH: self.on_reach,
            Method.PREPARE: self.on_prepare,
            Method.PASS_FAILED: self.aborter.on_pass_failed,
            Method.ABORT: self.aborter.on_abort,
        }

    def on_gradients(self, caller: int, data: bytes, *items: Any) -> Message:
        """Gradients arrived. The answer holds the gradients for the caller."""
        head = PassHead.parse(data)
        _log.debug("%s: gradients of pass %s from rank %d", self._peers.label, head.pass_id, caller)
        encode_call = self._peers.dialect.encode_call
        gradients = gradients_of(items)
        local = self._local(head)
        local.partners.add(caller)
        if head.create_graph:
            local.note_received(gradients)
        try:
            if head.bundle is not None:
                reply = GradientReply()
                self._on_bundle(local, head.bundle, gradients, caller, reply)
                return reply.encode(encode_call, local, caller)
            targets = local.start_unshared(head.message_id)
            if targets is not None:
                outgoing = local.run_unshared(head.message_id, gradients)
                if len(targets) == 1 and targets[0].worker == caller:
                    back = outgoing.get(targets[0], ())
                    began = time.monotonic() if recorder.is_on else 0.0
                    part = GradientPart(targets[0].message_id, head.share, len(back))
                    message = encode_gradients(encode_call, GradientAnswer((part,), None).pack(), back)
                    if began:
                        record_gradients(local, (part,), began)
                    return message
                actions = self._follow(local, targets, outgoing, head.share)
            else:
                actions = self._on_gradient(local, head.message_id, gradients, head.share)
            reply = GradientReply()
            self._perform(local, actions, back_to=caller, reply=reply)
            return reply.encode(encode_call, local, caller)
        except BaseException as error:
            self.aborter.stop(local)
            if isinstance(error, BackwardError):
                # ``backward`` raises it at the origin.
                _log.debug("%s: a backward pass failed: %s", self._peers.label, error, exc_info=error)
            raise

    def _on_bundle(
        self, local: LocalPass, bundle: Bundle, gradients: Sequence[Gradient], caller: int, reply: GradientReply
    ) -> None:
        """Gradients for several of our sends arrived at once, or one message of a series.

        Those that lead to other workers run one by one, and what each leads to is sent at once: the next worker begins
        while this one goes on.
        """
        parts, series = bundle
        received = _divided(parts, gradients)
        with local.lock:
            local.machine.on_message(series)
        actions = self._run_together(local, parts, received, caller)
        if actions is not None:
            self._perform(local, actions, back_to=caller, reply=reply)
        else:
            started = [local.start_unshared(part.message_id) for part in parts]
            announcer = Announcer(started)
            for (message_id, share, _), own, targets in zip(parts, received, started, strict=True):
                if local.machine.failed:
                    break
                announcer.begin(targets or ())
                if targets is None:
                    actions = self._on_gradient(local, message_id, own, share)
                else:
                    actions = self._follow(local, targets, local.run_unshared(message_id, own), share)
                self._perform(local, actions, back_to=caller, reply=reply, announcer=announcer)
        with local.lock:
            actions = local.machine.on_handled()
        self._perform(local, actions, back_to=caller, reply=reply)

    def _local(self, head: PassHead, kind: type[LocalPass] = LocalPass) -> LocalPass:
        context = self.contexts.get(head.context_id) or self.contexts.find(head.context_id)
        pass_id = head.pass_id
        with context.lock:
            local = context.passes.get(pass_id)
            if local is not None:
                return local
            if pass_id in context.aborted or pass_id.origin == self.own_rank:
                raise FarpropError(f"The backward pass of context {context.id} has ended with an error.")
            if context.passes:
                for old in [i for i in list(context.passes) if i.origin == pass_id.origin and i.number < head.oldest]:
                    del context.passes[old]
        local = kind(context, self.own_rank, pass_id, head.fast, head.keep_graph, head.anomaly, (), head.create_graph)
        with context.lock:
            if pass_id in context.aborted:
                raise FarpropError(f"The backward pass of context {context.id} has ended with an error.")
            return context.passes.setdefault(pass_id, local)

    def on_credit(self, caller: int, data: bytes) -> None:
        """Credit returned to this worker, the origin of the pass."""
        head = PassHead.parse(data)
        local = self.contexts.find(head.context_id).passes.get(head.pass_id)
        if local is not None:  # None if the pass has failed meanwhile
            with local.lock:
                actions = local.machine.on_credit(head.share)
            self._perform(local, actions)

    def on_release(self, caller: int, data: bytes, *used: int) -> None:
        """The origin says which of this worker's sends are used. No unit has to wait for the others."""
        head = PassHead.parse(data)
        local = self._local(head)
        try:
            with local.lock:
                actions = local.machine.on_release(used, head.share)
            self._perform(local, actions)
        except BaseException:
            self.aborter.stop(local)
            raise

    def on_survey(self, caller: int, data: bytes, *message_ids: int) -> list[int]:
        """The targets that can be reached from these sends, as a flat list of ranks and message ids."""
        local = self._local(PassHead.parse(data))
        with local.lock:
            return [number for target in local.machine.reach(message_ids) for number in target]

    def take_gradients(self, context_id: int, pass_id: PassId) -> list[Gradient]:
        """Remove and return the gradients that such a pass has computed for its inputs on this worker."""
        context = self.contexts.find(context_id)
        local = context.passes.get(pass_id)
        if isinstance(local, GradPass):
            return local.take()
        wanted = context.wanted.pop(pass_id, None)  # no output depends on these, so the pass did not come here
        return [None] * (0 if wanted is None else len(wanted.edges))

    def on_reach(self, caller: int, data: bytes, *message_ids: int) -> list[int]:
        """What these sends reach, for the origin of a pass that computes the gradients of some inputs."""
        local = cast(GradPass, self._local(PassHead.parse(data), GradPass))
        local.partners.add(caller)
        return pack_reached(local.reached_by(message_ids))

    def on_prepare(self, caller: int, data: bytes, *numbers: int) -> None:
        """The origin says what this worker has to do in such a pass."""
        cast(GradPass, self._local(PassHead.parse(data), GradPass)).prepare(unpack_needed(numbers))

    def _fail_waiter(self, pass_id: PassId, error: BaseException) -> None:
        """Raise an error in the thread that waits for the pass. If the pass has ended, there is none."""
        waiter = self._waiters.get(pass_id)
        if waiter is not None:
            waiter.fail(error)

    # State

    @property
    def is_waiting(self) -> bool:
        """Whether a thread waits in ``backward``."""
        return bool(self._waiters)

    def close(self) -> None:
        """This worker has shut down: threads that wait in ``backward`` would wait for messages that it does not get."""
        for waiter in list(self._waiters.values()):
            waiter.fail(UsageError("RPC has been shut down on this worker, during a backward pass."))

    def running_passes(self) -> list[tuple[LocalPass, float | None]]:
        """The passes that run or wait here, with the seconds since they were started here if that is known."""
        found: list[tuple[LocalPass, float | None]] = []
        for context in self.contexts.all():
            for local in context.all_passes():
                if local.machine.active:
                    waiter = self._waiters.get(local.id)
                    age = None
                    if waiter is not None and waiter.deadline is not None and waiter.timeout is not None:
                        age = time.monotonic() - (waiter.deadline - waiter.timeout)
                    found.append((local, age))
        return found

    def debug_info(self) -> dict[str, int]:
        """Counts, under torch's names."""
        passes = [local for context in self.contexts.all() for local in context.all_passes()]
        return {
            "num_current_backward_passes": sum(local.machine.active for local in passes),
            "num_autograd_contexts": len(self.contexts),
        }


def _divided(parts: Sequence[GradientPart], gradients: Sequence[Gradient]) -> list[Sequence[Gradient]]:
    """The gradients of each part."""
    divided: list[Sequence[Gradient]] = []
    at = 0
    for part in parts:
        divided.append(gradients[at : at + part.gradients])
        at += part.gradients
    return divided


def _edge_of(root: Any) -> Edge:
    if not isinstance(root, torch.Tensor):
        raise TypeError(
            f"backward(): incompatible function arguments: roots are tensors, but one is {type(root).__name__}."
        )
    if not root.requires_grad:
        raise UsageError(f"requires_grad not set on: root of shape {tuple(root.shape)}. It has no gradient.")
    if root.numel() != 1:
        raise UsageError(
            f"A root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar. Take its sum or mean."
        )
    if root.grad_fn is None:
        raise UsageError(
            "A root does not have a valid gradient function: it is a leaf, and was not computed from anything."
        )
    return root.grad_fn, root.output_nr


def _out_of_time(local: LocalPass, timeout: float) -> str:
    text = f"The backward pass of context {local.context.id} did not end within {timeout:.1f} s."
    if local.fast:
        return (
            f"{text} In FAST mode it waits for the gradients of every tensor that was sent, also of those whose "
            "results were not used. Use mode='smart', or use all results."
        )
    return f"{text} A worker is slow or stopped. Pass a larger timeout to backward, or 0 to disable it."
