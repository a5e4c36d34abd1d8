"""Operations on references, and the channels that carry them: each is executed exactly once, even if messages are lost.

The protocol is stop-and-wait ARQ. One numbered batch at a time is on its way to a peer, and it is sent again until its
reply arrives. New operations wait for the next batch. So the receiver recognises a repeated batch by one number, and it
keeps one reply to send again. Batching makes up for the waiting: ten thousand operations take a handful of messages.

``ControlPlane`` has the channels to all peers. It is what the parts of the references' protocol share, so it also has
fresh ids, the instructions to the runtime, and who has died.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from farprop.ids import GlobalId
from farprop.protocol.references.records import Instruction, InstructionKind

MAX_OPERATIONS = 4096


class OperationKind(enum.IntEnum):
    """What one worker asks another one to do with a reference."""

    REGISTER = 1  # to the owner: count this fork, which has come to me
    ACCEPT = 2  # to the parent: the fork is counted, you need not hold yours for it
    DELETE = 3  # to the owner: this fork, which you count, is gone
    FORGO = 4  # to the owner: the fork of a call that I got no answer to is gone, now or when the call comes
    REVOKE = 5  # to the receiver of a message that may be lost: if this fork has not come, don't take it
    RECALL = 6  # to the owner: the call that makes this value may be lost; if it has not come, don't run it
    CLEANUP = 7  # to one who has it: this autograd context, which stands in the place of a value, has ended
    RETURN = 8  # to the parent: the fork, which I borrowed, is gone, as if you had never sent it


class Operation(NamedTuple):
    kind: OperationKind
    rref: GlobalId
    fork: GlobalId
    flag: bool = False
    """Of REGISTER: ``Fork.exists``. Of ACCEPT, RETURN, DELETE and FORGO: there may be orphans, which are forks that
    were passed on before the value was made and that nobody holds any more, because of a death."""


class Batch(NamedTuple):
    """Operations for one worker, in order. A batch keeps its number when it is sent again."""

    number: int
    operations: tuple[Operation, ...]


class ControlReply(NamedTuple):
    """What became of a batch: a byte for each operation, 1 if it was done and 0 if there was nothing to do it on."""

    number: int
    results: bytes


class ReliableSender:
    """The sending end: the operations for one peer."""

    def __init__(self) -> None:
        self._waiting: list[Operation] = []
        self._batch: Batch | None = None  # the first of them: sent, without a reply
        self._number = 0

    def add(self, operation: Operation) -> None:
        """Queue an operation for the next batch."""
        self._waiting.append(operation)

    def current(self) -> Batch | None:
        """The batch to send, or to send again; None if there is none."""
        if self._batch is None and self._waiting:
            batch = Batch(self._number + 1, tuple(self._waiting[:MAX_OPERATIONS]))
            self._number, self._batch = batch.number, batch
        return self._batch

    def batch_of(self, reply: ControlReply) -> Batch | None:
        """The batch that a reply belongs to; None if the reply is a duplicate of an earlier one."""
        batch = self._batch
        if batch is None or batch.number != reply.number or len(reply.results) != len(batch.operations):
            return None
        return batch

    def forget(self, batch: Batch) -> None:
        """The results of a batch were taken. Until then it stays: an interrupt must not lose the rest of them."""
        count = len(batch.operations)
        del self._waiting[:count]
        self._batch = None

    @property
    def empty(self) -> bool:
        """Every operation has its reply."""
        return not self._waiting

    def operations(self) -> list[Operation]:
        """The operations without a reply, in order."""
        return list(self._waiting)


class ReliableReceiver:
    """The receiving end: the operations of one peer."""

    def __init__(self) -> None:
        self._last = ControlReply(0, b"")

    def take(self, batch: Batch, execute: Callable[[Operation], bool]) -> ControlReply:
        """Execute a batch, unless it was executed before.

        Args:
            batch: The batch that arrived.
            execute: Executes one operation; returns whether there was something to do it on.

        Returns:
            The reply to send. A repeated batch gets its first reply again, an older one an empty reply, which the
            sender ignores.
        """
        if batch.number == self._last.number + 1:
            self._last = ControlReply(batch.number, bytes([execute(operation) for operation in batch.operations]))
        if batch.number == self._last.number:
            return self._last
        return ControlReply(batch.number, b"")


# The end of a context is urgent too: the thread that ends one has just made calls, so sending at once costs less than
# waking the loop.
_URGENT = frozenset({OperationKind.REGISTER, OperationKind.REVOKE, OperationKind.RECALL, OperationKind.CLEANUP})


class ControlPlane:
    """The reliable channels to all peers, and the instructions that the runtime is to carry out.

    Args:
        own_rank: This worker.
        numbers: The local parts of new ids.
        execute: Executes an operation that a peer asks for; returns whether there was something to do it on.
        on_result: Is told the result of each operation that this worker posted.
    """

    def __init__(
        self,
        own_rank: int,
        numbers: Iterator[int] | None,
        execute: Callable[[int, Operation], bool],
        on_result: Callable[[Operation, bool], None],
    ) -> None:
        self.own_rank = own_rank
        self.dead: set[int] = set()
        self.instructions: list[Instruction] = []
        self._numbers = itertools.count() if numbers is None else numbers
        self._execute = execute
        self._on_result = on_result
        self._senders: dict[int, ReliableSender] = {}
        self._receivers: dict[int, ReliableReceiver] = {}

    def new_id(self) -> GlobalId:
        return GlobalId(self.own_rank, next(self._numbers))

    def instruct(self, kind: InstructionKind, subject: Any) -> None:
        self.instructions.append(Instruction(kind, subject))

    def post(self, peer: int, operation: Operation) -> None:
        """Have a peer execute an operation exactly once: at once if it is this worker, never if it is dead."""
        if peer == self.own_rank:
            self._on_result(operation, self._execute(peer, operation))
        elif peer not in self.dead:
            sender = self._senders.get(peer)
            if sender is None:
                sender = self._senders[peer] = ReliableSender()
            # The instruction first: an interrupt must not leave an operation that nobody sends.
            if operation.kind in _URGENT:
                self.instruct(InstructionKind.SEND, peer)
            elif sender.empty:  # otherwise it travels with the operations that wait already, or after the next reply
                self.instruct(InstructionKind.SEND_LATER, peer)
            sender.add(operation)

    def outgoing(self, peer: int) -> Batch | None:
        """The batch to send to a peer, or to send again; None if there is none."""
        sender = self._senders.get(peer)
        return None if sender is None else sender.current()

    def incoming(self, peer: int, batch: Batch) -> ControlReply:
        """Execute a batch that a peer sent, unless it is a duplicate."""
        receiver = self._receivers.get(peer)
        if receiver is None:
            receiver = self._receivers[peer] = ReliableReceiver()
        return receiver.take(batch, lambda operation: self._execute(peer, operation))

    def replied(self, peer: int, reply: ControlReply) -> None:
        """Take the reply to a batch. To take its results twice does no harm."""
        sender = self._senders.get(peer)
        batch = None if sender is None else sender.batch_of(reply)
        if sender is None or batch is None:
            return
        for operation, done in zip(batch.operations, reply.results, strict=True):
            self._on_result(operation, bool(done))
        sender.forget(batch)
        if not sender.empty:
            self.instruct(InstructionKind.SEND, peer)

    def on_death(self, peer: int) -> None:
        """Forget the channels to a peer. Operations for it are dropped from now on."""
        self.dead.add(peer)
        self._senders.pop(peer, None)
        self._receivers.pop(peer, None)

    def has_operations_for(self, peer: int) -> bool:
        sender = self._senders.get(peer)
        return sender is not None and not sender.empty

    @property
    def num_operations(self) -> int:
        """Operations without a reply, for all peers."""
        return sum(len(sender.operations()) for sender in self._senders.values())

    @property
    def idle(self) -> bool:
        """No operation waits for a reply."""
        return all(sender.empty for sender in self._senders.values())

    def validate(self) -> None:
        assert not any(self.has_operations_for(peer) for peer in self.dead)
