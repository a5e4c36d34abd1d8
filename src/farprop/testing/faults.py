"""Fault plans: which of this worker's messages fail, vanish, come late or cut the connection.

::

    from farprop.testing import faults

    with faults.inject(seed=7) as plan:
        plan.fail_at("worker1", 3)                                   # the third message to worker1
        plan.delay(0.2, types=["PYTHON_CALL"], probability=0.5)      # every other call, by the seed's dice
        plan.lose(types=["RREF_USER_DELETE"], sends=3)               # each message's first three attempts
        ...
    print(plan.counts)                                               # what was done, by kind

Messages are those that this worker sends on connections it dialled: calls, and farprop's own operations on references.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from farprop.runtime.current import current_agent
from farprop.runtime.message_types import MESSAGE_TYPES, types_of
from farprop.transport.faulty import Action, Verdict
from farprop.wire.codec import Encoded


@dataclass
class _Rule:
    verdict: Verdict
    worker: str | None
    types: frozenset[str] | None
    nth: int | None
    sends: int | None
    probability: float


class FaultPlan:
    """Rules, in the order in which they were given; the first that fits a message decides."""

    def __init__(self, seed: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        """How many messages failed, were lost, delayed, or cut the connection: by action and type."""
        self._rules: list[_Rule] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()  # messages to each worker
        self._attempts: Counter[tuple[str, int]] = Counter()  # of each batch

    def fail_at(self, worker: str, nth: int) -> None:
        """The ``nth`` message to this worker, counted from 1 and from now, fails at once with an error."""
        self._add(Action.FAIL, 0.0, worker, None, nth, None, 1.0)

    def fail(
        self,
        types: Iterable[str] | None = None,
        worker: str | None = None,
        sends: int | None = None,
        probability: float = 1.0,
    ) -> None:
        """Messages fail at once with ``InjectedFaultError``. ``sends``: only so many attempts to send each message."""
        self._add(Action.FAIL, 0.0, worker, types, None, sends, probability)

    def lose(
        self,
        types: Iterable[str] | None = None,
        worker: str | None = None,
        sends: int | None = None,
        probability: float = 1.0,
    ) -> None:
        """Messages vanish; who waits for an answer runs into the timeout."""
        self._add(Action.LOSE, 0.0, worker, types, None, sends, probability)

    def delay(
        self, seconds: float, types: Iterable[str] | None = None, worker: str | None = None, probability: float = 1.0
    ) -> None:
        """Messages are sent ``seconds`` later, and overtaken by others."""
        self._add(Action.DELAY, seconds, worker, types, None, None, probability)

    def cut_at(self, worker: str, nth: int) -> None:
        """Instead of the ``nth`` message to this worker, counted from 1 and from now, the connection is closed."""
        self._add(Action.CUT, 0.0, worker, None, nth, None, 1.0)

    def _add(
        self,
        action: Action,
        seconds: float,
        worker: str | None,
        types: Iterable[str] | None,
        nth: int | None,
        sends: int | None,
        probability: float,
    ) -> None:
        chosen = None if types is None else frozenset(types)
        unknown = sorted((chosen or frozenset()) - MESSAGE_TYPES)
        if unknown:
            raise ValueError(f"There are no messages of type {', '.join(unknown)}. Types: {sorted(MESSAGE_TYPES)}.")
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"A probability is from 0 to 1, not {probability}.")
        if not seconds >= 0 or (nth is not None and nth < 1) or (sends is not None and sends < 1):
            raise ValueError("A delay is 0 or more seconds, and messages and attempts are counted from 1.")
        with self._lock:
            if nth is not None and worker is not None:
                nth += self._sent[worker]  # from now
            self._rules.append(_Rule(Verdict(action, seconds), worker, chosen, nth, sends, probability))

    def judge(self, peer: str, kind: int, flags: int, call_id: int, name: bytes, encoded: Encoded) -> Verdict | None:
        """What to do with a message; None to send it."""
        types, batch = types_of(kind, flags, name, encoded)
        if not types:
            return None
        with self._lock:
            self._sent[peer] += 1
            if batch:
                self._attempts[peer, batch] += 1
            for rule in self._rules:
                if self._fits(rule, peer, types, self._attempts[peer, batch] if batch else 1):
                    hit = types if rule.types is None else types & rule.types
                    self.counts.update(f"{rule.verdict.action.name.lower()} {each}" for each in hit)
                    return rule.verdict
        return None

    def _fits(self, rule: _Rule, peer: str, types: frozenset[str], attempt: int) -> bool:
        return (
            rule.worker in (None, peer)
            and (rule.types is None or bool(types & rule.types))
            and (rule.nth is None or rule.nth == self._sent[peer])
            and (rule.sends is None or attempt <= rule.sends)
            and (rule.probability >= 1.0 or self._random.random() < rule.probability)
        )


@contextlib.contextmanager
def inject(seed: int = 0) -> Iterator[FaultPlan]:
    """While the block runs, this worker's messages obey the plan that it gives, and no other."""
    plan = FaultPlan(seed)
    agent = current_agent()
    before = agent.set_judge(plan.judge)
    try:
        yield plan
    finally:
        agent.set_judge(before)
