# mypy: ignore-errors
# ruff: noqa: F821
"""Classes that TorchScript compiles. Python never instantiates them.

The functions that they call are not defined here: ``script_rref`` supplies a set of them for each type of value. If all
functions of a set are operators, code that uses the compiled class can be saved.
"""

from typing import Any

from torch.futures import Future


class Owner:
    """A ``WorkerInfo`` in compiled code."""

    def __init__(self, name: str, id: int):
        self.name = name
        self.id = id


class Reference:
    """An ``RRef`` in compiled code. The box holds the RRef of Python."""

    def __init__(self, box: Future[Any]):
        self._box = box

    def to_here(self, timeout: float = -1.0):
        return to_here(self._box, timeout)

    def local_value(self):
        return local_value(self._box)

    def is_owner(self):
        return is_owner(self._box)

    def owner(self):
        return Owner(owner_name(self._box), owner_id(self._box))

    def owner_name(self):
        return owner_name(self._box)

    def confirmed_by_owner(self):
        return confirmed_by_owner(self._box)

    def __getstate__(self):
        return save(self._box)

    def __setstate__(self, state: str):
        self._box = load(state)
