"""This worker's part in distributed autograd: its contexts, and the passes that run through them.

Rules that hold here:

- A pass's machine is touched under the pass's lock; graphs run and messages are sent outside of it.
- What a machine wants done is done by the thread that told it something, to the end: nothing waits for another thread.
- Only the thread that called ``backward`` waits, with a deadline.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from farprop.errors import BackwardError, ConnectionLostError, FarpropError, RpcTimeoutError, UsageError
from farprop.protocol.credit import NONE
from farprop.protocol.pass_messages import PassHead, pack_head, unpack_head
from farprop.protocol.passes import (
    ROOTS,
    Action,
    Ended,
    GiveBack,
    PassId,
    Release,
    Run,
    Send,
    Share,
    Stuck,
    Survey,
    Target,
    UnknownSource,
)
from farprop.runtime.gradients.contexts import COUNTER_BITS, Context, Contexts
from farprop.runtime.gradients.execution import Gradient
from farprop.runtime.gradients.graph import Edge
from farprop.runtime.gradients.local import LocalPass
from farprop.runtime.gradients.payload import encode_gradients, flat, restored
from farprop.runtime.gradients.records import PASS, SEND, recorded
from farprop.runtime.links import FutureCall
from farprop.runtime.message_types import PROPAGATE
from farprop.wire.codec import Encoded, decode_call, encode_call
from farprop.wire.failures import decode_failure, encode_failure
from farprop.wire.frames import ANSWER, Frame

_log = logging.getLogger("farprop.autograd")

_GIVE_BACK = b"farprop.runtime.gradients.calls:give_back"
_RELEASE = b"farprop.runtime.gradients.calls:release"
_SURVEY = b"farprop.runtime.gradients.calls:survey"
_FAILED = b"farprop.runtime.gradients.calls:failed"
_ABORT = b"farprop.runtime.gradients.calls:abort"
_EXISTS = b"farprop.runtime.gradients.calls:exists"
_ABORT_SECONDS = 5.0
_ASK_SECONDS = 20.0


class Post(Protocol):
    """What passes need of their worker."""

    rpc_timeout: float

    def name_of_rank(self, rank: int) -> str: ...

    def send_own(self, rank: int, name: bytes, encoded: Encoded, call: FutureCall, system: bool) -> None:
        """Call a function of farprop's on another worker; raises like any call."""

    def call_own(self, rank: int, name: bytes, encoded: Encoded, timeout: float, system: bool) -> Frame:
        """The same, and wait for the answer."""

    def submit(self, function: Callable[..., None], *args: Any) -> None: ...

    def blocked(self) -> Any: ...

    def clean_up(self, rank: int, context_id: int) -> None:
        """Have another worker release a context, in time."""


class _Origin:
    """What the thread that called ``backward`` waits for. It looks again whenever the bell rings."""

    def __init__(self) -> None:
        self.bell = threading.Lock()
        self.bell.acquire()
        self.events: deque[Action] = deque()
        self.error: BaseException | None = None

    def tell(self, action: Action) -> None:
        self.events.append(action)
        self._ring()

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self._ring()

    def _ring(self) -> None:
        try:
            self.bell.release()
        except RuntimeError:
            pass  # it has rung, and nobody has looked yet


class _GradientCall(FutureCall):
    """Gradients on their way to another worker. The answer may bring some for this one."""

    __slots__ = ("_local", "_rank", "_space")

    def __init__(self, space: GradientSpace, local: LocalPass, rank: int, timeout: float) -> None:
        super().__init__(timeout)
        self._space = space
        self._local = local
        self._rank = rank

    def finish(self, frame: Frame | None, error: Exception | None) -> None:
        self._space.answered(self._local, frame, error)


class _Word(FutureCall):
    """A message of a pass that has no interesting answer. If it does not come through, the pass fails."""

    quick = True
    __slots__ = ("_local", "_space")

    def __init__(self, space: GradientSpace, local: LocalPass | None, timeout: float) -> None:
        super().__init__(timeout)
        self._space = space
        self._local = local

    def finish(self, frame: Frame | None, error: Exception | None) -> None:
        if frame is not None and frame.kind != ANSWER:
            error = decode_failure(frame.meta)
        if error is not None and self._local is not None:
            self._space.submit(self._space.fail, self._local, error)


