"""Calls of farprop's functions in the source of a function that TorchScript compiles.

TorchScript can't be told of a function that takes another function, as ``rpc_sync`` does. So a call such as
``rpc.rpc_async(to, add, (x, y))`` becomes ``name(to, (x, y), None, None)`` before the compiler sees it. The name is one
of ``stand_ins``: it stands for a Python function that calls ``add`` on other workers and has its types.
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
from farprop.errors import UsageError
from farprop.jit.calls import Target, asynchronous, referring, synchronous
from farprop.jit.gradients import dist_backward, get_gradients
from farprop.rpc import api

_CALLS: dict[Any, Callable[[Target], Callable[..., Any]]] = {
    api.rpc_sync: synchronous,
    api.rpc_async: asynchronous,
    api.remote: referring,
}
_OTHERS: dict[Any, Callable[..., Any]] = {autograd.get_gradients: get_gradients, autograd.backward: dist_backward}

stand_ins: dict[str, Callable[..., Any]] = {}
_numbers = itertools.count()


def rewrite(tree: ast.Module, names: Mapping[str, Any]) -> None:
    """Replace the calls of farprop's functions in a function. ``names`` are those that it sees besides its own."""
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
        function = self._found(node.func)
        started = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "wait" else None
        if isinstance(started, ast.Call) and self._found(started.func) is api.rpc_async:
            node, function = started, api.rpc_sync  # nobody else has the future
        self.generic_visit(node)
        if not isinstance(function, FunctionType):
            return node
        if function in _CALLS:
            given = _arguments(node, function)
            target = given.pop("func")
            return _replaced(node, _CALLS[function](self._target(target)), given)
        if function in _OTHERS:
            return _replaced(node, _OTHERS[function], _arguments(node, function))
        return node

    def _found(self, expression: ast.expr) -> Any:
        """What a name, or a name in a module, stands for."""
        if isinstance(expression, ast.Name):
            return self._names.get(expression.id)
        if isinstance(expression, ast.Attribute):
            module = self._found(expression.value)
            return getattr(module, expression.attr, None) if isinstance(module, ModuleType) else None
        return None

    def _target(self, expression: ast.expr) -> Target:
        found = self._found(expression)
        if not isinstance(found, torch.jit.ScriptFunction | FunctionType):
            raise UsageError(
                f"Compiled code calls {ast.unparse(expression)} on another worker, which is not the name of a script "
                "function. Write a function, decorate it with @torch.jit.script, and call it by its name."
            )
        return Target(found)


def _arguments(call: ast.Call, function: Callable[..., Any]) -> dict[str, ast.expr]:
    """The arguments of a call by parameter; None for those that are not given."""
    parameters = inspect.signature(function).parameters
    try:
        if any(isinstance(value, ast.Starred) for value in call.args) or any(k.arg is None for k in call.keywords):
            raise TypeError("it has arguments with * or **")
        given = inspect.signature(function).bind(*call.args, **{str(k.arg): k.value for k in call.keywords}).arguments
    except TypeError as error:
        raise UsageError(f"{ast.unparse(call)} can't be compiled: {error}.") from None
    return {name: given.get(name, ast.Constant(None)) for name in parameters}


def _replaced(call: ast.Call, stand_in: Callable[..., Any], given: dict[str, ast.expr]) -> ast.Call:
    name = f"__farprop_{stand_in.__name__}_{next(_numbers)}"
    stand_ins[name] = stand_in
    made = ast.Call(ast.Name(name, ast.Load()), list(given.values()), [])
    return ast.fix_missing_locations(ast.copy_location(made, call))
