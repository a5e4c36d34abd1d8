"""Doing what the machines of passes want done. Rules that hold here:

- A pass's machine is touched under the pass's lock; graphs run and messages are sent outside of it.
- What a machine wants done is done by the thread that told it something, to the end: nothing waits for another thread,
  but for the one that called ``backward``, which may.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from farprop.errors import BackwardError, FarpropError
from farprop.protocol.pass_messages import PassHead, pack_head, unpack_head
from farprop.protocol.passes import (
    ROOTS,
    Action,
    GiveBack,
    Release,
    Run,
    Send,
    Share,
    UnknownSource,
)
from farprop.runtime.gradients.execution import Gradient
from farprop.runtime.gradients.local import LocalPass
from farprop.runtime.gradients.payload import encode_gradients, flat, restored
from farprop.runtime.gradients.post import Post, Word, answer_of
from farprop.runtime.gradients.records import SEND, recorded
from farprop.runtime.links import FutureCall
from farprop.runtime.message_types import PROPAGATE
from farprop.wire.codec import Encoded, encode_call
from farprop.wire.frames import Frame

_GIVE_BACK = b"farprop.runtime.gradients.calls:give_back"
_RELEASE = b"farprop.runtime.gradients.calls:release"


class _GradientCall(FutureCall):
    """Gradients on their way to another worker. The answer may bring some for this one."""

    __slots__ = ("_local", "_performer")

    def __init__(self, performer: Performer, local: LocalPass, timeout: float) -> None:
        super().__init__(timeout)
        self._performer = performer
        self._local = local

    def finish(self, frame: Frame | None, error: Exception | None) -> None:
        self._performer.answered(self._local, frame, error)


class Performer:
    """``tell`` hears what the origin of a pass has to know; ``fail`` ends a pass that can't go on."""

    def __init__(
        self,
        me: int,
        post: Post,
        tell: Callable[[LocalPass, Action], None],
        fail: Callable[[LocalPass, BaseException], None],
    ) -> None:
        self._me = me
        self._post = post
        self._tell = tell
        self._fail = fail

    def perform(
        self, local: LocalPass, actions: list[Action], back_to: int = -1, deadline: float = 0.0, waits: bool = False
    ) -> list[Any]:
        """Do all of it. Returns what goes to worker ``back_to`` with the answer to its call: credit (or None), then for
        each gradient message its head, its length and its gradients. ``waits``: this thread called ``backward``.
        """
        back: list[Any] = [None]
        given_back: Share | None = None
        sends: deque[Send] = deque()
        todo = deque(actions)
        while (todo or sends) and not local.machine.failed:
            if not todo:
                send = sends.popleft()
                # With all the credit in it, nothing else is under way anywhere, and no news can come meanwhile.
                if waits and send.share.credit.is_whole:
                    todo.extend(self._exchange(local, send, deadline))
                else:
                    call = _GradientCall(self, local, self._post.rpc_timeout)
                    self._post.send_own(send.target.worker, PROPAGATE, self._message(local, send), call, system=False)
                continue
            action = todo.popleft()
            if isinstance(action, Run):
                todo.extend(self._execute(local, action))
            elif isinstance(action, Send):
                target = action.target
                if target.worker == back_to:
                    gradients = flat(local.take_gradients(target))
                    back += (self.head(local, target.pair, action.share), len(gradients), *gradients)
                elif target.worker == self._me:
                    todo.extend(self.come(local, target.pair, local.take_gradients(target), action.share))
                else:
                    sends.append(action)
            elif isinstance(action, GiveBack):
                if back_to == local.id.origin:
                    given_back = action.share if given_back is None else given_back.plus(action.share)
                else:
                    self._say(local, local.id.origin, _GIVE_BACK, self.head(local, 0, action.share))
            elif isinstance(action, Release):
                todo.extend(self._release(local, action))
            else:
                self._tell(local, action)
        if given_back is not None:
            back[0] = self.head(local, 0, given_back)
        return back

    def _execute(self, local: LocalPass, run: Run) -> list[Action]:
        try:
            if run.source:
                with recorded(SEND):
                    local.execute(run)
            else:
                local.execute(run)
        except BaseException as error:
            raise self._blamed(run, error) from error
        with local.lock:
            return local.machine.ran(run)

    def _blamed(self, run: Run, error: BaseException) -> BaseException:
        """The error to report: the caller of ``backward`` gets its own graph's errors as they are."""
        is_own = run.source == ROOTS
        if is_own or not isinstance(error, Exception) or isinstance(error, BackwardError):
            return error
        blamed = BackwardError(f"Error on Node {self._me}: {error}")
        for note in getattr(error, "__notes__", ()):
            blamed.add_note(note)
        return blamed

    def come(self, local: LocalPass, pair: int, gradients: list[Gradient], share: Share) -> list[Action]:
        """The gradients for one of our sends came; none of them, if nothing of it was used."""
        send = local.context.sends.get(pair)
        if send is not None and not gradients:
            gradients = [None] * len(send.next_functions)
        local.bring(pair, gradients)
        with local.lock:
            try:
                return local.machine.come(pair, share)
            except UnknownSource:
                raise FarpropError(
                    f"worker {self._me} got gradients for pair {pair} of context {local.context.id}, which it does not "
                    "have, or has had already"
                ) from None

    def _release(self, local: LocalPass, action: Release) -> list[Action]:
        if action.worker == self._me:
            with local.lock:
                return local.machine.release(action.used, action.share)
        local.partners.add(action.worker)
        self._say(local, action.worker, _RELEASE, self.head(local, 0, action.share), *action.used)
        return []

    # Messages

    def head(self, local: LocalPass, pair: int, share: Share) -> bytes:
        oldest = 0
        if local.id.origin == self._me:
            oldest = min(pass_id.number for pass_id in local.context.passes if pass_id.origin == self._me)
        flags = local.fast, local.keep_graph, local.anomaly
        return pack_head(PassHead(local.context.id, pair, local.id, oldest, *flags, share))

    def _message(self, local: LocalPass, send: Send) -> Encoded:
        local.partners.add(send.target.worker)
        gradients = flat(local.take_gradients(send.target))
        return encode_gradients((self._me, self.head(local, send.target.pair, send.share), *gradients))

    def _exchange(self, local: LocalPass, send: Send, deadline: float) -> list[Action]:
        """Send gradients and wait for what comes back with the answer."""
        message = self._message(local, send)
        frame = self._post.call_own(send.target.worker, PROPAGATE, message, seconds_to(deadline), system=False)
        return self._take_answer(local, frame)

    def _take_answer(self, local: LocalPass, frame: Frame) -> list[Action]:
        back = answer_of(frame)
        actions: list[Action] = []
        at = 1
        while at < len(back):
            head, count = unpack_head(back[at]), back[at + 1]
            at += 2
            actions += self.come(local, head.pair, restored(back[at : at + count]), head.share)
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
            self.perform(local, self._take_answer(local, frame))
        except Exception as raised:
            self._fail(local, raised)

    def _say(self, local: LocalPass, worker: int, name: bytes, *args: Any) -> None:
        word = Word(self._post, lambda error: self._fail(local, error))
        self._post.send_own(worker, name, encode_call(None, args, {}), word, system=False)


def seconds_to(deadline: float) -> float:
    """A timeout for calls; 0 for none."""
    return max(0.001, deadline - time.monotonic()) if deadline else 0.0
