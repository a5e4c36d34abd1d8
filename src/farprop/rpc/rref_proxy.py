"""``rref.rpc_sync()``, ``rref.rpc_async()``, ``rref.remote()``: calls of the value's methods, where it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from farprop.errors import ConnectionLostError, ReferenceLostError, UsageError
from farprop.rpc.constants import UNSET_RPC_TIMEOUT
from farprop.rpc.functions import async_execution
from farprop.runtime import owner_calls
from farprop.runtime.cells import Later
from farprop.runtime.current import current_agent, is_agent_set
from farprop.runtime.uncompiled import uncompiled

if TYPE_CHECKING:
    from farprop.rpc.rref import RRef


class RRefProxy:
    """Every attribute is a function that calls the method of that name.

    Args:
        rref: the reference to the value.
        rpc_api: how to call it: ``rpc.rpc_sync``, ``rpc.rpc_async`` or ``rpc.remote``.
        timeout: seconds for each call; unset, the process's default holds.
    """

    __slots__ = ("rpc_api", "rpc_timeout", "rref")

    def __init__(self, rref: RRef[Any], rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Callable[..., Any]:
        return partial(_invoke_rpc, self.rref, self.rpc_api, func_name, self.rpc_timeout)

    # Python looks these up on the class.

    def __enter__(self) -> Any:
        from farprop.rpc import api

        if self.rpc_api in (api.rpc_async, api.remote):
            how = self.rpc_api.__name__
            raise TypeError(f"`with` needs to know what __exit__ said, so use rref.rpc_sync(), not {how}.")
        return self.__getattr__("__enter__")()

    def __exit__(self, kind: Any, error: Any, _: Any) -> Any:
        return self.__getattr__("__exit__")(kind, error, None)  # a traceback can't travel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)


def _invoke_rpc(
    rref: RRef[Any], rpc_api: Callable[..., Any], func_name: str, timeout: float, *args: Any, **kwargs: Any
) -> Any:
    """Call a method of the value, on its owner."""
    from farprop.rpc import api

    if rpc_api is api.rpc_async:
        return _async(rref, timeout, func_name, args, kwargs)
    if rpc_api is api.remote:
        return _remote(rref, timeout, func_name, args, kwargs)
    return _sync(rref, rpc_api, timeout, func_name, args, kwargs)


def _local_invoke(rref: RRef[Any], func_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the owner: call a method of the value."""
    return getattr(rref.local_value(), func_name)(*args, **kwargs)


@async_execution
def _local_invoke_async_execution(
    rref: RRef[Any], func_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The same for a method that is decorated with ``async_execution``."""
    return _local_invoke(rref, func_name, args, kwargs)


def _call(rref: RRef[Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The function to call on the owner, and its arguments."""
    if rref.is_owner():
        return invoke_here, (rref, method, args, kwargs)
    rref._checked_agent(f"{method}() on it")
    record = rref._record
    return owner_calls.invoke, (record.rref.created_on, record.rref.local_id, record.exists, method, args, kwargs)


def invoke_here(rref: RRef[Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a value that its own worker has a reference to."""
    if rref._own is None:
        raise UsageError(f"{rref} is to a value of {rref.owner_name()}, and this runs where the value is.")
    cell = rref._own.cell
    invoke = partial(owner_calls.invoke_on, cell, method, args, kwargs)
    return invoke() if cell.done else Later(cell.when_done, invoke)


@uncompiled
def _sync(
    rref: RRef[Any],
    rpc_sync: Callable[..., Any],
    timeout: float,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    function, all_args = _call(rref, method, args, kwargs)
    began = time.monotonic()
    try:
        return rpc_sync(rref.owner_name(), function, all_args, timeout=timeout)
    except ReferenceLostError:
        raise
    except ConnectionLostError:
        if not rref.is_owner():
            rref._look_after_owner(f"{method}() on it", timeout, began)
        raise


@uncompiled
def _async(
    rref: RRef[Any], timeout: float, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.futures.Future[Any]:
    from farprop.rpc import api

    function, all_args = _call(rref, method, args, kwargs)
    future = api.rpc_async(rref.owner_name(), function, all_args, timeout=timeout)
    future.add_done_callback(partial(let_go, rref))  # the value must not be freed before
    return future


def let_go(_rref: RRef[Any], _future: torch.futures.Future[Any]) -> None:
    """What a future calls that has kept this reference until it was done."""


@uncompiled
def _remote(rref: RRef[Any], timeout: float, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RRef[Any]:
    from farprop.rpc import api

    # In a restricted job a type can't be sent. What can't be called says so when the result is used.
    if not (is_agent_set() and current_agent().dialect.restricted):
        kind = rref._get_type(timeout)
        if not hasattr(kind, method) and method not in _sync(rref, api.rpc_sync, timeout, "__dir__", (), {}):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {method!r}")
    function, all_args = _call(rref, method, args, kwargs)
    return api._remote(rref.owner_name(), function, all_args, {}, timeout, keep=rref)
