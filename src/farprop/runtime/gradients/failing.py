"""What happens when a pass fails: its origin hears of it, every worker drops it, and then the error is raised.

Rules that hold here:

- A worker that notices a failure stops, and tells the origin. It undoes nothing by itself: the pass may have ended.
- Only the origin knows that it has not. It has everybody undo it, also those who can only be found by asking everybody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from farprop.errors import ConnectionLostError, FarpropError, UsageError
from farprop.protocol.passes import PassId
from farprop.runtime.gradients.contexts import Contexts
from farprop.runtime.gradients.local import LocalPass
from farprop.runtime.gradients.origins import Origins
from farprop.runtime.gradients.post import Post, Word, answer, ask
from farprop.wire.codec import Encoded

_log = logging.getLogger("farprop.autograd")

_FAILED = b"farprop.runtime.gradients.calls:failed"
_ABORT = b"farprop.runtime.gradients.calls:abort"
_ABORT_SECONDS = 5.0
_TRIES = 3


class Failures:
    """Of the passes of one worker."""

    def __init__(self, me: int, post: Post, contexts: Contexts, origins: Origins) -> None:
        self._me = me
        self._post = post
        self._contexts = contexts
        self._origins = origins

    def fail(self, local: LocalPass, error: BaseException) -> None:
        """A pass can't go on because of something that happened here."""
        if not self.stop(local):
            return
        if local.id.origin == self._me:
            self._origins.fail(local.id, error)
        else:
            failure = self._post.dialect.encode_failure(error, self._post.name_of_rank(self._me))
            self._report(local.id, failure.meta, _TRIES)

    def _report(self, pass_id: PassId, failure: bytes, tries: int) -> None:
        def again(error: Exception) -> None:
            _log.info("can't tell worker %d of a failed backward pass: %s", pass_id.origin, error)
            if tries > 1:
                self._report(pass_id, failure, tries - 1)

        try:
            args = self._post.dialect.encode_call(None, (*pass_id, failure), {})
            self._post.send_own(pass_id.origin, _FAILED, args, Word(self._post, again), system=True)
        except (FarpropError, OSError) as error:
            again(error)

    def hear(self, pass_id: PassId, failure: bytes) -> None:
        """Another worker says that a pass of ours failed."""
        self._origins.fail(pass_id, self._post.dialect.decode_failure(failure))

    def stop(self, local: LocalPass) -> bool:
        """Run and send nothing more of a pass here. Whether that is news."""
        with local.lock:
            return local.machine.fail()

    def abort_everywhere(self, local: LocalPass) -> None:
        """At the origin: have every worker that may know the pass drop it."""
        self.stop(local)
        local.undo()
        asked = {self._me}
        waiting = local.context.known | local.partners
        end = time.monotonic() + _ABORT_SECONDS
        while waiting - asked:
            worker = (waiting - asked).pop()
            asked.add(worker)
            waiting.update(self._ask_to_abort(worker, local, end))

    def _ask_to_abort(self, worker: int, local: LocalPass, end: float) -> Iterable[int]:
        """Who else may know the pass. If the worker is gone, that may be anybody."""
        for _ in range(_TRIES):
            try:
                timeout = max(0.05, end - time.monotonic())
                return ask(self._post, worker, _ABORT, timeout, local.context.id, *local.id)  # type: ignore[no-any-return]
            except ConnectionLostError as error:
                _log.info("can't tell worker %d that a backward pass failed: %s", worker, error)
            except Exception as error:
                _log.warning("worker %d does not hear that a backward pass failed: %s", worker, error)
                break
        return self._post.ranks()

    def abort(self, context_id: int, pass_id: PassId) -> Encoded:
        """The origin of a pass gave it up. Returns the workers that may have to hear it too."""
        try:
            context = self._contexts.find(context_id)
        except UsageError:
            return answer(self._post.dialect, [])
        with context.lock:
            context.aborted.add(pass_id)
            local = context.passes.pop(pass_id, None)
        if local is None:
            return answer(self._post.dialect, sorted(context.known))
        self.stop(local)
        local.undo()
        return answer(self._post.dialect, sorted(context.known | local.partners))
