"""From a function to its importable name, and back.

A name is ``module:qualname``. Names are cached, but the objects behind them are looked up at every call: a function
that is rebound or deleted on the callee behaves as it would with pickle.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from farprop._torch import ScriptFunction, source_of
from farprop.wire.message import Method

# Enough for any program's functions, and a bound for programs that keep making functions.
_MAX_NAMES = 4096
# How farprop's own methods are shown: by the function that a program calls, if there is one.
_METHODS = {method.value: method.name.lower() for method in Method} | {Method.FETCH.value: "to_here"}

_names: dict[Any, bytes] = {}
_resolvers: dict[bytes, tuple[Any, Callable[[Any], Any]]] = {}


class FunctionNotFound(RuntimeError):
    """The caller named a function that this worker's modules don't have."""


def name_of(function: Any) -> bytes | None:
    """The name under which another worker can find ``function``, or None if it has to be pickled.

    The name of one of farprop's own methods is its one-byte number.
    """
    try:
        return _names[function]
    except KeyError:
        pass
    except TypeError:  # not hashable
        return None
    name = _find_name(function)
    if name is not None:
        if len(_names) >= _MAX_NAMES:
            _names.clear()
        _names[function] = name
    return name


def name_outside_main(function: Any) -> bytes | None:
    """As ``name_of``, for workers that have another ``__main__``: what is defined there has to be pickled."""
    name = name_of(function)
    return None if name is not None and name.startswith(b"__main__:") else name


def shown_name(name: bytes, function: Any = None) -> str:
    """How error texts and logs show what is called. ``function`` is asked if it travels without a name."""
    if not name:
        return "a function" if function is None else str(getattr(function, "__qualname__", type(function).__name__))
    if len(name) > 1:
        return name.decode(errors="replace")
    return _METHODS.get(name) or f"method {name[0]}"


def resolve(name: bytes) -> Any:
    """Return the function that ``name`` currently stands for on this worker."""
    try:
        module, getter = _resolvers[name]
    except KeyError:
        module, getter = _resolver(name)
        if len(_resolvers) >= _MAX_NAMES:
            _resolvers.clear()
        _resolvers[name] = module, getter
    try:
        return getter(module)
    except AttributeError as error:
        raise FunctionNotFound(
            f"{error}. The RPC pickler does not serialize a function that has an importable name: define "
            f"{name.decode().replace(':', '.')} on the worker that is called, too."
        ) from error


def _find_name(function: Any) -> bytes | None:
    if type(function) is Method:
        return function.value
    original = function
    compiled = getattr(function, "_wrapped_async_rpc_function", function)
    if isinstance(compiled, ScriptFunction):
        # The module and name of the Python function that it was compiled from say where the compiled one is bound.
        original = source_of(compiled)
    name = getattr(original, "__qualname__", None) or getattr(original, "__name__", None)
    module = getattr(original, "__module__", None)
    if not isinstance(name, str) or "<" in name:
        return None
    candidates = [(module, name)] if isinstance(module, str) else []
    if not isinstance(function, type) and hasattr(torch, original.__name__):
        candidates.append(("torch", original.__name__))  # torch.add claims to be in a class without a module
    for where, path in candidates:
        try:
            found = operator.attrgetter(path)(sys.modules[where])
        except (KeyError, AttributeError):
            continue
        if found is function:
            return f"{where}:{path}".encode()
    return None


def _resolver(name: bytes) -> tuple[Any, Callable[[Any], Any]]:
    if len(name) == 1:
        raise FunctionNotFound(f"There is no method {name[0]} on this worker. Does it run another version of farprop?")
    where, _, path = name.decode().partition(":")
    try:
        module = import_module(where)
    except ImportError as error:
        raise FunctionNotFound(
            f"This worker can't import {where!r} ({error}). The RPC pickler does not serialize code of modules: "
            "install the module on every worker."
        ) from error
    return module, operator.attrgetter(path)
