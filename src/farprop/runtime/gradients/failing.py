"""What happens when a pass fails: its origin hears of it, every worker drops it, and then the error is raised."""

from __future__ import annotations

import logging
import time

from farprop.errors import FarpropError, UsageError
from farprop.protocol.passes import PassId
from farprop.runtime.gradients.contexts import Contexts
from farprop.runtime.gradients.local import LocalPass
from farprop.runtime.gradients.origins import Origins
from farprop.runtime.gradients.post import Post, Word, answer, ask
from farprop.wire.codec import Encoded, encode_call
from farprop.wire.failures import encode_failure

_log = logging.getLogger("farprop.autograd")

_FAILED = b"farprop.runtime.gradients.calls:failed"
_ABORT = b"farprop.runtime.gradients.calls:abort"
_ABORT_SECONDS = 5.0


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
            return
        try:
            failure = encode_failure(error, self._post.name_of_rank(self._me)).meta
            args = encode_call(None, (*local.id, failure), {})
            self._post.send_own(local.id.origin, _FAILED, args, Word(self._post, None), system=True)
        except (FarpropError, OSError) as lost:
            _log.info("can't tell worker %d of a failed backward pass: %s", local.id.origin, lost)

    def stop(self, local: LocalPass) -> bool:
        """Drop a pass here, and undo it. Whether it had not been already."""
        with local.lock:
            news = local.machine.fail()
        if news:
            local.undo()
        return news

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
            try:
                timeout = max(0.05, end - time.monotonic())
                waiting.update(ask(self._post, worker, _ABORT, timeout, local.context.id, *local.id))
            except Exception as error:
                _log.info("can't tell worker %d that a backward pass failed: %s", worker, error)

    def abort(self, context_id: int, pass_id: PassId) -> Encoded:
        """The origin of a pass gave it up. Returns the workers that may have to hear it too."""
        try:
            context = self._contexts.find(context_id)
        except UsageError:
            return answer([])
        with context.lock:
            context.aborted.add(pass_id)
            local = context.passes.pop(pass_id, None)
        if local is None:
            return answer([])
        self.stop(local)
        return answer(sorted(context.known | local.partners))
