"""``RRef[T]`` in compiled code.

TorchScript has a type for references of torch's own RPC alone. To it, ours are objects of a class, one for each type of
value, that the first use of ``RRef[T]`` compiles. Such an object has one attribute: a *box*, which is a future that is
done and has the reference. References change into these objects and back where they cross between Python and compiled
code, also inside of lists, tuples and dicts; ``RRef._box`` does it.

What the methods of such a class call are operators, which can be saved with the code that uses them. But an operator
has one type for its result, so those that give the value are there for the simple types alone. For others they are
functions in Python, which no code that is saved may call.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from farprop import _torch
from farprop.errors import FarpropError, UsageError, renewed
from farprop.ids import WorkerInfo
from farprop.jit.compiled import Owner, Reference
from farprop.jit.containers import share
from farprop.jit.contexts import enter_carried_context
from farprop.jit.python_functions import ANY, JitType, python_function
from farprop.rpc import saved
from farprop.rpc.rref import RRef
from farprop.runtime.gradients.contexts import current_context

_BOX = _torch.FutureType(ANY)
_FLOAT, _STRING = _torch.FloatType.get(), _torch.StringType.get()

# Types of values that operators have for their results.
_SIMPLE: dict[str, JitType] = {
    kind.annotation_str: kind
    for kind in (_torch.TensorType.get(), _torch.IntType.get(), _FLOAT, _torch.BoolType.get(), _STRING)
}

_library = torch.library.Library("farprop", "FRAGMENT")
_types: dict[str, JitType] = {}
_owner_types: list[JitType] = []
_numbers = itertools.count()


class _OwnerInfo(WorkerInfo):
    """A ``WorkerInfo`` that TorchScript can make: it sets attributes."""

    __slots__ = ()
    __setattr__ = object.__setattr__  # type: ignore[assignment]


class _Last(threading.local):
    refusal: FarpropError | None = None


_last = _Last()


def reference_type(value: JitType) -> JitType:
    """The compiler's type for a reference to a value of this type."""
    key = value.annotation_str
    if key not in _types:
        # Where it can be saved, the name is the same on every worker, so that each knows the class in a file.
        name = f"To{key}" if key in _SIMPLE else str(next(_numbers))
        _types[key] = _compile(Reference, name, RRef, _functions(value))
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


def _compile(source: type, suffix: str, python_class: type, names: Any) -> JitType:
    """Compile a class under a name of its own; its objects are objects of ``python_class`` in Python."""
    name = f"__torch__.farprop.jit.compiled.{source.__name__}{suffix}"
    tree = _torch.class_definition(source, source.__name__)
    made = _torch.compile_class(name, tree, _torch.class_defaults(source), names.get)
    _torch.class_of_name[made.qualified_name()] = python_class
    return made


def _functions(value: JitType) -> dict[str, Any]:
    """What the methods of a reference to a value of this type call."""
    functions = {name: getattr(torch.ops.farprop, f"rref_{name}") for name in _OPERATORS}
    if not _owner_types:
        _owner_types.append(_compile(Owner, "", _OwnerInfo, {}))
    functions["Owner"] = Owner  # the compiler finds what it has compiled of it
    spelled = value.annotation_str
    if spelled in _SIMPLE:
        for name in ("to_here", "local_value"):
            functions[name] = getattr(torch.ops.farprop, f"rref_{name}_{spelled.lower()}")
        return functions

    def to_here(box: Any, timeout: Any) -> Any:
        return _to_here(box, timeout, value)

    def local_value(box: Any) -> Any:
        return _local_value(box, value)

    def refuse_to_save(box: Any) -> Any:
        with _noting_refusals():
            raise UsageError(
                f"{box.value()} can't be saved: it is an RRef[{value.annotation_str}]. References to "
                f"{', '.join(_SIMPLE)} can."
            )

    return functions | {
        "to_here": python_function(to_here, "to_here", value, box=_BOX, timeout=_FLOAT),
        "local_value": python_function(local_value, "local_value", value, box=_BOX),
        "save": python_function(refuse_to_save, "refuse_to_save", _STRING, box=_BOX),
    }


# What the functions and operators do


def _to_here(box: Any, timeout: float, value: JitType) -> Any:
    rref = box.value()
    if value.kind() == "InterfaceType" and not rref.is_owner():
        raise UsageError(
            f"{rref} is an RRef to a ScriptModule. It can't be sent through RPC from owner, {rref.owner()}. Call a "
            "function there that takes the reference."
        )
    outer = enter_carried_context()
    try:
        return _value_of(rref, timeout, value)
    finally:
        if outer is not None:
            current_context.reset(outer)


def _local_value(box: Any, value: JitType) -> Any:
    rref = box.value()
    if not rref.is_owner():
        raise UsageError(
            f"Can't call RRef.local_value() on a non-owner RRef: the value of {rref} is on {rref.owner_name()}. "
            "Call to_here(), or a function there that takes the reference."
        )
    return _value_of(rref, 0.0, value)


def _value_of(rref: RRef[Any], timeout: float, value: JitType) -> Any:
    found = rref.to_here(timeout)
    if rref._own is not None and value.kind() in ("ListType", "DictType"):
        share(rref._own.cell, value)
        return rref._own.cell.get()
    if value.kind() == "TensorType" and isinstance(found, int | float):
        return torch.tensor(found)  # as in the arguments of script functions
    return found


def _save(box: Any) -> str:
    with _noting_refusals():
        return saved.save(box.value())


def _load(state: str) -> Any:
    with _noting_refusals():
        return saved.load(state)._box


@contextmanager
def _noting_refusals() -> Iterator[None]:
    try:
        yield
    except FarpropError as error:
        copy = renewed(error)  # which does not keep the frames that this one is raised through
        assert isinstance(copy, FarpropError)
        _last.refusal = copy
        raise


def take_refusal() -> FarpropError | None:
    """Why this thread could not save or load a reference, since it was last asked."""
    refusal, _last.refusal = _last.refusal, None
    return refusal


_OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "is_owner": ("(Future(Any) box) -> bool", lambda box: box.value().is_owner()),
    "owner_name": ("(Future(Any) box) -> str", lambda box: box.value().owner_name()),
    "owner_id": ("(Future(Any) box) -> int", lambda box: box.value().owner().id),
    "confirmed_by_owner": ("(Future(Any) box) -> bool", lambda box: box.value().confirmed_by_owner()),
    "save": ("(Future(Any) box) -> str", _save),
    "load": ("(str state) -> Future(Any)", _load),
}


def _define(name: str, schema: str, function: Callable[..., Any]) -> None:
    _library.define(f"rref_{name}{schema}")
    _library.impl(f"rref_{name}", function, "CompositeExplicitAutograd")


for _name, (_schema, _function) in _OPERATORS.items():
    _define(_name, _schema, _function)
for _result, _kind in _SIMPLE.items():
    _define(
        f"to_here_{_result.lower()}",
        f"(Future(Any) box, float timeout) -> {_result}",
        lambda box, timeout, kind=_kind: _to_here(box, timeout, kind),
    )
    _define(
        f"local_value_{_result.lower()}",
        f"(Future(Any) box) -> {_result}",
        lambda box, kind=_kind: _local_value(box, kind),
    )
