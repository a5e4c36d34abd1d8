"""The shards of a distributed optimizer or scheduler, one on each worker: calling all of them, and their states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from farprop.errors import UsageError
from farprop.rpc import RRef


class WorkerShard(NamedTuple):
    """The object on one worker, and the indices of its parameters in the list of all parameters."""

    worker: str
    indices: tuple[int, ...]
    rref: RRef[Any]


StartCall = Callable[[], torch.futures.Future[Any]]


def run_on_all(calls: Iterable[tuple[str, StartCall]]) -> list[Any]:
    """Start a call on each worker, wait for all of them, and return their results.

    The first error is raised after all calls have ended, so no worker is still busy then.
    """
    errors: list[tuple[str, Exception]] = []
    started: list[tuple[str, torch.futures.Future[Any]]] = []
    # Tensors in the arguments are plain values. They must not become part of an autograd context.
    with torch.no_grad():
        for worker, start in calls:
            try:
                started.append((worker, start()))
            except Exception as error:
                errors.append((worker, error))
    results = []
    for worker, future in started:
        try:
            results.append(future.wait())
        except Exception as error:
            errors.append((worker, error))
    if not errors:
        return results
    try:
        raise _with_notes(errors)
    finally:
        errors.clear()  # breaks the cycle error -> traceback -> frame -> list


def _with_notes(errors: Sequence[tuple[str, Exception]]) -> Exception:
    """The first error, with the others as notes."""
    (_, first), *others = errors
    for worker, other in others:
        first.add_note(f"There was an error on {worker} too: {type(other).__name__}: {other}")
    return first


def call_all(shards: Iterable[WorkerShard], method: str, *args: Any) -> list[Any]:
    """Call a method of each shard's object with the same arguments, and return the results when all have ended."""
    return call_each([(shard, args) for shard in shards], method)


def call_each(calls: Iterable[tuple[WorkerShard, Sequence[Any]]], method: str) -> list[Any]:
    """Call a method of each shard's object with its own arguments, and return the results when all have ended."""
    return run_on_all((shard.worker, _start(shard, method, args)) for shard, args in calls)


def _start(shard: WorkerShard, method: str, args: Sequence[Any]) -> StartCall:
    return lambda: getattr(shard.rref.rpc_async(), method)(*args)


# States. A worker is identified by the parameters that it has, because it may have another name in another job.


def gather_state(shards: Sequence[WorkerShard], kind: str) -> dict[str, Any]:
    """The states of all shards. ``kind`` is ``"optimizer"`` or ``"scheduler"``."""
    states = call_all(shards, "state_dict")
    return {
        "workers": [
            {"name": shard.worker, "parameters": list(shard.indices), kind: state}
            for shard, state in zip(shards, states, strict=True)
        ]
    }


def load_state(shards: Sequence[WorkerShard], kind: str, state: dict[str, Any]) -> None:
    """Load a state that ``gather_state`` returned, each shard its own part."""
    try:
        parts = {tuple(part["parameters"]): part[kind] for part in state["workers"]}
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"This is not the state of a distributed {kind}. Give load_state_dict() what state_dict() of one returned."
        ) from error
    wanted = {shard.indices for shard in shards}
    if wanted != parts.keys():
        raise UsageError(
            f"The state does not fit the parameters of this {kind}. When it was saved, the workers had the parameters "
            f"{_listed(parts)}. Now they have {_listed(wanted)}. Give the parameters in the same order, and keep those "
            "that were on one worker on one worker."
        )
    call_each([(shard, (parts[shard.indices],)) for shard in shards], "load_state_dict")


def _listed(groups: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(str(list(indices)) for indices in sorted(groups))