class GradientSpace:
    """See the module's rules."""

    def __init__(self, me: int, post: Post) -> None:
        self.me = me
        self.contexts = Contexts(me)
        self.submit = post.submit
        self._post = post
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._origins: dict[PassId, _Origin] = {}

    # Starting a pass

    def backward(
        self, context: Context, roots: tuple[Edge, ...], gradients: list[Gradient], keep_graph: bool, fast: bool,
        timeout: float,
    ) -> None:  # fmt: skip
        """Run a pass from these edges with these gradients. Returns when it has ended everywhere."""
        pass_id = PassId(self.me, next(self._numbers))
        local = LocalPass(context, self.me, pass_id, fast, keep_graph, torch.is_anomaly_enabled(), roots)
        origin = _Origin()
        deadline = time.monotonic() + timeout if timeout else 0.0
        with self._lock:
            self._origins[pass_id] = origin
            context.passes[pass_id] = local
        try:
            local.bring(ROOTS, gradients)
            with recorded(PASS):
                with local.lock:
                    actions = local.machine.start()
                self._perform(local, actions, deadline=deadline, waits=True)
                self._wait(local, origin, deadline, timeout)
            if context.is_released:
                self.contexts.find(context.id)  # raises: the gradients are gone with it
        except BaseException as error:
            with local.lock:
                local.machine.fail()
            self._abort_everywhere(local)
            if origin.error is None or isinstance(error, KeyboardInterrupt):
                raise
            raise origin.error from None
        finally:
            with self._lock:
                del self._origins[pass_id]
                context.passes.pop(pass_id, None)

    def _wait(self, local: LocalPass, origin: _Origin, deadline: float, timeout: float) -> None:
        while True:
            if origin.error is not None:
                raise origin.error
            if not origin.events:
                left = deadline - time.monotonic() if deadline else None
                with self._post.blocked():
                    in_time = origin.bell.acquire(timeout=-1 if left is None else max(left, 0.0))
                if not in_time:
                    raise RpcTimeoutError(self._stuck_text(local, timeout))
                continue
            action = origin.events.popleft()
            if isinstance(action, Ended):
                return
            if isinstance(action, Survey):
                used = self._survey(local, deadline)
                with local.lock:
                    actions = local.machine.surveyed(used)
                self._perform(local, actions, deadline=deadline, waits=True)

    def _stuck_text(self, local: LocalPass, timeout: float) -> str:
        text = f"The backward pass of context {local.context.id} did not end within {timeout:.1f} s."
        if local.fast:
            return (
                f"{text} In FAST mode it waits for the gradients of every tensor that was sent, also of those whose "
                "results were not used. Use mode='smart', or use all results."
            )
        return f"{text} A worker is slow or stands still. Pass a larger timeout to backward, or 0 for none."

    # Doing what the machines want

    def _perform(
        self,
        local: LocalPass,
        actions: list[Action],
        back_to: int = -1,
        deadline: float = 0.0,
        waits: bool = False,
    ) -> list[Any]:
        """Do all of it; what goes to worker ``back_to`` is returned, flat. ``waits``: this thread may wait for it."""
        back: list[Any] = [None]
        sends: deque[Send] = deque()
        todo = deque(actions)
        while todo or sends:
            if not todo:
                send = sends.popleft()
                # With all the credit in it, nothing else is under way anywhere, and no news can come meanwhile.
                if waits and send.share.credit.is_whole:
                    todo.extend(self._exchange(local, send, deadline))
                else:
                    self._send(local, send)
                continue
            action = todo.popleft()
            if isinstance(action, Run):
                todo.extend(self._execute(local, action))
            elif isinstance(action, Send):
                worker = action.target.worker
                if worker == back_to:
                    gradients = flat(local.take_gradients(action.target))
                    back += (self._head(local, action.target.pair, action.share), len(gradients), *gradients)
                elif worker == self.me:
                    gradients = local.take_gradients(action.target)
                    todo.extend(self._come(local, action.target.pair, gradients, action.share))
                else:
                    sends.append(action)
            elif isinstance(action, GiveBack):
                if back_to == local.id.origin:
                    back[0] = self._head(local, 0, action.share)
                else:
                    self._tell(local, local.id.origin, _GIVE_BACK, self._head(local, 0, action.share))
            elif isinstance(action, Release):
                if action.worker == self.me:
                    with local.lock:
                        todo.extend(local.machine.release(action.used, action.share))
                else:
                    head = self._head(local, 0, action.share)
                    local.partners.add(action.worker)
                    self._tell(local, action.worker, _RELEASE, head, *action.used)
            elif isinstance(action, Stuck | Survey | Ended):
                origin = self._origins.get(local.id)
                if origin is not None:
                    origin.tell(action)
        return back

    def _execute(self, local: LocalPass, run: Run) -> list[Action]:
        try:
            if run.source:
                with recorded(SEND):
                    local.execute(run)
            else:
                local.execute(run)
        except BaseException as error:
            raise self._blamed(local, run, error) from error
        with local.lock:
            return local.machine.ran(run)

    def _blamed(self, local: LocalPass, run: Run, error: BaseException) -> BaseException:
        """The error to report: the caller of ``backward`` gets its own graph's errors as they are."""
        is_own = run.source == ROOTS
        if is_own or not isinstance(error, Exception) or isinstance(error, BackwardError):
            return error
        blamed = BackwardError(f"Error on Node {self.me}: {error}")
        for note in getattr(error, "__notes__", ()):
            blamed.add_note(note)
        return blamed

    def _come(self, local: LocalPass, pair: int, gradients: list[Gradient], share: Share) -> list[Action]:
        count = len(local.context.sends[pair].next_functions) if pair in local.context.sends else 0
        if not gradients:
            gradients = [None] * count
        local.bring(pair, gradients)
        with local.lock:
            try:
                return local.machine.come(pair, share)
            except UnknownSource:
                raise FarpropError(
                    f"worker {self.me} got gradients for pair {pair} of context {local.context.id}, which it does not "
                    "have, or has had already"
                ) from None

    def _head(self, local: LocalPass, pair: int, share: Share) -> bytes:
        oldest = min((i.number for i in local.context.passes if i.origin == self.me), default=0)
        oldest = oldest if local.id.origin == self.me else 0
        flags = local.fast, local.keep_graph, local.anomaly
        return pack_head(PassHead(local.context.id, pair, local.id, oldest, *flags, share))

    # Messages that leave

    def _message(self, local: LocalPass, send: Send) -> Encoded:
        local.partners.add(send.target.worker)
        gradients = flat(local.take_gradients(send.target))
        return encode_gradients((self.me, self._head(local, send.target.pair, send.share), *gradients))

    def _send(self, local: LocalPass, send: Send) -> None:
        worker = send.target.worker
        call = _GradientCall(self, local, worker, self._post.rpc_timeout)
        self._post.send_own(worker, PROPAGATE, self._message(local, send), call, system=False)

    def _exchange(self, local: LocalPass, send: Send, deadline: float) -> list[Action]:
        """Send gradients and wait for what comes back with the answer."""
        left = max(0.001, deadline - time.monotonic()) if deadline else 0.0
        frame = self._post.call_own(send.target.worker, PROPAGATE, self._message(local, send), left, system=False)
        return self._unpack_answer(local, frame)

    def _unpack_answer(self, local: LocalPass, frame: Frame) -> list[Action]:
        if frame.kind != ANSWER:
            raise decode_failure(frame.meta)
        back, _ = decode_call(frame.meta, frame.buffers, frame.flags)
        actions: list[Action] = []
        at = 1
        while at < len(back):
            head, count = unpack_head(back[at]), back[at + 1]
            at += 2
            actions += self._come(local, head.pair, restored(back[at : at + count]), head.share)
            at += count
        if back[0] is not None:
            with local.lock:
                actions += local.machine.returned(unpack_head(back[0]).share)
        return actions

    def answered(self, local: LocalPass, frame: Frame | None, error: Exception | None) -> None:
        """The answer to gradients that were sent came, or none will."""
        try:
            if error is not None:
                raise error
            assert frame is not None
            self._perform(local, self._unpack_answer(local, frame))
        except Exception as raised:
            self.fail(local, raised)

    def _tell(self, local: LocalPass, worker: int, name: bytes, *args: Any) -> None:
        word = _Word(self, local, self._post.rpc_timeout)
        self._post.send_own(worker, name, encode_call(None, args, {}), word, system=False)

    # Messages that come

    def propagate(self, sender: int, data: bytes, gradients: tuple[Gradient, ...]) -> Encoded:
        """Gradients came; the answer has those that go back to where they came from."""
        head = unpack_head(data)
        local = self._local(head)
        local.partners.add(sender)
        try:
            actions = self._come(local, head.pair, restored(gradients), head.share)
            back = self._perform(local, actions, back_to=sender)
        except BaseException as error:
            self._stop(local)
            if isinstance(error, BackwardError):
                _log.warning("worker %d: a backward pass failed: %s", self.me, error, exc_info=error)
            raise
        return encode_gradients(tuple(back))

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
            return context.passes.setdefault(head.pass_id, local)

    def give_back(self, data: bytes) -> None:
        head = unpack_head(data)
        context = self.contexts.find(head.context_id)
        local = context.passes.get(head.pass_id)
        if local is not None:  # else it has failed meanwhile
            with local.lock:
                actions = local.machine.returned(head.share)
            self._perform(local, actions)

    def release_sources(self, data: bytes, used: Iterable[int]) -> None:
        head = unpack_head(data)
        local = self._local(head)
        try:
            with local.lock:
                actions = local.machine.release(used, head.share)
            self._perform(local, actions)
        except BaseException:
            self._stop(local)
            raise

    # Which sends are used

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
            for worker, pairs_asked in asked.items():
                news |= self._ask_reach(local, worker, pairs_asked, deadline)
        return {worker: frozenset(pairs) for worker, pairs in found.items()}

    def _ask_reach(self, local: LocalPass, worker: int, pairs: list[int], deadline: float) -> set[Target]:
        if worker == self.me:
            return local.machine.reach(pairs)
        left = max(0.001, deadline - time.monotonic()) if deadline else 0.0
        encoded = encode_call(None, (self._head(local, 0, Share(NONE, {})), pairs), {})
        frame = self._post.call_own(worker, _SURVEY, encoded, left, system=True)
        if frame.kind != ANSWER:
            raise decode_failure(frame.meta)
        (targets,), _ = decode_call(frame.meta, frame.buffers, frame.flags)
        return {Target(*target) for target in targets}

    def survey(self, data: bytes, pairs: list[int]) -> Encoded:
        local = self._local(unpack_head(data))
        with local.lock:
            targets = [tuple(target) for target in local.machine.reach(pairs)]
        return encode_call(None, (targets,), {})

    # Failure

    def fail(self, local: LocalPass, error: BaseException) -> None:
        """A pass can't go on because of something that happened here."""
        if not self._stop(local):
            return
        if local.id.origin == self.me:
            origin = self._origins.get(local.id)
            if origin is not None:
                origin.fail(error)
            return
        try:
            self._tell_failure(local, error)
        except (FarpropError, OSError) as lost:
            _log.info("can't tell worker %d of a failed backward pass: %s", local.id.origin, lost)

    def _tell_failure(self, local: LocalPass, error: BaseException) -> None:
        failure = encode_failure(error, self._post.name_of_rank(self.me)).meta
        args = (local.context.id, *local.id, failure)
        word = _Word(self, None, self._post.rpc_timeout)
        self._post.send_own(local.id.origin, _FAILED, encode_call(None, args, {}), word, system=True)

    def failed(self, context_id: int, pass_id: PassId, failure: bytes) -> None:
        """Another worker says that a pass of ours failed."""
        origin = self._origins.get(pass_id)
        if origin is not None:
            origin.fail(decode_failure(failure))

    def _stop(self, local: LocalPass) -> bool:
        with local.lock:
            news = local.machine.fail()
        if news:
            local.undo()
        return news

    def _abort_everywhere(self, local: LocalPass) -> None:
        """Every worker of the context drops the pass, before the error is raised here."""
        local.undo()
        asked: set[int] = {self.me}
        waiting = set(local.context.known) | local.partners
        end = time.monotonic() + _ABORT_SECONDS
        while waiting - asked:
            worker = (waiting - asked).pop()
            asked.add(worker)
            try:
                args = encode_call(None, (local.context.id, *local.id), {})
                frame = self._post.call_own(worker, _ABORT, args, max(0.05, end - time.monotonic()), system=True)
                if frame.kind == ANSWER:
                    (known,), _ = decode_call(frame.meta, frame.buffers, frame.flags)
                    waiting.update(known)
            except Exception as error:
                _log.info("can't tell worker %d that a backward pass failed: %s", worker, error)

    def abort(self, context_id: int, pass_id: PassId) -> Encoded:
        """The origin of a pass gave it up. Returns the workers that may have to hear it too."""
        try:
            context = self.contexts.find(context_id)
        except UsageError:
            return encode_call(None, ([],), {})
        with context.lock:
            context.aborted.add(pass_id)
            local = context.passes.pop(pass_id, None)
        if local is not None:
            with local.lock:
                local.machine.fail()
            local.undo()
            known = context.known | local.partners
        else:
            known = set()
        return encode_call(None, (sorted(known),), {})

    # The ends of contexts and workers

    def release(self, context_id: int) -> bool:
        """End a context here, and have every worker that this one knows of it end it too."""
        context = self.contexts.release(context_id)
        if context is None:
            return False
        for worker in context.known:
            self._post.clean_up(worker, context_id)
        return True

    def lost(self, rank: int) -> None:
        """The connection to a worker broke: what was on its way may be lost."""
        for context in self.contexts.all():
            for local in list(context.passes.values()):
                # Our part may be done, but what we sent may be lost with it. If the pass has ended, nobody listens.
                if rank in local.partners and not local.machine.failed and not local.machine.ended:
                    name = self._post.name_of_rank(rank)
                    error = ConnectionLostError(f"The connection to {name} was lost during a backward pass.")
                    self.submit(self.fail, local, error)

    def died(self, rank: int) -> None:
        """A worker is dead: its contexts have ended, and it passes no clean-up on any more."""
        for context in self.contexts.all():
            maker = context.id >> COUNTER_BITS
            for pass_id, local in list(context.passes.items()):
                if pass_id.origin == rank:
                    self._stop(local)
            if maker == rank:
                self.release(context.id)
            elif maker != self.me and rank in context.known:
                self.submit(self._ask_maker, context.id, maker)

    def _ask_maker(self, context_id: int, maker: int) -> None:
        """Whoever brought a context here is gone. If its maker does not have it any more either, it has ended."""
        try:
            encoded = encode_call(None, (context_id, self.me), {})
            frame = self._post.call_own(maker, _EXISTS, encoded, _ASK_SECONDS, system=True)
            if frame.kind != ANSWER:
                return
            (exists,), _ = decode_call(frame.meta, frame.buffers, frame.flags)
            if not exists:
                self.release(context_id)
        except Exception as error:
            _log.info("can't ask worker %d for context %d: %s", maker, context_id, error)

    def exists(self, context_id: int, asker: int) -> Encoded:
        context = self.contexts.meet(context_id)
        if context is not None:
            context.known.add(asker)
        return encode_call(None, (context is not None,), {})

    def concerned_with(self, rank: int) -> bool:
        return any(rank in context.known or context.id >> COUNTER_BITS == rank for context in self.contexts.all())

    def debug_info(self) -> dict[str, int]:
        passes = [local for context in self.contexts.all() for local in list(context.passes.values())]
        return {
            "num_current_backward_passes": sum(local.machine.active for local in passes),
            "num_autograd_contexts": len(self.contexts),
        }
