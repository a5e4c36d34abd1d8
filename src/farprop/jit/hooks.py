"""Where torch's compiler asks farprop.

A hook takes the place of a function of torch's: it deals with farprop's names and types, and leaves the rest to the
function that it replaced. ``farprop._torch`` has looked for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args, get_origin

from farprop import _torch
from farprop.jit.graphs import finish
from farprop.jit.references import reference_type, take_refusal, type_of_references
from farprop.jit.rewriting import rewrite, stand_ins
from farprop.rpc.rref import RRef

_Theirs = Callable[..., Any]

# Those that are in torch, and what they replaced.
_installed: list[tuple[_torch.Hook, Any]] = []


def install() -> bool:
    """Put the hooks into torch, for this process: all of them, or none if one can't be put in.

    Returns:
        Whether they were not there before.
    """
    if _installed:
        return False
    hooks = [(_torch.script_hooks[name], ours) for name, ours in _HOOKS.items()]  # none is missing
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
    """Give torch its own functions back."""
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
        return annotation  # of a Python function of ours
    if get_origin(annotation) is RRef:
        return reference_type(_torch.ann_to_type(get_args(annotation)[0], location, names))
    return theirs(annotation, location, names)


def _type_of_attribute(theirs: _Theirs, value: Any) -> Any:
    found = type_of_references(value)
    return theirs(value) if found is None else _torch.InferredType(found)


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
    finish(_torch.compilation_unit.find_function(f"{type.qualified_name()}.{name}").graph)


# When they are saved and loaded


def _with_own_errors(theirs: _Theirs, *args: Any, **kwargs: Any) -> Any:
    """Torch makes a ``RuntimeError`` of what is raised while it saves or loads an object, and keeps the text alone."""
    take_refusal()
    try:
        return theirs(*args, **kwargs)
    except RuntimeError:
        refusal = take_refusal()
        if refusal is None:
            raise
        raise refusal from None


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
