"""Hooks in torch's TorchScript compiler.

A hook replaces a function of torch's. It handles farprop's names and types, and calls the replaced function for
everything else. ``farprop._torch`` has located all of these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args, get_origin

from farprop import _torch
from farprop.jit.calls import rewrite, stand_ins
from farprop.jit.graph_passes import finish_graph
from farprop.jit.script_rref import reference_type, take_last_error, type_of_references
from farprop.rpc.rref import RRef

_Theirs = Callable[..., Any]

# The installed hooks, and the functions that they replaced.
_installed: list[tuple[_torch.Hook, Any]] = []


def install() -> bool:
    """Install all hooks in torch, for this process; none of them if one fails.

    Returns:
        Whether this call installed them.
    """
    if _installed:
        return False
    hooks = [(_torch.script_hooks[name], ours) for name, ours in _HOOKS.items()]  # raises if one is missing
    try:
        for hook, ours in hooks:
            theirs = getattr(hook.owner, hook.name)
            setattr(hook.owner, hook.name, functools.wraps(theirs)(functools.partial(ours, theirs)))
            _installed.append((hook, theirs))
    except BaseException:
        uninstall()
        raise
    return True


def uninstall() -> None:
    """Restore torch's own functions."""
    while _installed:
        hook, theirs = _installed.pop()
        setattr(hook.owner, hook.name, theirs)


# Before functions are compiled


def _parse_def(theirs: _Theirs, function: Any) -> Any:
    parsed = theirs(function)
    rewrite(parsed.ast, _torch.closure_of(getattr(function, "__func__", function)))
    return parsed


def _look_up_names(theirs: _Theirs, environment: Any) -> Callable[[str], Any]:
    look_up = theirs(environment)
    return lambda name: stand_ins[name] if name in stand_ins else look_up(name)


def _type_of_annotation(theirs: _Theirs, annotation: Any, location: Any, names: Any = None) -> Any:
    if isinstance(annotation, _torch.JitType):
        return annotation  # in the signature of a python_function
    if get_origin(annotation) is RRef:
        return reference_type(_torch.ann_to_type(get_args(annotation)[0], location, names))
    return theirs(annotation, location, names)


def _type_of_attribute(theirs: _Theirs, value: Any) -> Any:
    found = type_of_references(value)
    return theirs(value) if found is None else _torch.InferredType(found)


# After they are compiled


def _finish_function(theirs: _Theirs, function: Any, compiled: Any) -> None:
    finish_graph(compiled.graph)
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
    finish_graph(_torch.compilation_unit.find_function(f"{type.qualified_name()}.{name}").graph)


# When they are saved and loaded


def _with_own_errors(theirs: _Theirs, *args: Any, **kwargs: Any) -> Any:
    """Raise farprop's own error where torch has turned it into a ``RuntimeError`` with the same text."""
    take_last_error()
    try:
        return theirs(*args, **kwargs)
    except RuntimeError:
        own_error = take_last_error()
        if own_error is None:
            raise
        raise own_error from None


_HOOKS: dict[str, Callable[..., Any]] = {
    "parse_def": _parse_def,
    "createResolutionCallbackFromEnv": _look_up_names,
    "try_ann_to_type": _type_of_annotation,
    "_jit_try_infer_type": _type_of_attribute,
    "_set_jit_function_cache": _finish_function,
    "_add_script_class": _finish_class,
    "create_methods_and_properties_from_stubs": _finish_methods,
    "save": _with_own_errors,
    "load": _with_own_errors,
}
