"""What really happened in each pass, on all workers, as no worker can know it."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING

from farprop.protocol.backward import Credit, PassId

if TYPE_CHECKING:
    from tests.simulation.passes.local_pass import LocalPass


def amount(credit: Credit) -> Fraction:
    """The exact amount, without the arithmetic under test."""
    return Fraction(credit.parts, 1 << credit.level)


class PassHistory:
    """One pass, from the call of ``backward`` on."""

    def __init__(
        self,
        pass_id: PassId,
        fast: bool,
        roots: tuple[int, ...],
        used: dict[int, set[int]],
        recorded: bool = False,
        inputs: dict[int, frozenset[int]] | None = None,
    ) -> None:
        self.id = pass_id
        self.recorded = recorded  # its messages become messages of the context
        self.inputs = inputs  # by worker, the values whose gradients are wanted; None for those of all leaves
        self.fast = fast
        self.roots = roots
        self.used = used  # the sources of each worker that the roots reach
        self.locals: dict[int, LocalPass] = {}  # every state machine of the pass
        self.fed: dict[int, set[int]] = {}  # the sources whose gradients a worker has fed into its graph
        self.started: dict[int, set[int]] = {}  # the units that a worker has begun to run
        self.ran: dict[int, set[int]] = {}  # those that it has run
        self.running: Counter[int] = Counter()  # by worker
        self.sent: set[tuple[int, int]] = set()  # the sends that gradients were sent to
        self.loose = Fraction(0)  # credit that no state machine holds: in flight, or with a run
        self.messages: Counter[str] = Counter()
        self.faulty = False  # a fault happened that may make it fail
        self.began = False  # the roots have their gradients
        self.stuck = False
        self.hurried = False  # its deadline may come while it runs
        self.outcome = ""  # for the caller of backward: ended, failed, or late (failed by the deadline)

    def __str__(self) -> str:
        return f"pass {self.id.origin}.{self.id.number}"

    @property
    def is_complete(self) -> bool:
        """Every send of every worker that takes part is used."""
        return all(local.machine.sources <= self.used.get(rank, set()) for rank, local in self.locals.items())

    def credit(self) -> Fraction:
        """The sum of all credit of the pass."""
        total = self.loose
        for local in self.locals.values():
            total += amount(local.machine._recovered)
            if local.machine._kept is not None:
                total += amount(local.machine._kept.credit)
            for _, _, share in local.machine._queue:
                total += amount(share.credit)
        return total
