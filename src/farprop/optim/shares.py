"""The workers that have a share in an optimiser or scheduler: calls of all of them, and their states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from farprop.errors import UsageError
from farprop.rpc import RRef


class Share(NamedTuple):
    """What one worker has: an object there, and which parameters it is for, by their place in the list of all."""

    worker: str
    places: tuple[int, ...]
    rref: RRef[Any]


Start = Callable[[], torch.futures.Future[Any]]


def on_all(starts: Iterable[tuple[str, Start]]) -> list[Any]:
    """Start a call on each worker and return the results, when all are done.

    The first error is raised, and only then: when this returns, no worker is still at it.
    """
    errors: list[tuple[str, Exception]] = []
    under_way: list[tuple[str, torch.futures.Future[Any]]] = []
    # A tensor in the arguments is a plain value to the other side, also inside of an autograd context.
    with torch.no_grad():
        for worker, start in starts:
            try:
                under_way.append((worker, start()))
            except Exception as error:
                errors.append((worker, error))
    results = []
    for worker, future in under_way:
        try:
            results.append(future.wait())
        except Exception as error:
            errors.append((worker, error))
    if not errors:
        return results
    try:
        raise _first_of(errors)
    finally:
        errors.clear()  # they keep this frame, and must not be kept by it


def _first_of(errors: Sequence[tuple[str, Exception]]) -> Exception:
    """The first error, with the others as notes."""
    (_, first), *others = errors
    for worker, other in others:
        first.add_note(f"There was an error on {worker} too: {type(other).__name__}: {other}")
    return first


def call_all(shares: Iterable[Share], method: str, *args: Any) -> list[Any]:
    """Call a method of the object of each share; the results, when all are done."""
    return call_each([(share, args) for share in shares], method)


def call_each(calls: Iterable[tuple[Share, Sequence[Any]]], method: str) -> list[Any]:
    """As ``call_all``, with arguments for each."""
    return on_all((share.worker, _start(share, method, args)) for share, args in calls)


def _start(share: Share, method: str, args: Sequence[Any]) -> Start:
    return lambda: getattr(share.rref.rpc_async(), method)(*args)


# States. Workers are told apart by the parameters that they have: in another job they may have other names.


def gathered(shares: Sequence[Share], kind: str) -> dict[str, Any]:
    """The state of all shares. ``kind`` is what they are of."""
    states = call_all(shares, "state_dict")
    return {
        "workers": [
            {"name": share.worker, "parameters": list(share.places), kind: state}
            for share, state in zip(shares, states, strict=True)
        ]
    }


def load(shares: Sequence[Share], kind: str, state: dict[str, Any]) -> None:
    """Give each share its part of a state that ``gathered`` made."""
    try:
        parts = {tuple(part["parameters"]): part[kind] for part in state["workers"]}
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"This is not the state of a distributed {kind}. Give load_state_dict() what state_dict() of one returned."
        ) from error
    wanted = {share.places for share in shares}
    if wanted != parts.keys():
        raise UsageError(
            f"The state is for other parameters than this {kind} has. Its workers had the parameters "
            f"{_listed(parts)}, and here they have {_listed(wanted)}. Give the parameters in the same order, and "
            "those that were on one worker on one worker again."
        )
    call_each([(share, (parts[share.places],)) for share in shares], "load_state_dict")


def _listed(places: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(str(list(some)) for some in sorted(places))
