"""The shards of an optimizer: an object on each worker that owns parameters, and calls to all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from farprop._torch import set_grad_enabled
from farprop.rpc import RRef


def indices_by_worker(params_rref: Iterable[RRef[torch.Tensor]]) -> dict[str, list[int]]:
    """The places of the parameters in the list, by the worker that owns them; raises if one is no reference."""
    indices: dict[str, list[int]] = {}
    for index, parameter in enumerate(params_rref):
        if not isinstance(parameter, RRef):
            raise TypeError(
                f"params_rref[{index}] should be an RRef to a parameter, but is a {type(parameter).__name__}. "
                "Wrap a parameter of this worker: RRef(parameter)."
            )
        indices.setdefault(parameter.owner_name(), []).append(index)
    return indices


class WorkerShard(NamedTuple):
    """The object on one worker, and the indices of its parameters in the list of all parameters."""

    worker: str
    indices: tuple[int, ...]
    rref: RRef[Any]


StartCall = Callable[[], torch.futures.Future[Any]]


def run_on_all(
    calls: Iterable[tuple[str, StartCall]], meanwhile: tuple[str, Callable[[], None]] | None = None
) -> list[Any]:
    """Start a call on each worker, wait for all of them, and return their results.

    The first error is raised after all calls have ended, so no worker is still busy then.

    Args:
        calls: For each worker, what starts its call.
        meanwhile: This worker's name, and what it does once the calls are started.
    """
    errors: list[tuple[str, Exception]] = []
    started: list[tuple[str, torch.futures.Future[Any]]] = []
    # Tensors in the arguments are plain values. They must not become part of an autograd context.
    before = torch.is_grad_enabled()
    try:
        set_grad_enabled(False)
        for worker, start in calls:
            try:
                started.append((worker, start()))
            except Exception as error:
                errors.append((worker, error))
    finally:
        set_grad_enabled(before)
    if meanwhile is not None:
        try:
            meanwhile[1]()
        except Exception as error:
            errors.append((meanwhile[0], error))
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
    return run_on_all((shard.worker, start_method(shard, method, args)) for shard, args in calls)


def start_method(
    shard: WorkerShard, method: str, args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})
) -> StartCall:
    """What starts the call of a method of a shard's object."""
    return lambda: getattr(shard.rref.rpc_async(), method)(*args, **kwargs)
