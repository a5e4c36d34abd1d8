"""``RRef[T]`` in compiled code.

TorchScript has a type for references of torch's own RPC alone. To it, ours are objects of a class, one for each type of
value, that the first use of ``RRef[T]`` compiles. Such an object has one attribute: a *box*, which is a future that is
done and has the reference. References change into these objects and back where they cross between Python and compiled
code, also inside of lists, tuples and dicts; ``RRef._box`` does it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch._jit_internal import Future
from torch._sources import fake_range
from torch.jit.frontend import get_default_args_for_class, get_jit_class_def

from farprop.errors import UsageError
from farprop.ids import WorkerInfo
from farprop.jit.containers import share
from farprop.jit.contexts import enter_carried_context
from farprop.jit.python_functions import ANY, Type, python_function
from farprop.rpc.rref import RRef
from farprop.runtime.gradients.contexts import current_context

_BOX = torch._C.FutureType(ANY)
_FLOAT, _BOOL, _STRING = torch._C.FloatType.get(), torch._C.BoolType.get(), torch._C.StringType.get()

_types: dict[str, Type] = {}
_numbers = itertools.count()


class _OwnerInfo(WorkerInfo):
    """A ``WorkerInfo`` that TorchScript can make: it sets attributes."""

    __slots__ = ()
    __setattr__ = object.__setattr__


# The next two classes are compiled; Python never makes objects of them. Underscored functions stay in Python.


class _Owner:
    def __init__(self, name: str, id: int):
        self.name = name
        self.id = id


class _Reference:
    def __init__(self, box: Future[Any]):
        self._box = box

    def to_here(self, timeout: float = -1.0):
        return _to_here(self._box, timeout)

    def local_value(self):
        return _local_value(self._box)

    def is_owner(self):
        return _is_owner(self._box)

    def owner(self):
        return _owner(self._box)

    def owner_name(self):
        return _owner_name(self._box)

    def confirmed_by_owner(self):
        return _confirmed_by_owner(self._box)

    def __getstate__(self):
        return _refuse(self._box)

    def __setstate__(self, state: Future[Any]):
        self._box = state


def reference_type(value: Type) -> Type:
    """The compiler's type for a reference to a value of this type."""
    key = value.annotation_str
    if key not in _types:
        _types[key] = _compile(_Reference, RRef, _functions(value))
    return _types[key]


def type_of_references(value: Any) -> Type | None:
    """The compiler's type for references that it finds in an attribute; None if there are none. Asks the owner."""
    if isinstance(value, RRef):
        kind = value._get_type()
        try:
            return reference_type(torch.jit.annotations.ann_to_type(kind, fake_range()))
        except Exception as error:
            raise UsageError(
                f"TorchScript has no type for {value!r}, which refers to a {kind.__name__}. Declare the attribute that "
                "it is in, as in `attribute: RRef[Tensor]` in the class."
            ) from error
    if isinstance(value, list) and value and isinstance(value[0], RRef):
        return torch._C.ListType(type_of_references(value[0]))
    if isinstance(value, dict) and value and isinstance(next(iter(value.values())), RRef):
        (key, rref), *_ = value.items()
        return torch._C.DictType(torch._C._jit_try_infer_type(key).type(), type_of_references(rref))
    return None


def _compile(source: type, python_class: type, names: dict[str, Any]) -> Type:
    """Compile a class under a name of its own; its objects are objects of ``python_class`` in Python."""
    name = f"__torch__.farprop.jit.references.{source.__name__}{next(_numbers)}"
    tree = get_jit_class_def(source, source.__name__)
    made = torch._C._jit_script_class_compile(name, tree, get_default_args_for_class(source), names.get)
    torch.jit._state._name_to_pyclass[made.qualified_name()] = python_class
    return made


def _functions(value: Type) -> dict[str, Callable[..., Any]]:
    """What the methods of a reference to a value of this type call."""
    is_module = value.kind() == "InterfaceType"
    is_tensor = value.kind() == "TensorType"
    is_container = value.kind() in ("ListType", "DictType")

    def value_of(rref: RRef[Any], timeout: float) -> Any:
        found = rref.to_here(timeout)
        if is_container and rref._own is not None:
            share(rref._own.cell, value)
            return rref._own.cell.get()
        # A number becomes a tensor where one is declared, as in the arguments of script functions.
        return torch.tensor(found) if is_tensor and isinstance(found, int | float) else found

    def to_here(box: Any, timeout: Any) -> Any:
        rref = box.value()
        if is_module and not rref.is_owner():
            raise UsageError(
                f"{rref} is an RRef to a ScriptModule. It can't be sent through RPC from owner, {rref.owner()}. Call a "
                "function there that takes the reference."
            )
        outer = enter_carried_context()
        try:
            return value_of(rref, timeout)
        finally:
            if outer is not None:
                current_context.reset(outer)

    def local_value(box: Any) -> Any:
        rref = box.value()
        if not rref.is_owner():
            raise UsageError(
                f"Can't call RRef.local_value() on a non-owner RRef: the value of {rref} is on {rref.owner_name()}. "
                "Call to_here(), or a function there that takes the reference."
            )
        return value_of(rref, 0.0)

    def owner(box: Any) -> Any:
        return box.value().owner()

    def is_owner(box: Any) -> Any:
        return box.value().is_owner()

    def owner_name(box: Any) -> Any:
        return box.value().owner_name()

    def confirmed_by_owner(box: Any) -> Any:
        return box.value().confirmed_by_owner()

    def refuse(box: Any) -> Any:
        raise UsageError(
            f"RRef jit pickling is only allowed inside RPC calls: {box.value()} can't be saved. Save the value: to_here()."
        )

    return {
        "_to_here": python_function(to_here, "to_here", value, box=_BOX, timeout=_FLOAT),
        "_local_value": python_function(local_value, "local_value", value, box=_BOX),
        "_owner": python_function(owner, "owner", _owner_type(), box=_BOX),
        "_is_owner": python_function(is_owner, "is_owner", _BOOL, box=_BOX),
        "_owner_name": python_function(owner_name, "owner_name", _STRING, box=_BOX),
        "_confirmed_by_owner": python_function(confirmed_by_owner, "confirmed_by_owner", _BOOL, box=_BOX),
        "_refuse": python_function(refuse, "refuse", _BOX, box=_BOX),
    }


def _owner_type() -> Type:
    if "" not in _types:
        _types[""] = _compile(_Owner, _OwnerInfo, {})
    return _types[""]
