"""``RRef[T]`` in compiled code.

TorchScript has a type only for the references of torch's own RPC. Farprop's references are objects of a compiled
class, one class for each type of value, which the first use of ``RRef[T]`` compiles. Such an object has one attribute:
a *box*, which is a completed future whose value is the ``RRef``. References are converted where they cross between
Python and compiled code, also inside lists, tuples and dicts; ``RRef._box`` does it.

The methods of the compiled class call operators, which can be saved with the code that uses them. But an operator has
one result type. So the methods that return the value are operators only for simple types. For other types they are
Python functions, and code that calls those can't be saved.
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
from farprop.jit.python_ops import ANY, JitType, enter_carried_context, python_function
from farprop.jit.script_classes import Owner, Reference
from farprop.protocol.references.records import ValueData
from farprop.rpc import saved_rrefs
from farprop.rpc.rref import RRef
from farprop.runtime.autograd.contexts import current_context

_BOX = _torch.FutureType(ANY)
_FLOAT, _STRING = _torch.FloatType.get(), _torch.StringType.get()

# The types of value that operators can return.
_SIMPLE: dict[str, JitType] = {
    kind.annotation_str: kind
    for kind in (_torch.TensorType.get(), _torch.IntType.get(), _FLOAT, _torch.BoolType.get(), _STRING)
}

_library = torch.library.Library("farprop", "FRAGMENT")
_types: dict[str, JitType] = {}
_owner_types: list[JitType] = []
_numbers = itertools.count()


class _OwnerInfo(WorkerInfo):
    """A ``WorkerInfo`` that TorchScript can instantiate: it assigns to the attributes."""

    __slots__ = ()
    __setattr__ = object.__setattr__  # type: ignore[assignment]


class _LastError(threading.local):
    """The last error of this thread while it saved or loaded a reference."""

    error: FarpropError | None = None


_last = _LastError()


def reference_type(value: JitType) -> JitType:
    """The compiler's type for a reference to a value of this type."""
    key = value.annotation_str
    if key not in _types:
        # If the class can be saved, it has the same name on every worker, so that each finds the class in a file.
        name = f"To{key}" if key in _SIMPLE else str(next(_numbers))
        _types[key] = _compile(Reference, name, RRef, _functions(value))
    return _types[key]


def type_of_references(value: Any) -> JitType | None:
    """The compiler's type for an attribute that holds references; None if it holds none. Asks the owner of one."""
    if isinstance(value, RRef):
        kind = value._get_type()
        try:
            return reference_type(_torch.ann_to_type(kind, _torch.no_source()))
        except Exception as error:
            raise UsageError(
                f"TorchScript has no type for {value!r}, which refers to a {kind.__name__}. Declare the type of the "
                "attribute in the class, for example `attribute: RRef[Tensor]`."
            ) from error
    if isinstance(value, list) and value and isinstance(value[0], RRef):
        return _torch.ListType(type_of_references(value[0]))
    if isinstance(value, dict) and value and isinstance(next(iter(value.values())), RRef):
        key, first = next(iter(value.items()))
        kind = _torch.infer_type(key).type()
        return _torch.DictType(kind, type_of_references(first))
    return None


def _compile(source: type, suffix: str, python_class: type, names: Any) -> JitType:
    """Compile a class under a new name. In Python its objects are instances of ``python_class``."""
    name = f"__torch__.farprop.jit.script_classes.{source.__name__}{suffix}"
    tree = _torch.class_definition(source, source.__name__)
    made = _torch.compile_class(name, tree, _torch.class_defaults(source), names.get)
    _torch.class_of_name[made.qualified_name()] = python_class
    return made


def _functions(value: JitType) -> dict[str, Any]:
    """The functions that the methods of a reference to a value of this type call."""
    functions = {name: getattr(torch.ops.farprop, f"rref_{name}") for name in _OPERATORS}
    if not _owner_types:
        _owner_types.append(_compile(Owner, "", _OwnerInfo, {}))
    functions["Owner"] = Owner  # the compiler maps it to the compiled class
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
        with _recording_errors():
            raise UsageError(
                f"{box.value()} can't be saved, because it is an RRef[{value.annotation_str}]. Only references to "
                f"{', '.join(_SIMPLE)} can be."
            )

    return functions | {
        "to_here": python_function(to_here, "to_here", value, box=_BOX, timeout=_FLOAT),
        "local_value": python_function(local_value, "local_value", value, box=_BOX),
        "save": python_function(refuse_to_save, "refuse_to_save", _STRING, box=_BOX),
    }


# Implementations of the functions and operators


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
    if rref._owned is not None and value.kind() in ("ListType", "DictType"):
        _use_script_container(rref._owned.slot, value)
        return rref._owned.slot.get()
    if value.kind() == "TensorType" and isinstance(found, int | float):
        return torch.tensor(found)  # as in the arguments of script functions
    return found


def _save(box: Any) -> str:
    with _recording_errors():
        return saved_rrefs.save(box.value())


def _load(state: str) -> Any:
    with _recording_errors():
        return saved_rrefs.load(state)._box


@contextmanager
def _recording_errors() -> Iterator[None]:
    try:
        yield
    except FarpropError as error:
        copy = renewed(error)  # a copy without a traceback, which would keep frames alive
        assert isinstance(copy, FarpropError)
        _last.error = copy
        raise


def take_last_error() -> FarpropError | None:
    """Return and forget the last error of this thread while it saved or loaded a reference."""
    refusal, _last.error = _last.error, None
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


# Lists and dicts. Compiled code gets copies of Python's containers, and changes to a copy would be lost. So a list or
# dict that compiled code takes from a reference on the owner is replaced by a container of TorchScript's for good.

# TorchScript infers the type of a container from its elements. So an empty one is created with a sample in it.
_SAMPLES = {"IntType": 0, "FloatType": 0.0, "BoolType": False, "StringType": "", "TensorType": torch.empty(0)}


def _use_script_container(slot: ValueData, declared: JitType) -> None:
    """Replace a list or dict by one that compiled code can change in place."""
    value = slot.get()
    if type(value) is list:
        slot.replace(value, _script_list(value, declared))
    elif type(value) is dict:
        slot.replace(value, _script_dict(value, declared))


def _script_list(value: list[Any], declared: JitType) -> Any:
    if value:
        return _torch.ScriptList(value)
    (element,) = declared.containedTypes()
    made = _torch.ScriptList([_sample(element, declared)])
    made.clear()
    return made


def _script_dict(value: dict[Any, Any], declared: JitType) -> Any:
    if value:
        return _torch.ScriptDict(value)
    key, element = (_sample(part, declared) for part in declared.containedTypes())
    made = _torch.ScriptDict({key: element})
    del made[key]
    return made


def _sample(type: JitType, container: JitType) -> Any:
    try:
        return _SAMPLES[type.kind()]
    except KeyError:
        raise UsageError(
            f"Compiled code takes an empty {container.annotation_str} from a reference. TorchScript can't infer the "
            "type of its elements. Put something into it first, or use a container of simpler values."
        ) from None
