"""Who is still inside of a gathering does not run calls of those who have come out of it.

What a program does after a gathering is often to register something, and to call the others. On the others the
gathering may be over a moment later, and then they would run the call before they have registered anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable


class Gate:
    """Requests that wait until this worker is through with a gathering. ``submit`` runs one on a thread of the pool."""

    def __init__(self, submit: Callable[[Callable[[], None]], None]) -> None:
        self.is_shut = False  # what every request looks at first
        self._submit = submit
        self._lock = threading.Lock()
        self._gatherings: dict[Hashable, tuple[frozenset[str], frozenset[bytes]]] = {}
        self._held: list[tuple[str, bytes, Callable[[], None]]] = []

    def shut(self, key: Hashable, workers: frozenset[str], but_for: frozenset[bytes]) -> None:
        """Hold back what these workers call, but for those functions, which the gathering itself is made of."""
        with self._lock:
            self._gatherings[key] = workers, but_for
            self.is_shut = True

    def open(self, key: Hashable) -> None:
        """That gathering holds nothing back any more."""
        if not self.is_shut:
            return
        with self._lock:
            self._gatherings.pop(key, None)
            self.is_shut = bool(self._gatherings)
            held, self._held = self._held, []
            free: list[tuple[str, bytes, Callable[[], None]]] = []
            for request in held:
                (self._held if self._is_held(*request[:2]) else free).append(request)
        for _, _, run in free:
            self._submit(run)

    def hold(self, worker: str, function: bytes, run: Callable[[], None]) -> bool:
        """Whether a request of a worker has to wait; ``run`` is called when it need not any more."""
        with self._lock:
            if not self._is_held(worker, function):
                return False
            self._held.append((worker, function, run))
            return True

    def _is_held(self, worker: str, function: bytes) -> bool:
        return any(worker in workers and function not in but for workers, but in self._gatherings.values())
