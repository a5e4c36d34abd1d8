"""Calls that compiled code makes.

TorchScript has no type for a function that takes another function, as ``rpc_sync`` does. So :func:`rewrite` turns a
call such as ``rpc.rpc_async(to, add, (x, y))`` into ``name(to, (x, y), None, None)`` before the compiler sees it. The
name is a key of ``stand_ins``: a Python function that calls ``add`` on other workers and has the types of ``add``.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

from farprop import autograd
from farprop._torch import FutureType, profiler_enabled
from farprop.errors import UsageError
from farprop.jit.python_ops import ANY, JitType, dist_backward, enter_carried_context, get_gradients, python_function
from farprop.jit.script_rref import reference_type
from farprop.rpc import api
from farprop.rpc.constants import UNSET_RPC_TIMEOUT
from farprop.rpc.internal import RPCExecMode
from farprop.runtime import profiling
from farprop.runtime.autograd.contexts import current_context
from farprop.wire.function_names import name_of


class Target:
    """A function that compiled code calls on other workers.

    Args:
        function: A script function, a function decorated with ``async_execution``, or one that can be compiled.
    """

    def __init__(self, function: Any) -> None:
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
        """Raise ``UsageError`` if other workers can't look up the compiled function by its name."""
        if not self.is_compiled or name_of(self.function) is None:
            name = self.schema.name
            raise UsageError(
                f"attempted to get undefined function {name}: the other worker looks up a compiled function of this "
                f"name. Define {name} in a module, and decorate it with @torch.jit.script."
            )

    def check_arguments(self, positional: int) -> None:
        """Raise ``UsageError``, worded as in TorchScript, if the number of positional arguments is wrong."""
        arguments = self.schema.arguments
        if positional > len(arguments):
            raise UsageError(
                f"Expected at most {len(arguments)} arguments but found {positional} positional arguments."
            )
        for argument in arguments[positional:]:
            if not argument.has_default_value():
                raise UsageError(f"Argument {argument.name} not provided.")


def sync_stand_in(target: Target) -> Callable[..., Any]:
    """The stand-in for ``rpc_sync`` calls of the target."""
    return _caller(target, _rpc_sync, "rpc_sync", target.result)


def async_stand_in(target: Target) -> Callable[..., Any]:
    """The stand-in for ``rpc_async`` calls of the target."""
    return _caller(target, _rpc_async, "rpc_async", FutureType(target.result))


def remote_stand_in(target: Target) -> Callable[..., Any]:
    """The stand-in for ``remote`` calls of the target."""
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


# Profiles have a name of their own for calls from compiled code.


def _rpc_sync(to: Any, function: Any, args: Any, kwargs: Any, timeout: float) -> Any:
    if profiler_enabled() and profiling.session() is not None:
        return api._invoke_rpc(to, function, RPCExecMode.ASYNC_JIT, args, kwargs, timeout).wait()
    return api.rpc_sync(to, function, args, kwargs, timeout)


def _rpc_async(to: Any, function: Any, args: Any, kwargs: Any, timeout: float) -> Any:
    if profiler_enabled() and profiling.session() is not None:
        return api._invoke_rpc(to, function, RPCExecMode.ASYNC_JIT, args, kwargs, timeout)
    return api.rpc_async(to, function, args, kwargs, timeout)


# Rewriting the source

_STAND_IN_MAKERS: dict[Any, Callable[[Target], Callable[..., Any]]] = {
    api.rpc_sync: sync_stand_in,
    api.rpc_async: async_stand_in,
    api.remote: remote_stand_in,
}
_AUTOGRAD_STAND_INS: dict[Any, Callable[..., Any]] = {
    autograd.get_gradients: get_gradients,
    autograd.backward: dist_backward,
}

_NOT_COMPILED = "retry"  # a parameter of calls that TorchScript has no type for

stand_ins: dict[str, Callable[..., Any]] = {}
_numbers = itertools.count()


def rewrite(tree: ast.Module, names: Mapping[str, Any]) -> None:
    """Replace the calls of farprop's functions in a function's source. ``names`` are its globals and closure."""
    own = set(_names_of(tree))
    _Rewriter({name: value for name, value in names.items() if name not in own}).visit(tree)


def _names_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


class _Rewriter(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = self._look_up(node.func)
        started = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "wait" else None
        if isinstance(started, ast.Call) and self._look_up(started.func) is api.rpc_async:
            node, function = started, api.rpc_sync  # nothing else uses the future
        self.generic_visit(node)
        if not isinstance(function, FunctionType):
            return node
        if function in _STAND_IN_MAKERS:
            given = _arguments(node, function)
            target = given.pop("func")
            return _with_stand_in(node, _STAND_IN_MAKERS[function](self._target(target)), given)
        if function in _AUTOGRAD_STAND_INS:
            return _with_stand_in(node, _AUTOGRAD_STAND_INS[function], _arguments(node, function))
        return node

    def _look_up(self, expression: ast.expr) -> Any:
        """The object that a name, or an attribute of a module, refers to."""
        if isinstance(expression, ast.Name):
            return self._names.get(expression.id)
        if isinstance(expression, ast.Attribute):
            module = self._look_up(expression.value)
            return getattr(module, expression.attr, None) if isinstance(module, ModuleType) else None
        return None

    def _target(self, expression: ast.expr) -> Target:
        found = self._look_up(expression)
        if not isinstance(found, torch.jit.ScriptFunction | FunctionType):
            raise UsageError(
                f"Compiled code calls {ast.unparse(expression)} on another worker, but that is not the name of a "
                "script function. Write a function, decorate it with @torch.jit.script, and call it by its name."
            )
        return Target(found)


def _arguments(call: ast.Call, function: Callable[..., Any]) -> dict[str, ast.expr]:
    """The arguments of a call by parameter name. Those that are not given are None."""
    names = [name for name in inspect.signature(function).parameters if name != _NOT_COMPILED]
    try:
        if any(isinstance(value, ast.Starred) for value in call.args) or any(k.arg is None for k in call.keywords):
            raise TypeError("it has arguments with * or **")
        given = inspect.signature(function).bind(*call.args, **{str(k.arg): k.value for k in call.keywords}).arguments
        if _NOT_COMPILED in given:
            raise TypeError(f"compiled code can't pass {_NOT_COMPILED!r}")
    except TypeError as error:
        raise UsageError(f"{ast.unparse(call)} can't be compiled: {error}.") from None
    return {name: given.get(name, ast.Constant(None)) for name in names}


def _with_stand_in(call: ast.Call, stand_in: Callable[..., Any], given: dict[str, ast.expr]) -> ast.Call:
    name = f"__farprop_{stand_in.__name__}_{next(_numbers)}"
    stand_ins[name] = stand_in
    made = ast.Call(ast.Name(name, ast.Load()), list(given.values()), [])
    return ast.fix_missing_locations(ast.copy_location(made, call))
