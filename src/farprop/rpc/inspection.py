"""Inspecting a worker: counters, and its live references."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from farprop._torch import sparse_values
from farprop.ids import GlobalId
from farprop.protocol.references.records import ValueData
from farprop.runtime.agent_registry import current_agent

_MAX_OBJECTS = 10_000  # that are measured in one value, so that inspection ends soon


@dataclass(frozen=True)
class LiveReference:
    """A reference of this worker: to a value that it owns and others refer to, or to a value of another worker."""

    id: GlobalId
    role: str
    """``owner`` if this worker has the value, ``user`` if another one has it."""
    owner: str
    state: str
    type: str
    """The type of the value; empty for a user."""
    nbytes: int
    """The bytes of the tensors in the value, or of the object; 0 for a user."""
    holders: tuple[str, ...]
    """The workers that refer to it, as far as this worker knows. A worker appears once per reference."""
    made_by: str
    created_at: str
    """The line of the program that created it, if this worker knows it."""
    seconds: float
    """Its age; 0 if it is not known."""

    def __str__(self) -> str:
        what = f"a {self.type} of {self.nbytes} bytes" if self.type else f"a value on {self.owner}"
        held = f", held by {', '.join(self.holders)}" if self.holders else ""
        made = f", made by {self.made_by}" if self.made_by else ""
        place = f", created at {self.created_at}" if self.created_at else ""
        return f"{self.id}: {what} ({self.state}){held}{made}{place}"


def live_references() -> list[LiveReference]:
    """List the references of this worker.

    Returns:
        The references, those to the largest values first.
    """
    agent = current_agent()
    own_name = agent.get_worker_info().name
    users, owned = agent.references.snapshot()
    found = []
    for value, holders in owned:
        slot: ValueData | None = getattr(value, "slot", None)
        made = slot if slot is not None and slot.done and slot.error is None else None
        found.append(
            LiveReference(
                id=value.rref,
                role="owner",
                owner=own_name,
                state=value.state.name.lower(),
                type="" if made is None else type(made.value).__name__,
                nbytes=0 if made is None else size_of(made.value),
                holders=tuple(sorted(map(agent.membership.name_of, holders))),
                made_by=slot.maker.decode(errors="replace") if slot is not None else "",
                created_at=slot.site.decode(errors="replace") if slot is not None else "",
                seconds=time.monotonic() - slot.created if slot is not None else 0.0,
            )
        )
    for record in users:
        found.append(
            LiveReference(
                id=record.rref,
                role="user",
                owner=agent.membership.name_of(record.owner),
                state=record.state.name.lower(),
                type="",
                nbytes=0,
                holders=(own_name,),
                made_by="",
                created_at=getattr(getattr(record, "info", None), "site", ""),
                seconds=0.0,
            )
        )
    return sorted(found, key=lambda reference: -reference.nbytes)


def debug_info() -> dict[str, int | float]:
    """Get counters of this worker: threads, calls, memory, references.

    Returns:
        The numbers by name.
    """
    agent = current_agent()
    info: dict[str, int | float] = {f"references.{key}": count for key, count in agent.references.counts().items()}
    info.update({key: float(value) if "." in value else int(value) for key, value in agent.get_debug_info().items()})
    return info


def size_of(value: Any) -> int:
    """The bytes of a value: of tensors and modules, also inside containers, and of other objects themselves."""
    total = 0
    seen: set[int] = set()
    left = [value]
    while left and len(seen) < _MAX_OBJECTS:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        try:
            if isinstance(item, torch.Tensor):
                total += _bytes_of(item)
            elif isinstance(item, torch.nn.Module):
                total += sum(map(_bytes_of, (*item.parameters(), *item.buffers())))
            else:
                total += sys.getsizeof(item)
                if isinstance(item, dict):
                    left.extend(item.values())
                elif isinstance(item, list | tuple | set | frozenset):
                    left.extend(item)
        except Exception:
            pass  # an object that can't be measured must not hide the others
    return total


def _bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor: of the values of a sparse one; 0 for an uninitialized parameter."""
    if isinstance(tensor, torch.nn.parameter.UninitializedParameter | torch.nn.parameter.UninitializedBuffer):
        return 0
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return (sparse_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()).nbytes
