"""Looking at a worker: counts, and the references that live on it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from farprop._torch import sparse_values
from farprop.ids import GlobalId
from farprop.runtime.current import current_agent

_MOST_LOOKED_AT = 10_000  # objects in one value: looking at a worker must not take for ever


@dataclass(frozen=True)
class LiveReference:
    """One reference of this worker: to a value that it has and others refer to, or to a value of another worker."""

    id: GlobalId
    role: str
    """``owner`` if the value is here, ``user`` if it is elsewhere."""
    owner: str
    state: str
    type: str
    """Of the value; empty where it is not here."""
    nbytes: int
    """Of the tensors in the value, or of the object; 0 where it is not here."""
    holders: tuple[str, ...]
    """The workers that refer to it, as far as this one knows; a worker as often as it does."""
    made_by: str
    created_at: str
    """The line of the program that made it, if known here."""
    seconds: float
    """How long it has been there; 0 if it is not known."""

    def __str__(self) -> str:
        what = f"a {self.type} of {self.nbytes} bytes" if self.type else f"a value on {self.owner}"
        held = f", held by {', '.join(self.holders)}" if self.holders else ""
        made = f", made by {self.made_by}" if self.made_by else ""
        place = f", created at {self.created_at}" if self.created_at else ""
        return f"{self.id}: {what} ({self.state}){held}{made}{place}"


def live_references() -> list[LiveReference]:
    """The references of this worker, largest first."""
    agent = current_agent()
    me = agent.get_worker_info().name
    users, owned = agent.references.snapshot()
    found = []
    for value, holders in owned:
        cell = value.cell
        has = cell is not None and cell.done and cell.error is None
        found.append(
            LiveReference(
                id=value.rref,
                role="owner",
                owner=me,
                state=value.state.name.lower(),
                type=type(cell.value).__name__ if has else "",
                nbytes=size_of(cell.value) if has else 0,
                holders=tuple(sorted(map(agent.name_of_rank, holders))),
                made_by=cell.maker.decode(errors="replace") if cell is not None else "",
                created_at=cell.site.decode(errors="replace") if cell is not None else "",
                seconds=time.time() - cell.created if cell is not None else 0.0,
            )
        )
    for record in users:
        found.append(
            LiveReference(
                id=record.rref,
                role="user",
                owner=agent.name_of_rank(record.owner),
                state=record.state.name.lower(),
                type="",
                nbytes=0,
                holders=(me,),
                made_by="",
                created_at=record.cell.site if record.cell is not None else "",
                seconds=0.0,
            )
        )
    return sorted(found, key=lambda reference: -reference.nbytes)


def debug_info() -> dict[str, int | float]:
    """What this worker is doing, in numbers: threads, calls, memory, and counts of references."""
    agent = current_agent()
    info: dict[str, int | float] = {f"references.{key}": count for key, count in agent.references.counts().items()}
    info.update({key: float(value) if "." in value else int(value) for key, value in agent.get_debug_info().items()})
    return info


def size_of(value: Any) -> int:
    """The bytes of the tensors in a value, where they are easily found; else of the object alone."""
    total = 0
    seen: set[int] = set()
    left = [value]
    while left and len(seen) < _MOST_LOOKED_AT:
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
            pass  # a value that can't be measured must not keep the others from being seen
    return total


def _bytes_of(tensor: torch.Tensor) -> int:
    """Of a sparse one those of its values; none of a parameter that is not initialised yet."""
    if isinstance(tensor, torch.nn.parameter.UninitializedParameter | torch.nn.parameter.UninitializedBuffer):
        return 0
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return (sparse_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()).nbytes
