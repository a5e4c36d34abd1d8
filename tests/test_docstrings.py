"""Public functions, classes and methods have Google-style docstrings: they are the API reference."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

from tests.test_site import PUBLIC_MODULES

MODULES = (*PUBLIC_MODULES, "farprop.launch.pool", "farprop.rpc._testing", "farprop.rpc.options")
# Where public names are defined. Engine objects are documented for maintainers.
PUBLIC = tuple(
    f"farprop.{name}"
    for name in (
        *("autograd", "compat", "dashboard", "distributed", "errors", "inspect", "jit", "launch.pool", "nn", "optim"),
        *("profiler", "protocol.call_stats", "protocol.inspection", "rpc", "telemetry", "testing"),
    )
)
EXEMPT = {
    "new_method",  # torch's loop variable: its docstring is that of another method
    *("not_run", "renewed", "without_frames"),  # of farprop.errors: for farprop itself
    *("CallStats", "total", "upper_bound"),  # of call_stats, which other modules import: they are not public
}
WITHOUT_RESULT = ("None", "NoReturn", "Iterator[None]")


def public_objects(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public functions and classes of a module, and the methods that its classes define."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in names:
        found = getattr(module, name)
        if name in EXEMPT or not getattr(found, "__module__", "").startswith(PUBLIC):
            continue
        if isinstance(found, type):
            yield name, found
            for method, value in vars(found).items():
                function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                is_inherited = any(method in vars(base) for base in found.__mro__[1:] if _is_farprops(base))
                if not method.startswith("_") and isinstance(function, FunctionType | property) and not is_inherited:
                    yield f"{name}.{method}", function
        elif isinstance(found, FunctionType):
            yield name, found


def _is_farprops(base: type) -> bool:
    """Whether the methods of a base class are documented there: then those of its subclasses need not be."""
    return base.__module__.startswith("farprop.")


def problems(found: Any) -> list[str]:
    """What the docstring of a function, class or property lacks."""
    text = inspect.getdoc(found)
    if not text:
        return ["has no docstring"]
    if text.startswith("Not supported."):
        return []
    lines = text.splitlines()
    missing = []
    if not lines[0].endswith((".", ":")) or (len(lines) > 1 and lines[1]):
        missing.append("has no summary of one line")
    function = vars(found).get("__init__") if isinstance(found, type) else found
    if isinstance(function, FunctionType) and "/farprop/" in inspect.unwrap(function).__code__.co_filename:
        missing += missing_sections(function, lines)
    return missing


def missing_sections(function: Callable[..., Any], lines: list[str]) -> Iterator[str]:
    signature = inspect.signature(function)
    kinds = {parameter.kind.name for name, parameter in signature.parameters.items() if name not in ("self", "cls")}
    if kinds == {"VAR_POSITIONAL", "VAR_KEYWORD"}:
        return  # its overloads have the parameters
    parameters = [name for name in signature.parameters if name not in ("self", "cls")]
    if [name for name in parameters if not name.startswith("_")]:
        if "Args:" not in lines:
            yield "has no Args:"
        else:
            section = lines[lines.index("Args:") + 1 :]
            for name in parameters:
                if not name.startswith("_") and not any(line.lstrip(" *").startswith(f"{name}:") for line in section):
                    yield f"does not document {name}"
    if str(signature.return_annotation) not in WITHOUT_RESULT and not {"Returns:", "Yields:"} & set(lines):
        yield "has no Returns:"


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    found = [f"{name}.{each} {what}" for each, value in public_objects(module) for what in problems(value)]
    assert not found, "\n".join(found)


def _undocumented(x: int) -> int:
    """Does something
    and goes on.
    """
    return x


def test_missing_sections_are_found() -> None:
    assert len(problems(_undocumented)) == 1  # its file is not farprop's, so its sections are not checked
    assert list(missing_sections(_undocumented, [])) == ["has no Args:", "has no Returns:"]
    assert list(missing_sections(_undocumented, ["Args:", "    y: Another.", "Returns:"])) == ["does not document x"]
