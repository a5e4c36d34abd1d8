"""What a restricted job's workers may call on this one, by name, and the dataclasses that their messages may have.

Nothing is imported, and no attribute is looked up, because a peer named it: what is not in these tables does not exist
for peers.
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
from farprop.wire import functions

# On a function: it is a method that may be called on values which peers refer to.
_MARK = "_farprop_exposed"

_by_name: dict[bytes, Any] = {}
_names: dict[Any, bytes] = {}
_methods: dict[type, frozenset[str]] = {}  # given with the class, for those that are not marked themselves
_fields: dict[type, tuple[str, ...]] = {}


class _ClassMethod:
    """A class method that was exposed before its class was there."""

    def __init__(self, module: str, path: str) -> None:
        self._module = module
        self._path = path

    def found(self) -> Any:
        return operator.attrgetter(self._path)(sys.modules[self._module])


def add(target: Any, name: str | None = None, methods: tuple[str, ...] = ()) -> None:
    """Let peers call a function or a class by its name, or a method on values that they refer to."""
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
    """Whether a function is defined in the body of a class, and is no static method there."""
    path, _, name = function.__qualname__.rpartition(".")
    if not path or path.endswith("<locals>"):
        return False
    try:
        owner = operator.attrgetter(path)(sys.modules[function.__module__])
        return not isinstance(inspect.getattr_static(owner, name), staticmethod)
    except (AttributeError, KeyError):
        return True  # its class is just being made


def _is_same(known: Any, new: Any) -> bool:
    """Whether this is the same thing, or what a module that was loaded again has in its place."""
    if isinstance(known, _ClassMethod) or known is new:
        return True
    return (known.__module__, known.__qualname__) == (new.__module__, new.__qualname__)


def find(name: bytes) -> Any:
    """What is exposed under this name, or None."""
    found = _by_name.get(name)
    if type(found) is _ClassMethod:
        found = _by_name[name] = found.found()
    return found


def name_of(target: Any) -> bytes | None:
    """The name by which peers may know a function or class, whether it is exposed here or not; None if it has none."""
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
    """Whether peers that refer to a value may call this method of it. A module is called by its ``forward``."""
    if name == "__call__" and isinstance(value, nn.Module):
        name = "forward"
    for kind in type(value).__mro__:
        if name in _methods.get(kind, ()) or hasattr(kind.__dict__.get(name), _MARK):
            return True
    return False


def fields_of(kind: type) -> tuple[str, ...] | None:
    """The fields that an exposed dataclass is made of; None for anything else."""
    found = _fields.get(kind)
    if found is None and kind in _names and dataclasses.is_dataclass(kind):
        found = _fields[kind] = tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return found
