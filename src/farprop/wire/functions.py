"""The importable name of a function, and the function of a name.

A name is ``module:qualname``. Names are remembered, the objects behind them are looked up at every call: a
function that is rebound or deleted on the callee behaves as it would with pickle.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from farprop._torch import ScriptFunction, source_of

# Enough for any program's functions; a program that makes functions for ever must not grow this for ever.
_MAX_NAMES = 4096

_names: dict[Any, bytes] = {}
_resolvers: dict[bytes, tuple[Any, Callable[[Any], Any]]] = {}


class FunctionNotFound(RuntimeError):
    """The caller named a function that this worker's modules don't have."""


def name_of(function: Any) -> bytes | None:
    """The name under which another worker can find ``function``, or None if it has to be pickled."""
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


def resolve(name: bytes) -> Any:
    """The function that ``name`` stands for on this worker, now."""
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
    original = function
    compiled = getattr(function, "_wrapped_async_rpc_function", function)
    if isinstance(compiled, ScriptFunction):
        # The Python function it was compiled from knows where the compiled one, decorated or not, is bound.
        original = source_of(compiled)
    name = getattr(original, "__qualname__", None) or getattr(original, "__name__", None)
    module = getattr(original, "__module__", None)
    if not isinstance(name, str) or "<" in name:
        return None
    candidates = [(module, name)] if isinstance(module, str) else []
    if not isinstance(function, type) and hasattr(torch, original.__name__):
        candidates.append(("torch", original.__name__))  # torch.add says it lives in a class of no module
    for where, path in candidates:
        try:
            found = operator.attrgetter(path)(sys.modules[where])
        except (KeyError, AttributeError):
            continue
        if found is function:
            return f"{where}:{path}".encode()
    return None


def _resolver(name: bytes) -> tuple[Any, Callable[[Any], Any]]:
    where, _, path = name.decode().partition(":")
    try:
        module = import_module(where)
    except ImportError as error:
        raise FunctionNotFound(
            f"This worker can't import {where!r} ({error}). The RPC pickler does not serialize code of modules: "
            "install the module on every worker."
        ) from error
    return module, operator.attrgetter(path)
