"""The process behind each rank. A restarted worker keeps its rank, but is another instance."""

from __future__ import annotations

from collections.abc import Callable

from farprop.runtime.references.guarded_machine import GuardedMachine


class PeerInstances:
    """The last known instance of each rank, and whether it is dead.

    Args:
        guard: The state machine of references, which lists the dead ranks. Its lock guards this table, too.
        on_replaced: Called with a rank when another process has taken it: the earlier process is dead.
    """

    def __init__(self, guard: GuardedMachine, on_replaced: Callable[[int], None]) -> None:
        self._guard = guard
        self._machine = guard.machine
        self._on_replaced = on_replaced
        self._instances: dict[int, str] = {}

    def meet(self, rank: int, instance: str) -> None:
        """A worker has proved who it is. If another instance had its rank, that one is dead."""
        if self._guard.locked(self._instances.setdefault, rank, instance) == instance:
            return
        self._on_replaced(rank)
        self._guard.run(self._replace, rank, instance)

    def _replace(self, rank: int, instance: str) -> None:
        if self._instances.get(rank) != instance:
            self._instances[rank] = instance
            self._machine.replaced(rank)

    # Each method does one lookup in a dictionary or a set: the interpreter's lock is enough.

    def get(self, rank: int, default: str | None = None) -> str | None:
        """The last known instance of a rank."""
        return self._instances.get(rank, default)

    def is_dead(self, rank: int, instance: str) -> bool:
        """Whether this instance is known to be dead. If its rank is dead and had no known instance, any instance is."""
        return rank in self._machine.dead and self._instances.get(rank, instance) == instance
