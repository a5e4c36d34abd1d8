"""``rref.rpc_sync()``, ``rref.rpc_async()``, ``rref.remote()``: calls of the value's methods on its owner."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import torch

from farprop.errors import ConnectionLostError, ReferenceLostError, UsageError
from farprop.rpc.constants import UNSET_RPC_TIMEOUT
from farprop.rpc.functions import async_execution
from farprop.rpc.options import checked_timeout
from farprop.runtime.agent_registry import current_agent, is_agent_set
from farprop.runtime.dynamo_disable import uncompiled
from farprop.runtime.futures import keep_until_done
from farprop.runtime.references.rpc_handlers import when_done

if TYPE_CHECKING:
    from farprop.rpc.rref import RRef


_Result = TypeVar("_Result")


class RemoteMethod(partial[_Result]):
    """What an attribute of a proxy is: a function that calls the method of that name."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        rref, rpc_api, method, _ = self.args
        owner = rref.owner_name()
        how = getattr(rpc_api, "__name__", "rpc_sync")
        raise AttributeError(
            f"rref.{how}().{method} has no attribute {name!r}: it is a function that calls the method {method} of the "
            f"value on {owner}. Methods are all that a proxy has. To read an attribute, call a function there: "
            f"rpc.rpc_sync({owner!r}, lambda r: r.local_value().{method}, args=(rref,))."
        )


class RRefProxy(Generic[_Result]):
    """Calls methods of a value on its owner: each attribute is a function that calls the method of that name.

    Args:
        rref: The reference to the value.
        rpc_api: How to call it: ``rpc.rpc_sync``, ``rpc.rpc_async`` or ``rpc.remote``.
        timeout: The timeout of each call in seconds. By default the process's default.
    """

    __slots__ = ("rpc_api", "rpc_timeout", "rref")

    def __init__(self, rref: RRef[Any], rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Callable[..., _Result]:
        return RemoteMethod(_invoke_rpc, self.rref, self.rpc_api, func_name, self.rpc_timeout)

    # Python looks these up on the class.

    def __enter__(self) -> Any:
        from farprop.rpc import api

        if self.rpc_api in (api.rpc_async, api.remote):
            how = self.rpc_api.__name__
            raise TypeError(f"`with` needs the result of __exit__, so use rref.rpc_sync(), not {how}.")
        return self.__getattr__("__enter__")()

    def __exit__(self, kind: Any, error: Any, _: Any) -> Any:
        return self.__getattr__("__exit__")(kind, error, None)  # a traceback can't be sent

    def __call__(self, *args: Any, **kwargs: Any) -> _Result:
        return self.__getattr__("__call__")(*args, **kwargs)


def _invoke_rpc(
    rref: RRef[Any], rpc_api: Callable[..., Any], func_name: str, timeout: float, *args: Any, **kwargs: Any
) -> Any:
    """Call a method of the value on its owner, with the given function of the API."""
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
    """On the owner: call a method that is decorated with ``async_execution``."""
    return _local_invoke(rref, func_name, args, kwargs)


def _call(rref: RRef[Any], method: str, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The function to call on the owner, and its positional arguments. Those of the method follow the others, because
    the fast codec takes no tuple in a tuple.
    """
    if rref.is_owner():
        return invoke_here, (rref, method, *args)
    rref._checked_agent(f"{method}() on it")
    record = rref._record
    return invoke_on_owner, (*record.rref, record.exists, method, *args)


def invoke_on_owner(created_on: int, local_id: int, exists: bool, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """On the owner: call a method of a value that another worker has a reference to."""
    return current_agent().owner_methods.invoke(created_on, local_id, exists, method, args, kwargs)


def _rref_typeof_on_owner(created_on: int, local_id: int, exists: bool) -> Any:
    """On the owner: the type of a value. Torch's profiles show the call under this name."""
    return current_agent().owner_methods.type_of(created_on, local_id, exists)


def invoke_here(rref: RRef[Any], method: str, /, *args: Any, **kwargs: Any) -> Any:
    """On the owner: call a method of the value of one of its own references."""
    if rref._owned is None:
        raise UsageError(f"{rref} refers to a value on {rref.owner_name()}. invoke_here has to run there.")
    slot = rref._owned.slot
    return when_done(slot, partial(current_agent().owner_methods.invoke_on, slot, method, args, kwargs))


# The arguments in front of those of the method, for errors.
invoke_on_owner.own_arguments = 4  # type: ignore[attr-defined]
invoke_here.own_arguments = 2  # type: ignore[attr-defined]


@uncompiled
def _sync(
    rref: RRef[Any],
    rpc_sync: Callable[..., Any],
    timeout: float,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    function, all_args = _call(rref, method, args)
    began = time.monotonic()
    try:
        return rpc_sync(rref.owner_name(), function, all_args, kwargs, timeout)
    except ReferenceLostError:
        raise
    except ConnectionLostError:
        if not rref.is_owner():
            seconds = current_agent().rpc_timeout if timeout == UNSET_RPC_TIMEOUT else checked_timeout(timeout)
            rref._check_owner(f"{method}() on it", seconds, began)
        raise


@uncompiled
def _async(
    rref: RRef[Any], timeout: float, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.futures.Future[Any]:
    from farprop.rpc import api

    function, all_args = _call(rref, method, args)
    future = api.rpc_async(rref.owner_name(), function, all_args, kwargs, timeout)
    keep_until_done(future, rref)  # the owner must not free the value before
    return future


@uncompiled
def _remote(rref: RRef[Any], timeout: float, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RRef[Any]:
    from farprop.rpc import api

    # In a restricted job types can't be sent. There a wrong method raises when the result is used.
    if not (is_agent_set() and current_agent().dialect.restricted):
        kind = rref._get_type(timeout)
        if not hasattr(kind, method) and method not in _sync(rref, api.rpc_sync, timeout, "__dir__", (), {}):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {method!r}")
    function, all_args = _call(rref, method, args)
    return api._remote(rref.owner_name(), function, all_args, kwargs, timeout, keep=rref)
