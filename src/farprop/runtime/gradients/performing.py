"""Doing what the machines of passes want done. Rules that hold here:

- A pass's machine is touched under the pass's lock; graphs run and messages are sent outside of it.
- What a machine wants done is done by the thread that told it something, to the end: nothing waits for another thread,
  but for the one that called ``backward``, which may.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from farprop.errors import BackwardError, FarpropError
from farprop.protocol.pass_messages import PassHead, pack_head, pack_share, unpack_share
from farprop.protocol.passes import (
    ALL,
    ROOTS,
    Action,
    GiveBack,
    Release,
    Run,
    Send,
    Share,
    Target,
    UnknownSource,
    passed_on,
)
from farprop.runtime.gradients.execution import Gradient
from farprop.runtime.gradients.local import Going, LocalPass
from farprop.runtime.gradients.payload import encode_gradients, flat, restored
from farprop.runtime.gradients.post import Post, Word, answer_of
from farprop.runtime.gradients.records import SEND, recorded
from farprop.runtime.links import FutureCall
from farprop.runtime.message_types import PROPAGATE
from farprop.wire.codec import Encoded
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

    # The straight way, for as long as nothing has to wait for anything

    def start(self, local: LocalPass, gradients: Sequence[Gradient], deadline: float) -> None:
        """At the origin, where the caller waits: run the pass from its roots, as far as one can see from here."""
        source = ROOTS
        while (targets := local.straight(source)) is not None:
            going = self._execute_straight(local, source, gradients)
            if len(targets) != 1 or targets[0].worker == self._me:
                actions = self._follow(local, targets, going, ALL)
                break
            message = self._message(local, targets[0], ALL, going.get(targets[0], ()))
            back = self._exchange(targets[0].worker, message, deadline)
            # Unless it is one gradient message, with all the credit and nothing else.
            if len(back) < 4 or back[0] is not None or back[2] or len(back) != 4 + back[3]:
                actions = self._take_answer(local, back)
                break
            source, gradients = back[1], restored(back[4:])
        else:
            actions = self.come(local, source, gradients, ALL)
        self.perform(local, actions, deadline=deadline, waits=True)

    def serve(
        self, local: LocalPass, pair: int, gradients: Sequence[Gradient], share: Share, sender: int
    ) -> Sequence[Any]:
        """Gradients came from another worker: what goes back with the answer, as ``perform`` returns it."""
        targets = local.straight(pair)
        if targets is None:
            return self.perform(local, self.come(local, pair, gradients, share), back_to=sender)
        going = self._execute_straight(local, pair, gradients)
        if len(targets) == 1 and targets[0].worker == sender:
            items = flat(going.get(targets[0], ()))
            return None, targets[0].pair, pack_share(share), len(items), *items
        return self.perform(local, self._follow(local, targets, going, share), back_to=sender)

    def _execute_straight(self, local: LocalPass, source: int, gradients: Sequence[Gradient]) -> Going:
        try:
            return local.execute_straight(source, gradients)
        except BaseException as error:
            raise self._blamed(source, error) from error

    def _follow(self, local: LocalPass, targets: Sequence[Target], going: Going, share: Share) -> list[Action]:
        """What follows from gradients that ran."""
        local.keep(going)
        if targets:
            return passed_on(share, targets)
        with local.lock:
            return local.machine.done_with(share)

    # The long way

    def perform(
        self, local: LocalPass, actions: list[Action], back_to: int = -1, deadline: float = 0.0, waits: bool = False
    ) -> list[Any]:
        """Do all of it. Returns what goes to worker ``back_to`` with the answer to its call: a share (or None), then
        for each gradient message its pair, its share, its length and its gradients. ``waits``: this thread called
        ``backward``.
        """
        back: list[Any] = [None]
        given_back: Share | None = None
        sends: deque[Send] = deque()
        todo = deque(actions)
        while (todo or sends) and not local.machine.failed:
            if not todo:
                target, share = sends.popleft()
                message = self._message(local, target, share, local.take_gradients(target))
                # With all the credit in it, nothing else is under way anywhere, and no news can come meanwhile.
                if waits and share.credit.is_whole:
                    todo.extend(self._take_answer(local, self._exchange(target.worker, message, deadline)))
                else:
                    call = _GradientCall(self, local, self._post.rpc_timeout)
                    self._post.send_own(target.worker, PROPAGATE, message, call, system=False)
                continue
            action = todo.popleft()
            if isinstance(action, Run):
                todo.extend(self._execute(local, action))
            elif isinstance(action, Send):
                target = action.target
                if target.worker == back_to:
                    gradients = flat(local.take_gradients(target))
                    back += (target.pair, pack_share(action.share), len(gradients), *gradients)
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
            back[0] = pack_share(given_back)
        return back

    def _execute(self, local: LocalPass, run: Run) -> list[Action]:
        try:
            if run.source:
                with recorded(SEND):
                    local.execute(run)
            else:
                local.execute(run)
        except BaseException as error:
            raise self._blamed(run.source, error) from error
        with local.lock:
            return local.machine.ran(run)

    def _blamed(self, source: int | None, error: BaseException) -> BaseException:
        """The error to report: the caller of ``backward`` gets its own graph's errors as they are."""
        if source == ROOTS or not isinstance(error, Exception) or isinstance(error, BackwardError):
            return error
        blamed = BackwardError(f"Error on Node {self._me}: {error}")
        for note in getattr(error, "__notes__", ()):
            blamed.add_note(note)
        return blamed

    def come(self, local: LocalPass, pair: int, gradients: Sequence[Gradient], share: Share) -> list[Action]:
        """The gradients for the roots or one of our sends came; none of them, if nothing of it was used."""
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

    def _message(self, local: LocalPass, target: Target, share: Share, gradients: Sequence[Gradient]) -> Encoded:
        local.partners.add(target.worker)
        return encode_gradients(self._post.dialect, (self._me, self.head(local, target.pair, share), *flat(gradients)))

    def _exchange(self, worker: int, message: Encoded, deadline: float) -> Any:
        """Send gradients and wait for what comes back with the answer."""
        frame = self._post.call_own(worker, PROPAGATE, message, seconds_to(deadline), system=False)
        return answer_of(self._post.dialect, frame)

    def _take_answer(self, local: LocalPass, back: Sequence[Any]) -> list[Action]:
        actions: list[Action] = []
        at = 1
        while at < len(back):
            pair, share, count = back[at : at + 3]
            at += 3
            actions += self.come(local, pair, restored(back[at : at + count]), unpack_share(share))
            at += count
        if back[0] is not None:
            with local.lock:
                actions += local.machine.returned(unpack_share(back[0]))
        return actions

    def answered(self, local: LocalPass, frame: Frame | None, error: Exception | None) -> None:
        """The answer to gradients that were sent came, or none will."""
        try:
            if error is not None:
                raise error
            assert frame is not None
            self.perform(local, self._take_answer(local, answer_of(self._post.dialect, frame)))
        except Exception as raised:
            self._fail(local, raised)

    def _say(self, local: LocalPass, worker: int, name: bytes, *args: Any) -> None:
        word = Word(self._post, lambda error: self._fail(local, error))
        self._post.send_own(worker, name, self._post.dialect.encode_call(None, args, {}), word, system=False)


def seconds_to(deadline: float) -> float:
    """A timeout for calls; 0 for none."""
    return max(0.001, deadline - time.monotonic()) if deadline else 0.0
