"""The functions, classes and dataclasses that peers in a restricted job may name.

A name from a peer never causes an import or an attribute lookup. Peers reach what stands in these tables, and nothing
else.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import sys
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from farprop._torch import ScriptFunction
from farprop.errors import UsageError
from farprop.wire import function_names as functions

# Set on a function: peers may call it as a method of values that their references refer to.
_MARK = "_farprop_exposed"

_by_name: dict[bytes, Any] = {}
_names: dict[Any, bytes] = {}
_methods: dict[type, frozenset[str]] = {}  # from ``expose(methods=...)``, for methods without the mark
_fields: dict[type, tuple[str, ...]] = {}


class _ClassMethod:
    """A class method that was exposed inside the body of its class, before the class exists."""

    def __init__(self, module: str, path: str) -> None:
        self._module = module
        self._path = path

    def found(self) -> Any:
        return operator.attrgetter(self._path)(sys.modules[self._module])


def add(target: Any, name: str | None = None, methods: tuple[str, ...] = ()) -> None:
    """Expose a function, class or method to peers.

    Args:
        target: a function or class, which peers may call by its name, or a method, which they may call on values that
            they hold references to.
        name: the name for peers; by default ``module:qualname``.
        methods: for a class, names of methods to expose that are not marked themselves.

    Raises:
        UsageError: ``target`` can't be exposed, has no name, or the name is taken.
    """
    if isinstance(target, ScriptFunction) or isinstance(
        getattr(target, "_wrapped_async_rpc_function", None), ScriptFunction
    ):
        raise UsageError(
            f"A TorchScript function can't be exposed. Expose a Python function that calls it: {target!r}."
        )
    inner = target.__func__ if isinstance(target, staticmethod | classmethod) else target
    if not callable(inner):
        raise UsageError(f"Functions, methods and classes can be exposed, not {target!r}.")
    if isinstance(target, type):
        for method in methods:
            if not callable(getattr(target, method, None)):
                raise UsageError(f"{target.__qualname__} has no method {method!r} that could be exposed.")
        _methods[target] = frozenset(methods) | _methods.get(target, frozenset())
    elif methods:
        raise UsageError(f"methods= is for classes, and {target!r} is none.")
    if isinstance(target, FunctionType) and _is_method(target):
        if name is not None:
            raise UsageError(f"{target.__qualname__} is a method, which goes by its own name: drop name={name!r}.")
        setattr(target, _MARK, True)
        return
    found = name.encode() if name else _own_name(inner)
    if found is None:
        raise UsageError(f"{inner!r} has no name that other workers could know it by. Give it one: expose(name=...).")
    known = _by_name.get(found)
    if known is not None and not _is_same(known, inner):
        raise UsageError(f"Two things are exposed as {found.decode()!r}: {known!r} and {inner!r}. Rename one of them.")
    if isinstance(target, classmethod):
        _by_name[found] = _ClassMethod(inner.__module__, inner.__qualname__)
    else:
        _by_name[found] = inner
        _names[inner] = found


def _own_name(target: Any) -> bytes | None:
    if isinstance(target, FunctionType | type | MethodType):
        name = f"{target.__module__}:{target.__qualname__}"
        return None if "<" in name else name.encode()
    return functions.name_of(target)


def _is_method(function: FunctionType) -> bool:
    """Whether a function is defined in the body of a class, and is not a static method."""
    path, _, name = function.__qualname__.rpartition(".")
    if not path or path.endswith("<locals>"):
        return False
    try:
        owner = operator.attrgetter(path)(sys.modules[function.__module__])
        return not isinstance(inspect.getattr_static(owner, name), staticmethod)
    except (AttributeError, KeyError):
        return True  # the body of its class is still running


def _is_same(known: Any, new: Any) -> bool:
    """Whether both are the same object, or ``new`` replaces ``known`` because its module was reloaded."""
    if isinstance(known, _ClassMethod) or known is new:
        return True
    return (known.__module__, known.__qualname__) == (new.__module__, new.__qualname__)


def find(name: bytes) -> Any:
    """Return the object that is exposed under this name, or None."""
    found = _by_name.get(name)
    if type(found) is _ClassMethod:
        found = _by_name[name] = found.found()
    return found


def name_of(target: Any) -> bytes | None:
    """The name of a function or class for peers, whether it is exposed here or not; None if it has none."""
    try:
        return _names[target]
    except KeyError:
        pass
    except TypeError:  # not hashable
        return None
    if type(target) is str:
        return target.encode()
    if isinstance(target, MethodType) and not isinstance(target.__self__, type):
        return None
    return functions.name_of(target) or _own_name(target)


def is_method_exposed(value: Any, name: str) -> bool:
    """Whether peers with a reference to a value may call this method. ``forward`` also allows calls of a module."""
    if name == "__call__" and isinstance(value, nn.Module):
        name = "forward"
    for kind in type(value).__mro__:
        if name in _methods.get(kind, ()) or hasattr(kind.__dict__.get(name), _MARK):
            return True
    return False


def fields_of(kind: type) -> tuple[str, ...] | None:
    """The names of the init fields of an exposed dataclass; None for anything else."""
    found = _fields.get(kind)
    if found is None and kind in _names and dataclasses.is_dataclass(kind):
        found = _fields[kind] = tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return found
