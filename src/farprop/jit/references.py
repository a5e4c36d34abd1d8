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

from farprop import _torch
from farprop.errors import UsageError
from farprop.ids import WorkerInfo
from farprop.jit.compiled import Owner, Reference
from farprop.jit.containers import share
from farprop.jit.contexts import enter_carried_context
from farprop.jit.python_functions import ANY, JitType, python_function
from farprop.rpc.rref import RRef
from farprop.runtime.gradients.contexts import current_context

_BOX = _torch.FutureType(ANY)
_FLOAT, _BOOL, _STRING = _torch.FloatType.get(), _torch.BoolType.get(), _torch.StringType.get()

_types: dict[str, JitType] = {}
_owner_types: list[JitType] = []
_numbers = itertools.count()


class _OwnerInfo(WorkerInfo):
    """A ``WorkerInfo`` that TorchScript can make: it sets attributes."""

    __slots__ = ()
    __setattr__ = object.__setattr__  # type: ignore[assignment]


def reference_type(value: JitType) -> JitType:
    """The compiler's type for a reference to a value of this type."""
    key = value.annotation_str
    if key not in _types:
        _types[key] = _compile(Reference, RRef, _functions(value))
    return _types[key]


def type_of_references(value: Any) -> JitType | None:
    """The compiler's type for references that it finds in an attribute; None if there are none. Asks an owner."""
    if isinstance(value, RRef):
        kind = value._get_type()
        try:
            return reference_type(_torch.ann_to_type(kind, _torch.no_source()))
        except Exception as error:
            raise UsageError(
                f"TorchScript has no type for {value!r}, which refers to a {kind.__name__}. Declare the attribute that "
                "it is in, as in `attribute: RRef[Tensor]` in the class."
            ) from error
    if isinstance(value, list) and value and isinstance(value[0], RRef):
        return _torch.ListType(type_of_references(value[0]))
    if isinstance(value, dict) and value and isinstance(next(iter(value.values())), RRef):
        key, first = next(iter(value.items()))
        kind = _torch.infer_type(key).type()
        return _torch.DictType(kind, type_of_references(first))
    return None


def _compile(source: type, python_class: type, names: Any) -> JitType:
    """Compile a class under a name of its own; its objects are objects of ``python_class`` in Python."""
    name = f"__torch__.farprop.jit.compiled.{source.__name__}{next(_numbers)}"
    tree = _torch.class_definition(source, source.__name__)
    made = _torch.compile_class(name, tree, _torch.class_defaults(source), names.get)
    _torch.class_of_name[made.qualified_name()] = python_class
    return made


def _owner_type() -> JitType:
    if not _owner_types:
        _owner_types.append(_compile(Owner, _OwnerInfo, {}))
    return _owner_types[0]


def _functions(value: JitType) -> dict[str, Callable[..., Any]]:
    """What the methods of a reference to a value of this type call."""
    kind = value.kind()

    def to_here(box: Any, timeout: Any) -> Any:
        rref = box.value()
        if kind == "InterfaceType" and not rref.is_owner():
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

    def value_of(rref: RRef[Any], timeout: float) -> Any:
        found = rref.to_here(timeout)
        if rref._own is not None and kind in ("ListType", "DictType"):
            share(rref._own.cell, value)
            return rref._own.cell.get()
        if kind == "TensorType" and isinstance(found, int | float):
            return torch.tensor(found)  # as in the arguments of script functions
        return found

    def owner(box: Any) -> Any:
        return box.value().owner()

    def is_owner(box: Any) -> Any:
        return box.value().is_owner()

    def owner_name(box: Any) -> Any:
        return box.value().owner_name()

    def confirmed_by_owner(box: Any) -> Any:
        return box.value().confirmed_by_owner()

    def refuse_to_save(box: Any) -> Any:
        raise UsageError(
            f"RRef jit pickling is only allowed inside RPC calls: {box.value()} can't be saved. Save its value, which "
            "to_here() gives."
        )

    types: dict[Any, tuple[JitType, dict[str, JitType]]] = {
        to_here: (value, {"box": _BOX, "timeout": _FLOAT}),
        local_value: (value, {"box": _BOX}),
        owner: (_owner_type(), {"box": _BOX}),
        is_owner: (_BOOL, {"box": _BOX}),
        owner_name: (_STRING, {"box": _BOX}),
        confirmed_by_owner: (_BOOL, {"box": _BOX}),
        refuse_to_save: (_BOX, {"box": _BOX}),
    }
    return {
        function.__name__: python_function(function, function.__name__, result, **parameters)
        for function, (result, parameters) in types.items()
    }
