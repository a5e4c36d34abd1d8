"""When a step may change the parameters of a worker: the decisions behind ``consistency="locked"``.

A *user* is an autograd context in which a function has run on this worker: its backward pass may need the parameters
as they are. A context stops being one when it ends here, or when it steps, because its passes are over then. A step
waits until there are no users. While it waits, contexts that are new here wait as well, or steps could wait for ever.

No two of them wait for each other: a step waits for users only, and a context that steps is none. A user may wait as a
new context at *another* worker, for a step there that waits for a context that waits here. So that wait is short:
``admit`` lets a context in although a step waits, and the step waits for it, too. Only a step that runs keeps it out,
and that one waits for nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection


class StepGate:
    """The gate of one worker. Events are its methods; they return what is allowed now."""

    def __init__(self) -> None:
        self.users: set[int] = set()
        self.running: int | None = None
        self._waiting: deque[int] = deque()

    def on_use(self, context: int) -> bool:
        """A function of a context is to run; returns whether it may."""
        if context in self.users:
            return True
        if self.running is not None or self._waiting:
            return False
        self.users.add(context)
        return True

    def admit(self, context: int) -> bool:
        """A context has waited long enough; returns whether it may go on. It may not while a step runs."""
        if self.running is None:
            self.users.add(context)
        return self.running is None

    def on_step(self, step: int, contexts: Collection[int]) -> None:
        """A step with the gradients of these contexts has come. Their passes are over."""
        self.users.difference_update(contexts)
        self._waiting.append(step)

    def may_run(self, step: int) -> bool:
        """Whether a step that waits may run; if so, it runs. Steps run one after the other, in the order they came."""
        if self.running is not None or self.users or not self._waiting or self._waiting[0] != step:
            return False
        self._waiting.popleft()
        self.running = step
        return True

    def on_step_ended(self, step: int) -> None:
        """A step has run, or has given up waiting."""
        if self.running == step:
            self.running = None
        elif step in self._waiting:
            self._waiting.remove(step)

    def on_context_ended(self, context: int) -> None:
        self.users.discard(context)

    @property
    def is_busy(self) -> bool:
        """Whether a step waits or runs."""
        return self.running is not None or bool(self._waiting)
