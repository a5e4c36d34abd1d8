"""The names of torch's distributed modules, and what farprop has in their place.

``python -m tests.support.torch_names torch`` prints torch's, as JSON. ``python -m tests.support.torch_names farprop``
reads such a list and says for each name what it is under ``farprop.compat``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypedDict

MODULES = [
    *("rpc", "rpc._testing", "rpc._testing.faulty_agent_backend_registry", "rpc._utils", "rpc.api"),
    *("rpc.backend_registry", "rpc.constants", "rpc.functions", "rpc.internal", "rpc.options", "rpc.rref_proxy"),
    *("rpc.server_process_global_profiler", "autograd", "nn.api.remote_module", "nn.jit.instantiator"),
    *("nn.jit.templates.remote_module_template", "optim.optimizer"),
]
MODULES = [*(f"torch.distributed.{name}" for name in MODULES), "torch.nn.parallel.distributed"]
# Where these names come from. The names of a module don't include what it takes from elsewhere, or from another module
# of the list, where they are counted. C++ names, and those of a package that come from its modules, are its own.
PACKAGES = (
    *("torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.nn.api", "torch.distributed.nn.jit"),
    *("torch.distributed.optim.optimizer", "torch.nn.parallel.distributed", "torch._C._distributed_rpc"),
    *("torch._C._distributed_autograd", "torch._C._distributed_rpc_testing"),
)
# Every class of pybind11 has it.
_OF_PYBIND = "_pybind11_conduit_v1_"


class Parameter(TypedDict):
    """One parameter of a signature. ``default`` is a ``repr``, or None if there is no default."""

    name: str
    kind: str
    default: str | None


class Known(TypedDict):
    """What is known of a name: the signatures it can be called with. C++ functions may have several, or none."""

    is_there: bool
    is_cpp: bool
    signatures: list[list[Parameter]]


def torchs_names() -> dict[str, Known]:
    found: dict[str, Known] = {}
    seen: set[int] = set()
    for module in map(importlib.import_module, MODULES):
        elsewhere = _imported_from_elsewhere(module)
        for name, value in sorted(vars(module).items()):
            if name.startswith("__") or name in elsewhere:
                continue
            found[f"{module.__name__}.{name}"] = _known(value)
            if inspect.isclass(value) and _is_own(value.__module__) and id(value) not in seen:
                seen.add(id(value))
                for attribute in sorted(_attributes(value, own_only=True)):
                    known = _known(getattr(value, attribute, None))
                    found[f"{module.__name__}.{name}.{attribute}"] = known
    return found


def farprops(names: list[str]) -> dict[str, Known]:
    import farprop.compat

    farprop.compat.install()
    return {name: _looked_up(name) for name in names}


def _looked_up(name: str) -> Known:
    module = max((module for module in MODULES if name.startswith(module + ".")), key=len)
    value: Any = importlib.import_module(module)
    owner = None
    for attribute in name.removeprefix(module + ".").split("."):
        owner, value = value, getattr(value, attribute, _MISSING)
        if value is _MISSING and inspect.isclass(owner) and attribute in _attributes(owner, own_only=False):
            value = None  # only instances have it
    return _known(value)


_MISSING = object()


def _is_own(module: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in PACKAGES)


def _imported_from_elsewhere(module: ModuleType) -> set[str]:
    found = set()
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*base, source]) if source else ".".join(base)
            if not _is_own(source) or not (source.startswith("torch._C.") or hasattr(module, "__path__")):
                found |= {alias.asname or alias.name for alias in node.names}
    return found


def _attributes(cls: type, own_only: bool) -> set[str]:
    """Names that the class or its instances have; ``own_only`` leaves out what comes from other packages' classes."""
    found: set[str] = set()
    for base in cls.__mro__:
        if own_only and not _is_own(base.__module__):
            continue
        found |= {name for name in vars(base) if not name.startswith("__")}
        found |= set(vars(base).get("__annotations__", ()))
        if _is_own(base.__module__) or base.__module__.startswith("farprop"):
            found |= set(_set_on_self(base))
    return found - {_OF_PYBIND}


def _set_on_self(cls: type) -> Iterator[str]:
    """The attributes that methods of a class assign to ``self``, according to its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if hasattr(node, "target") else []
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr


def _known(value: Any) -> Known:
    if value is _MISSING:
        return Known(is_there=False, is_cpp=False, signatures=[])
    if not callable(value):
        return Known(is_there=True, is_cpp=False, signatures=[])
    constructor = getattr(value, "__init__", None) if inspect.isclass(value) else value
    # The classes and functions of pybind11 say what they take in the first line of their documentation.
    in_cpp = _pybind_signatures(constructor)
    if in_cpp:
        without_self = [signature[1:] for signature in in_cpp] if inspect.isclass(value) else in_cpp
        return Known(is_there=True, is_cpp=True, signatures=without_self)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return Known(is_there=True, is_cpp=True, signatures=[])
    parameters = [
        Parameter(name=p.name, kind=p.kind.name, default=None if p.default is p.empty else repr(p.default))
        for p in signature.parameters.values()
    ]
    return Known(is_there=True, is_cpp=False, signatures=[parameters])


def _pybind_signatures(function: Any) -> list[list[Parameter]]:
    lines = (getattr(function, "__doc__", None) or "").splitlines()
    if type(function).__name__ not in ("instancemethod", "builtin_function_or_method") or not lines:
        return []
    if lines[0].endswith("(*args, **kwargs)"):
        lines = [line.partition(". ")[2] for line in lines if re.match(r"\d+\. ", line)]
    else:
        lines = lines[:1]
    return [_parsed(line) for line in lines if "(" in line]


def _parsed(line: str) -> list[Parameter]:
    """``f(self: A, timeout: float = -1.0) -> None``, as pybind11 writes it."""
    inside = line[line.index("(") + 1 : line.rindex(")", 0, line.index(" -> ") if " -> " in line else None)]
    parameters = []
    for text in _split(inside):
        name, _, rest = text.partition(":")
        default = rest.rpartition(" = ")[2].strip() if " = " in rest else None
        if name.startswith("*"):
            kind = "VAR_KEYWORD" if name.startswith("**") else "VAR_POSITIONAL"
        else:
            kind = "POSITIONAL_ONLY" if name == "self" or re.fullmatch(r"arg\d+", name) else "POSITIONAL_OR_KEYWORD"
        if name != "/":
            parameters.append(Parameter(name=name.strip("* "), kind=kind, default=default))
    return parameters


def _split(text: str) -> list[str]:
    """The text between commas that are not in brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


if __name__ == "__main__":
    print(json.dumps(torchs_names() if sys.argv[1] == "torch" else farprops(json.load(sys.stdin))))
