"""Where torch's compiler asks farprop.

A hook takes the place of a function of torch's: it deals with farprop's names and types, and leaves the rest to the
function that it replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args, get_origin

import torch
from torch import _jit_internal
from torch.jit import _recursive, _script, _state, frontend
from torch.jit import annotations as types

from farprop.errors import UsageError
from farprop.jit.graphs import finish
from farprop.jit.references import reference_type, type_of_references
from farprop.jit.rewriting import rewrite, stand_ins
from farprop.rpc.rref import RRef

_Theirs = Callable[..., Any]


def install() -> None:
    """Put the hooks into torch, for this process."""
    for owner, name, hook in (
        (frontend, "parse_def", _parse_def),
        (_jit_internal, "createResolutionCallbackFromEnv", _look_up_names),
        (types, "try_ann_to_type", _type_of_annotation),
        (torch._C, "_jit_try_infer_type", _type_of_attribute),
        (_script, "_set_jit_function_cache", _finish_function),
        (_recursive, "_add_script_class", _finish_class),
        (_recursive, "create_methods_and_properties_from_stubs", _finish_methods),
    ):
        theirs = getattr(owner, name, None)
        if theirs is None:
            raise UsageError(
                f"farprop.jit needs {owner.__name__}.{name}, which torch {torch.__version__} does not have. Use a "
                "torch that farprop is tested with: see the README."
            )
        setattr(owner, name, functools.wraps(theirs)(functools.partial(hook, theirs)))


# Before functions are compiled


def _parse_def(theirs: _Theirs, function: Any) -> Any:
    parsed = theirs(function)
    rewrite(parsed.ast, _jit_internal.get_closure(getattr(function, "__func__", function)))
    return parsed


def _look_up_names(theirs: _Theirs, environment: Any) -> Callable[[str], Any]:
    look_up = theirs(environment)
    return lambda name: stand_ins[name] if name in stand_ins else look_up(name)


def _type_of_annotation(theirs: _Theirs, annotation: Any, location: Any, names: Any = None) -> Any:
    if isinstance(annotation, torch._C.Type):
        return annotation  # of a Python function of ours
    if get_origin(annotation) is RRef:
        return reference_type(types.ann_to_type(get_args(annotation)[0], location, names))
    return theirs(annotation, location, names)


def _type_of_attribute(theirs: _Theirs, value: Any) -> Any:
    found = type_of_references(value)
    return theirs(value) if found is None else torch._C.InferredType(found)


# After they are compiled


def _finish_function(theirs: _Theirs, function: Any, compiled: Any) -> None:
    finish(compiled.graph)
    theirs(function, compiled)


def _finish_class(theirs: _Theirs, python_class: Any, compiled: Any) -> None:
    for method in compiled.method_names():
        _finish_method(compiled, method)
    theirs(python_class, compiled)


def _finish_methods(theirs: _Theirs, concrete_type: Any, methods: Any, properties: Any) -> None:
    theirs(concrete_type, methods, properties)
    for method in methods:
        _finish_method(concrete_type.jit_type, method.def_.name().name)


def _finish_method(type: Any, name: str) -> None:
    finish(_state._python_cu.find_function(f"{type.qualified_name()}.{name}").graph)
