"""The future that ``rpc_async`` returns: torch's, but one that waits well on a thread of the pool."""

from __future__ import annotations

from typing import Any

import torch

from farprop.runtime.loop import loop_of_this_thread


class Future(torch.futures.Future[Any]):
    """A ``torch.futures.Future``. Waiting for it inside a called function does not use up a worker thread."""

    def wait(self) -> Any:
        loop = loop_of_this_thread()
        if loop is not None and not self.done():
            with loop.blocked():
                return super().wait()
        return super().wait()
