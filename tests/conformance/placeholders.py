"""Names that PyTorch's test modules import and ``farprop.rpc`` does not have (yet).

They only let the test modules be imported: using one raises, so the tests that need it fail, and only those.
What is missing is found by reading the imports, so this shrinks by itself.
"""

import ast
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch

_T = TypeVar("_T")
_THEIRS = "torch.distributed.rpc"
_OURS = "farprop.rpc"

# The test modules, and the parts of torch outside the RPC that they import and that import the RPC in turn.
_READERS = (
    "testing/_internal/dist_utils.py",
    "testing/_internal/distributed/ddp_under_dist_autograd_test.py",
    "testing/_internal/distributed/nn",
    "testing/_internal/distributed/rpc",
    "distributed/nn",
    "distributed/optim",
)


def fill() -> list[str]:
    """Put placeholders where names are missing; return what they stand for."""
    filled = []
    for module_name, name in sorted(set(_imports())):
        ours = _OURS + module_name.removeprefix(_THEIRS)
        module = _module(ours)
        if module is None:
            module = _empty_module(ours)
            filled.append(ours)
        if not name or hasattr(module, name) or _module(f"{ours}.{name}") is not None:
            continue
        setattr(module, name, _stand_in(name))
        filled.append(f"{ours}.{name}")
    return filled


def _stand_in(name: str) -> type:
    """Something to import in the place of a missing class or function."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"farprop.rpc has no {name}")

    # Generic, because ``RRef[int]`` occurs in annotations.
    generic: Any = Generic
    return types.new_class(name, (generic[_T],), exec_body=lambda body: body.update(__new__=refuse))


def _imports() -> Iterator[tuple[str, str]]:
    """The module and name of each import of the RPC; no name for an ``import`` of a module."""
    root = Path(torch.__file__).parent
    for reader in _READERS:
        path = root / reader
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and _within(node.module or ""):
                    yield from ((node.module or "", alias.name) for alias in node.names)
                elif isinstance(node, ast.Import):
                    yield from ((alias.name, "") for alias in node.names if _within(alias.name))


def _within(name: str) -> bool:
    return name == _THEIRS or name.startswith(_THEIRS + ".")


def _module(name: str) -> types.ModuleType | None:
    parent, _, _ = name.rpartition(".")
    if not hasattr(importlib.import_module(parent), "__path__") or importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name)


def _empty_module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    setattr(importlib.import_module(parent), last, module)
    return module
