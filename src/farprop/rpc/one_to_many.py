"""Calls of one function on many workers: ``broadcast``, ``map``, and ``gather`` for their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch

from farprop._torch import profiler_enabled
from farprop.errors import GatherError, UsageError
from farprop.ids import WorkerInfo
from farprop.rpc import api
from farprop.rpc.call_arguments import Args, Kwargs, Later, args_of, kwargs_of
from farprop.rpc.constants import UNSET_RPC_TIMEOUT
from farprop.rpc.internal import _internal_rpc_pickler
from farprop.rpc.options import checked_timeout
from farprop.runtime import profiling
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.dynamo_disable import uncompiled
from farprop.runtime.futures import Future
from farprop.runtime.thread_pool import check_may_block

_K = TypeVar("_K")
_R = TypeVar("_R")
Worker = str | int | WorkerInfo


@overload
def broadcast(
    workers: Iterable[Worker],
    func: str,
    args: Args | None = None,
    kwargs: Kwargs | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, Future[Any]]: ...


@overload
def broadcast(
    workers: Iterable[Worker],
    func: Callable[..., Later[_R]],
    args: Args | None = None,
    kwargs: Kwargs | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, Future[_R]]: ...


@overload
def broadcast(
    workers: Iterable[Worker],
    func: Callable[..., _R],
    args: Args | None = None,
    kwargs: Kwargs | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, Future[_R]]: ...


@uncompiled
def broadcast(
    workers: Iterable[Worker],
    func: Callable[..., Any] | str,
    args: Args | None = None,
    kwargs: Kwargs | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, Future[Any]]:
    """Run ``func(*args, **kwargs)`` on each of several workers, and return their futures at once.

    The arguments are encoded once. Large ones cross each link between hosts once, and the workers of a host share one
    copy of them; a worker that writes to a tensor it gets changes its own alone. Don't change tensors in the arguments
    before all futures are done.

    Args:
        workers: Names, ranks or ``WorkerInfo``; this worker may be among them.
        func: As for :func:`rpc_async`.
        args: Positional arguments of ``func``.
        kwargs: Keyword arguments of ``func``.
        timeout: The seconds that each call may take; 0 disables the timeout. By default the process's default.

    Returns:
        For each worker, by its name and in the given order, a future of what ``func`` returns there. Each fails alone.

    Raises:
        UsageError: This process is not a worker, there is no such worker, or one is given twice. Nothing was sent.
        TypeError: ``args`` is no tuple, or an argument can't be sent. Nothing was sent.

    Example:
        ``rpc.gather(rpc.broadcast(["worker1", "worker2"], load_weights, args=(model.state_dict(),)))``
    """
    targets = _targets(workers)
    pair = args_of(args), kwargs_of(kwargs)
    futures = _call(targets, func, [pair] * len(targets), timeout)
    return {target.name: future for target, future in zip(targets, futures, strict=True)}


@overload
def map(
    workers: Iterable[Worker],
    func: str,
    list_of_args: Iterable[Args],
    kwargs: Kwargs | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[Future[Any]]: ...


@overload
def map(
    workers: Iterable[Worker],
    func: Callable[..., Later[_R]],
    list_of_args: Iterable[Args],
    kwargs: Kwargs | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[Future[_R]]: ...


@overload
def map(
    workers: Iterable[Worker],
    func: Callable[..., _R],
    list_of_args: Iterable[Args],
    kwargs: Kwargs | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[Future[_R]]: ...


@uncompiled
def map(
    workers: Iterable[Worker],
    func: Callable[..., Any] | str,
    list_of_args: Iterable[Args],
    kwargs: Kwargs | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[Future[Any]]:
    """Run ``func`` on several workers, with other arguments on each, and return the futures at once.

    The first arguments go to the first worker, the second to the second, and so on; if there are more than workers, the
    next ones go to the first worker again. So which worker gets what does not depend on how fast they are. A large
    tensor that calls to several workers have in common travels as in :func:`broadcast`.

    Args:
        workers: Names, ranks or ``WorkerInfo``; this worker may be among them.
        func: As for :func:`rpc_async`.
        list_of_args: The positional arguments of each call, as tuples.
        kwargs: Keyword arguments of ``func``, the same in each call.
        timeout: The seconds that each call may take; 0 disables the timeout. By default the process's default.

    Returns:
        The futures, in the order of ``list_of_args``.

    Raises:
        UsageError: This process is not a worker, there is no such worker, one is given twice, or there are arguments
            and no workers. Nothing was sent.
        TypeError: One of ``list_of_args`` is no tuple, or an argument can't be sent. Nothing was sent.

    Example:
        ``losses = rpc.gather(rpc.map(["worker1", "worker2"], evaluate, [(model, shard) for shard in shards]))``
    """
    targets = _targets(workers)
    common = kwargs_of(kwargs)
    pairs = [(args_of(args, f"list_of_args[{index}]"), common) for index, args in enumerate(list_of_args)]
    if pairs and not targets:
        raise UsageError(f"rpc.map has the arguments of {len(pairs)} calls, and no workers to make them on.")
    return list(_call([targets[index % len(targets)] for index in range(len(pairs))], func, pairs, timeout))


@overload
def gather(
    futures: Mapping[_K, torch.futures.Future[_R]], return_exceptions: Literal[False] = False
) -> dict[_K, _R]: ...


@overload
def gather(futures: Mapping[_K, torch.futures.Future[_R]], return_exceptions: bool) -> dict[_K, _R | Exception]: ...


@overload
def gather(futures: Sequence[torch.futures.Future[_R]], return_exceptions: Literal[False] = False) -> list[_R]: ...


@overload
def gather(futures: Sequence[torch.futures.Future[_R]], return_exceptions: bool) -> list[_R | Exception]: ...


@uncompiled
def gather(futures: Any, return_exceptions: bool = False) -> Any:
    """Wait for all of several futures, and return their results.

    Args:
        futures: The dict of :func:`broadcast`, the list of :func:`map`, or futures of any other calls.
        return_exceptions: Whether the result of a call that failed is its exception. By default an error is raised for
            all that failed, once all calls have ended.

    Returns:
        The results: a dict with the same keys if ``futures`` is one, or else a list in the same order.

    Raises:
        GatherError: Calls failed. It is an ``ExceptionGroup`` of their errors, and has those errors and the results of
            the others, each by worker or place in the list.
        TypeError: Something in ``futures`` is no future.
        UsageError: This would block the other coroutines that were called on this worker: await the futures there.

    Example:
        ``results = rpc.gather(rpc.broadcast(rpc.workers(), torch.initial_seed))``
    """
    keys: Sequence[Any]
    if isinstance(futures, Mapping):
        keys, waited = list(futures), list(futures.values())
    else:
        waited = list(futures) if isinstance(futures, Iterable) else [futures]
        keys = range(len(waited))
    for future in waited:
        if future is futures or not (hasattr(future, "wait") and hasattr(future, "done")):
            raise TypeError(
                "rpc.gather waits for futures: the dict of rpc.broadcast, the list of rpc.map, or a list of futures, "
                f"and not {future!r}. Wait for one future with future.wait(), for a reference with rref.to_here()."
            )
    if not all(future.done() for future in waited):
        check_may_block("rpc.gather", "`await asyncio.gather(*futures)`, of a dict `futures.values()`")
    results: dict[Any, Any] = {}
    errors: dict[Any, Exception] = {}
    for key, future in zip(keys, waited, strict=True):
        try:
            results[key] = future.wait()
        except Exception as error:
            errors[key] = error
    if errors and not return_exceptions:
        raise GatherError.of(errors, results)
    outcomes = {key: errors[key] if key in errors else results[key] for key in keys}
    return outcomes if isinstance(futures, Mapping) else list(outcomes.values())


def _targets(workers: Iterable[Worker]) -> list[WorkerInfo]:
    """The workers, each once; raises before anything is sent."""
    current_agent()
    if isinstance(workers, str | int | WorkerInfo):
        raise UsageError(f"The workers have to be a list, such as [{workers!r}], and not {workers!r} itself.")
    targets = [api._to_worker_info(worker) for worker in workers]
    seen: set[str] = set()
    for target in targets:
        if api.get_worker_info(target.name) != target:
            raise UsageError(f"There is no worker {target}.")
        if target.name in seen:
            raise UsageError(f"{target.name} is given twice. Each worker gets its call once: give it once.")
        seen.add(target.name)
    return targets


def _call(
    targets: Sequence[WorkerInfo],
    func: Callable[..., Any] | str,
    pairs: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    timeout: float,
) -> Sequence[Future[Any]]:
    if not callable(func):
        api._check_name(func)
    seconds = current_agent().rpc_timeout if timeout == UNSET_RPC_TIMEOUT else checked_timeout(timeout)
    is_profiled = profiler_enabled() and not profiling.is_farprops_own
    if is_profiled or api._default_pickler is not _internal_rpc_pickler:
        # Each call has its own entry in a profile, and a pickler of the program may do anything.
        return [
            api.rpc_async(target, func, args, kwargs, timeout)
            for target, (args, kwargs) in zip(targets, pairs, strict=True)
        ]
    futures = [Future() for _ in targets]
    if targets:
        current_agent().call_many(targets, func, pairs, seconds, futures)
    api._note_futures(futures)
    return futures
