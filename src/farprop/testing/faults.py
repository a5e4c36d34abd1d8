"""Fault plans: which of this worker's messages fail, are lost, are delayed, or cut the connection.

::

    from farprop.testing import faults

    with faults.inject(seed=7) as plan:
        plan.fail_at("worker1", 3)                                   # the third message to worker1
        plan.delay(0.2, types=["PYTHON_CALL"], probability=0.5)      # about every second call; depends on the seed
        plan.lose(types=["RREF_USER_DELETE"], sends=3)               # the first three attempts to send each one
        ...
    print(plan.counts)                                               # the faults that happened, by action and type

It affects messages on connections that this worker dialled: calls, and farprop's own operations on references.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from farprop._torch import ScriptFunction
from farprop.locks import make_lock
from farprop.protocol.references.control_plane import Batch, OperationKind
from farprop.runtime.agent_registry import current_agent
from farprop.transport.fault_injection import FaultAction, FaultDecision
from farprop.wire.function_names import FunctionNotFound, resolve
from farprop.wire.message import ANSWER, FAILURE, REMOTE, SYSTEM, Message, Method


@dataclass
class _Rule:
    """A decision, and the messages that it applies to."""

    decision: FaultDecision
    worker: str | None
    types: frozenset[str] | None
    nth: int | None
    sends: int | None
    probability: float


class FaultPlan:
    """A list of rules. The first rule that matches a message decides what happens to it.

    Args:
        seed: The seed of all probabilities.
    """

    def __init__(self, seed: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        """How many messages were affected, by action and type: for example ``"fail PYTHON_CALL"``."""
        self._rules: list[_Rule] = []
        self._random = random.Random(seed)
        self._lock = make_lock("fault_plan")
        self._sent: Counter[str] = Counter()  # messages to each worker
        self._attempts: Counter[tuple[str, int]] = Counter()  # to send each batch

    def fail_at(self, worker: str, nth: int) -> None:
        """Make one message fail at once with ``InjectedFaultError``.

        Args:
            worker: The receiver.
            nth: Which message to it fails, counted from 1 and from now.

        Raises:
            ValueError: ``nth`` is less than 1.
        """
        self._add(FaultAction.FAIL, 0.0, worker, None, nth, None, 1.0)

    def fail(
        self,
        types: Iterable[str] | None = None,
        worker: str | None = None,
        sends: int | None = None,
        probability: float = 1.0,
    ) -> None:
        """Make messages fail at once with ``InjectedFaultError``.

        Args:
            types: The types of message, as torch names them. By default all.
            worker: The receiver. By default all workers.
            sends: How many attempts to send each message are affected. By default all.
            probability: The probability that a message is affected.

        Raises:
            ValueError: A type or a number is invalid.
        """
        self._add(FaultAction.FAIL, 0.0, worker, types, None, sends, probability)

    def lose(
        self,
        types: Iterable[str] | None = None,
        worker: str | None = None,
        sends: int | None = None,
        probability: float = 1.0,
    ) -> None:
        """Lose messages. Callers that wait for the answer run into their timeout.

        Args:
            types: The types of message, as torch names them. By default all.
            worker: The receiver. By default all workers.
            sends: How many attempts to send each message are affected. By default all.
            probability: The probability that a message is affected.

        Raises:
            ValueError: A type or a number is invalid.
        """
        self._add(FaultAction.LOSE, 0.0, worker, types, None, sends, probability)

    def delay(
        self, seconds: float, types: Iterable[str] | None = None, worker: str | None = None, probability: float = 1.0
    ) -> None:
        """Delay messages. Later messages overtake them.

        Args:
            seconds: How much later they are sent.
            types: The types of message, as torch names them. By default all.
            worker: The receiver. By default all workers.
            probability: The probability that a message is affected.

        Raises:
            ValueError: A type or a number is invalid.
        """
        self._add(FaultAction.DELAY, seconds, worker, types, None, None, probability)

    def cut_at(self, worker: str, nth: int) -> None:
        """Close the connection instead of sending one message.

        Args:
            worker: The receiver.
            nth: Which message to it cuts the connection, counted from 1 and from now.

        Raises:
            ValueError: ``nth`` is less than 1.
        """
        self._add(FaultAction.CUT, 0.0, worker, None, nth, None, 1.0)

    def _add(
        self,
        action: FaultAction,
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
            raise ValueError(f"probability must be between 0 and 1, not {probability}.")
        if not seconds >= 0 or (nth is not None and nth < 1) or (sends is not None and sends < 1):
            raise ValueError("seconds must be 0 or more, and nth and sends must be 1 or more.")
        with self._lock:
            if nth is not None and worker is not None:
                nth += self._sent[worker]  # from now
            self._rules.append(_Rule(FaultDecision(action, seconds), worker, chosen, nth, sends, probability))

    def decide(self, peer: str, message: Message) -> FaultDecision | None:
        """Decide what happens to a message. The agent calls it for each one.

        Args:
            peer: The receiver.
            message: The message.

        Returns:
            The decision; None to send the message.
        """
        types, batch = _types_of(message)
        if not types:
            return None
        with self._lock:
            self._sent[peer] += 1
            if batch is not None:
                self._attempts[peer, batch] += 1
            for rule in self._rules:
                if self._fits(rule, peer, types, self._attempts[peer, batch] if batch is not None else 1):
                    hit = types if rule.types is None else types & rule.types
                    self.counts.update(f"{rule.decision.action.name.lower()} {each}" for each in hit)
                    return rule.decision
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
    """Apply a fault plan to this worker's messages: ``with inject() as plan:``.

    Inside the block no other plan applies.

    Args:
        seed: The seed of all probabilities.

    Yields:
        The plan, without rules.
    """
    plan = FaultPlan(seed)
    agent = current_agent()
    before = agent.peers.set_fault_policy(plan.decide)
    try:
        yield plan
    finally:
        agent.peers.set_fault_policy(before)


_OPERATIONS = {
    OperationKind.REGISTER: "RREF_FORK_REQUEST",
    OperationKind.ACCEPT: "RREF_CHILD_ACCEPT",
    OperationKind.DELETE: "RREF_USER_DELETE",
    OperationKind.FORGO: "RREF_USER_DELETE",
    OperationKind.REVOKE: "RREF_REVOKE",
    OperationKind.RECALL: "RREF_RECALL",
    OperationKind.CLEANUP: "CLEANUP_AUTOGRAD_CONTEXT_REQ",
}
MESSAGE_TYPES = frozenset(
    {
        *_OPERATIONS.values(),
        "PYTHON_CALL",
        "SCRIPT_CALL",
        "PYTHON_REMOTE_CALL",
        "SCRIPT_REMOTE_CALL",
        "PYTHON_RREF_FETCH_CALL",
        "SCRIPT_RREF_FETCH_CALL",
        "PYTHON_RET",
        "EXCEPTION",
        "BACKWARD_AUTOGRAD_REQ",
    }
)


def _types_of(message: Message) -> tuple[frozenset[str], int | None]:
    """The types of a message, and the number of its batch if it is one. Farprop's own calls have no type.

    A batch of operations has a type for each kind in it. There is one kind of fetch, which both of torch's names mean.
    """
    name = message.name
    if message.kind == ANSWER:
        return frozenset({"PYTHON_RET"}), None
    if message.kind == FAILURE:
        return frozenset({"EXCEPTION"}), None
    if isinstance(message.keep, Batch):
        return frozenset(_OPERATIONS[operation.kind] for operation in message.keep.operations), message.keep.number
    if message.flags & SYSTEM:
        return frozenset(), None
    if name == Method.GRADIENTS.value:
        return frozenset({"BACKWARD_AUTOGRAD_REQ"}), None
    if name == Method.FETCH.value:
        return frozenset({"PYTHON_RREF_FETCH_CALL", "SCRIPT_RREF_FETCH_CALL"}), None
    language = "SCRIPT" if _is_script(name) else "PYTHON"
    remote = "_REMOTE" if message.flags & REMOTE else ""
    return frozenset({f"{language}{remote}_CALL"}), None


def _is_script(name: bytes) -> bool:
    """Operators and TorchScript functions are one language to torch."""
    if name.startswith(b"torch:"):
        return True
    try:
        return bool(name) and isinstance(resolve(name), ScriptFunction)
    except FunctionNotFound:
        return False
