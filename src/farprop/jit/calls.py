"""Calls that compiled code makes: for each function that is called, a Python function of the right type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farprop._torch import FutureType, profiler_enabled
from farprop.errors import UsageError
from farprop.jit.contexts import enter_carried_context
from farprop.jit.python_functions import ANY, JitType, python_function
from farprop.jit.references import reference_type
from farprop.rpc import api
from farprop.rpc.constants import UNSET_RPC_TIMEOUT
from farprop.rpc.internal import RPCExecMode
from farprop.runtime import profiling
from farprop.runtime.current import current_agent
from farprop.runtime.futures import Future
from farprop.runtime.gradients.contexts import current_context
from farprop.wire.functions import name_of


class Target:
    """A function that compiled code calls on other workers."""

    def __init__(self, function: Any) -> None:
        """``function`` is a script function, one decorated with ``async_execution``, or one that can be compiled."""
        inner = getattr(function, "_wrapped_async_rpc_function", function)
        compiled: Any = inner if isinstance(inner, torch.jit.ScriptFunction) else torch.jit.script(inner)
        self.schema = compiled.schema
        result = self.schema.returns[0].type
        if inner is not function and result.kind() == "FutureType":
            result = result.getElementType()
        self.function = function
        self.is_compiled = compiled is inner
        self.result: JitType = result

    def check(self) -> None:
        """Raise if other workers can't find the function as a compiled one."""
        if not self.is_compiled or name_of(self.function) is None:
            name = self.schema.name
            raise UsageError(
                f"attempted to get undefined function {name}: compiled code calls what the other worker has under the "
                f"same name, compiled. Define {name} in a module, and decorate it with @torch.jit.script."
            )

    def check_arguments(self, positional: int) -> None:
        """Raise if a call with so many positional arguments can't be right, in the words of TorchScript."""
        arguments = self.schema.arguments
        if positional > len(arguments):
            raise UsageError(
                f"Expected at most {len(arguments)} arguments but found {positional} positional arguments."
            )
        for argument in arguments[positional:]:
            if not argument.has_default_value():
                raise UsageError(f"Argument {argument.name} not provided.")


def synchronous(target: Target) -> Callable[..., Any]:
    """``rpc_sync`` to the target, for compiled code."""
    return _caller(target, _rpc_sync, "rpc_sync", target.result)


def asynchronous(target: Target) -> Callable[..., Any]:
    """``rpc_async`` to the target, for compiled code."""
    return _caller(target, _rpc_async, "rpc_async", FutureType(target.result))


def referring(target: Target) -> Callable[..., Any]:
    """``remote`` to the target, for compiled code."""
    return _caller(target, api.remote, "remote", reference_type(target.result))


def _caller(target: Target, call: Callable[..., Any], name: str, result: JitType) -> Callable[..., Any]:
    function = target.function
    checked = False

    def from_compiled_code(to: Any, args: Any, kwargs: Any, timeout: Any) -> Any:
        nonlocal checked
        if not checked:
            target.check()
            checked = True
        outer = enter_carried_context()
        try:
            return call(to, function, args, kwargs, UNSET_RPC_TIMEOUT if timeout is None else timeout)
        finally:
            if outer is not None:
                current_context.reset(outer)

    from_compiled_code.target = target  # type: ignore[attr-defined]
    return python_function(from_compiled_code, name, result, to=ANY, args=ANY, kwargs=ANY, timeout=ANY)


def _rpc_sync(to: Any, function: Any, args: Any, kwargs: Any, timeout: Any) -> Any:
    if profiler_enabled() and profiling.session() is not None:
        return _start_profiled(to, function, args, kwargs, timeout).wait()
    return api.rpc_sync(to, function, args, kwargs, timeout)


def _rpc_async(to: Any, function: Any, args: Any, kwargs: Any, timeout: Any) -> Any:
    if profiler_enabled() and profiling.session() is not None:
        return _start_profiled(to, function, args, kwargs, timeout)
    return api.rpc_async(to, function, args, kwargs, timeout)


def _start_profiled(to: Any, function: Any, args: Any, kwargs: Any, timeout: Any) -> Future:
    """Profiles tell calls of compiled code from others."""
    session = profiling.session()
    assert session is not None
    return api._call_profiled(current_agent(), session, RPCExecMode.ASYNC_JIT, to, function, args, kwargs, timeout)
