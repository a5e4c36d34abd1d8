"""``rref.rpc_sync()``, ``rref.rpc_async()``, ``rref.remote()``: calls of the value's methods, where it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from farprop.errors import ConnectionLostError, ReferenceLostError
from farprop.runtime import owner_calls
from farprop.runtime.cells import Later
from farprop.runtime.uncompiled import uncompiled

if TYPE_CHECKING:
    from farprop.rpc.rref import RRef


class RRefProxy:
    """Every attribute is a function that calls the method of that name."""

    __slots__ = ("_how", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], how: str, timeout: float) -> None:
        self._rref = rref
        self._how = how
        self._timeout = timeout

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(_HOW[self._how], self._rref, self._timeout, method)

    # Python looks these up on the class.

    def __enter__(self) -> Any:
        if self._how != "sync":
            raise TypeError(f"`with` needs to know what __exit__ said, so use rref.rpc_sync(), not {self._how}.")
        return self.__getattr__("__enter__")()

    def __exit__(self, kind: Any, error: Any, _: Any) -> Any:
        return self.__getattr__("__exit__")(kind, error, None)  # a traceback can't travel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)


def _call(rref: RRef[Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The function to call on the owner, and its arguments."""
    if rref.is_owner():
        return invoke_here, (rref, method, args, kwargs)
    rref._checked_agent(f"{method}() on it")
    record = rref._record
    return owner_calls.invoke, (record.rref.created_on, record.rref.local_id, record.exists, method, args, kwargs)


def invoke_here(rref: RRef[Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a value that its own worker has a reference to."""
    assert rref._own is not None
    cell = rref._own.cell
    invoke = partial(owner_calls.invoke_on, cell, method, args, kwargs)
    return invoke() if cell.done else Later(cell.when_done, invoke)


@uncompiled
def _sync(rref: RRef[Any], timeout: float, method: str, *args: Any, **kwargs: Any) -> Any:
    from farprop.rpc import api

    function, all_args = _call(rref, method, args, kwargs)
    began = time.monotonic()
    try:
        return api.rpc_sync(rref.owner_name(), function, all_args, timeout=timeout)
    except ReferenceLostError:
        raise
    except ConnectionLostError:
        if not rref.is_owner():
            rref._look_after_owner(f"{method}() on it", timeout, began)
        raise


@uncompiled
def _async(rref: RRef[Any], timeout: float, method: str, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
    from farprop.rpc import api

    function, all_args = _call(rref, method, args, kwargs)
    future = api.rpc_async(rref.owner_name(), function, all_args, timeout=timeout)
    future.add_done_callback(partial(let_go, rref))  # the value must not be freed before
    return future


def let_go(_rref: RRef[Any], _future: torch.futures.Future[Any]) -> None:
    """What a future calls that has kept this reference until it was done."""


@uncompiled
def _remote(rref: RRef[Any], timeout: float, method: str, *args: Any, **kwargs: Any) -> RRef[Any]:
    from farprop.rpc import api

    kind = rref._get_type(timeout)
    if not hasattr(kind, method) and method not in _sync(rref, timeout, "__dir__"):
        raise AttributeError(f"{kind.__name__!r} object has no attribute {method!r}")
    function, all_args = _call(rref, method, args, kwargs)
    return api._remote(rref.owner_name(), function, all_args, {}, timeout, keep=rref)


_HOW: dict[str, Callable[..., Any]] = {"sync": _sync, "async": _async, "remote": _remote}
