"""What all parts of the references' protocol share: fresh ids, the channels to the peers, and who has died."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from farprop.ids import GlobalId
from farprop.protocol.references.messages import Batch, ControlReply, Operation, OperationKind
from farprop.protocol.references.records import Instruction, InstructionKind
from farprop.protocol.reliable_channel import ReliableReceiver, ReliableSender

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
            first = sender.empty
            sender.add(operation)
            if operation.kind in _URGENT:
                self.instruct(InstructionKind.SEND, peer)
            elif first:  # otherwise it travels with the operations that wait already, or after the next reply
                self.instruct(InstructionKind.SEND_LATER, peer)

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
        """Take the reply to a batch."""
        sender = self._senders.get(peer)
        batch = None if sender is None else sender.replied(reply)
        if sender is None or batch is None:
            return
        for operation, done in zip(batch.operations, reply.results, strict=True):
            self._on_result(operation, bool(done))
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
