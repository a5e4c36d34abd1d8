"""Rules about imports that import-linter can't check: it does not look inside other packages."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "farprop"

# Modules that farprop replaces, so must not use.
FORBIDDEN = (
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "torch._C._distributed_rpc",
    "torch._C._distributed_autograd",
)


def forbidden_uses(source: str) -> list[tuple[int, str]]:
    """Lines of this code that import or use what is forbidden, each with the name.

    A name in a string is no use of it (``compat`` puts farprop under these names), unless it is given to an
    import function. Neither is to assign to it. A computed name is not seen: ``cli/bench_worker.py`` imports torch's
    RPC in a process of its own, to compare.
    """
    tree = ast.parse(source)
    names = _imported_names(tree)
    found = {
        (node.lineno, name)
        for node in ast.walk(tree)
        if isinstance(node, ast.expr | ast.stmt)
        for name in _mentions(node, names)
        if any(name == f or name.startswith(f"{f}.") for f in FORBIDDEN)
    }
    return sorted(found)


def _imported_names(tree: ast.AST) -> dict[str, str]:
    """What the names that imports bind stand for: ``import torch.distributed as dist`` gives dist."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _mentions(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom(module=str(module), level=0):
            yield from (f"{module}.{alias.name}" for alias in node.names)
        case ast.Attribute(ctx=ast.Load()):
            yield _dotted(node, names)
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
            if _dotted(function, names).rpartition(".")[2] in ("import_module", "__import__"):
                yield name


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return "?"


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed.rpc",
        "import torch.distributed.rpc.api as api",
        "import torch.distributed.autograd as dist_autograd",
        "from torch.distributed import rpc",
        "from torch.distributed.rpc import api",
        "from torch.distributed.rpc.api import rpc_sync",
        "from torch._C._distributed_rpc import PyRRef",
        "from torch._C import _distributed_autograd",
        "def f():\n    from torch.distributed import autograd",
        "import torch\ntorch.distributed.rpc.rpc_sync('a', f)",
        "import torch.distributed as dist\ndist.rpc.shutdown()",
        "from torch import distributed as dist\nx = dist.autograd",
        "import importlib\nimportlib.import_module('torch.distributed.rpc')",
        "from importlib import import_module as load\nload('torch.distributed.rpc')",
        "__import__('torch.distributed.rpc')",
    ],
)
def test_forbidden_uses_are_found(source):
    assert forbidden_uses(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.TCPStore",
        "import torch\ntorch.autograd.grad",
        "from torch.distributed import Store",
        "from . import rpc",
        "from farprop import rpc",
        "import sys\nimport farprop.rpc\nsys.modules['torch.distributed.rpc'] = farprop.rpc",
        "import torch.distributed\nimport farprop.rpc\ntorch.distributed.rpc = farprop.rpc",
        "import torch.distributed.rpc_other",
    ],
)
def test_allowed_uses_are_not_reported(source):
    assert forbidden_uses(source) == []


def test_farprop_does_not_use_what_it_replaces():
    files = sorted(PACKAGE.rglob("*.py"))
    assert files
    uses = [
        f"{file.relative_to(ROOT)}:{line}: {name}" for file in files for line, name in forbidden_uses(file.read_text())
    ]
    assert uses == []


# Names of torch that may change or go with any version. One file looks them up, and says what is lost without them.
LOOKED_UP_IN = PACKAGE / "_torch.py"
# Without an underscore, but deprecated, or not documented. farprop.jit is about TorchScript, and most of it is imported
# only if there is one.
FLEETING = ("torch.jit", "torch.autograd.profiler_legacy", "torch.distributed.remote_device")
# Private attributes of the standard library's.
OF_OTHERS = {"_current_frames", "_getframe", "_value2member_map_"}


def private_uses(source: str, fleeting: tuple[str, ...] = FLEETING) -> list[tuple[int, str]]:
    """Lines of this code that import or use private names of torch's modules."""
    tree = ast.parse(source)
    names = _imported_names(tree)
    found = {
        (node.lineno, name)
        for node in ast.walk(tree)
        if isinstance(node, ast.expr | ast.stmt)
        for name in _mentions(node, names)
        if name.partition(".")[0] == "torch"
        and (
            any(_is_private(part) for part in name.split("."))
            or any(name == one or name.startswith(f"{one}.") for one in fleeting)
        )
    }
    return sorted(found)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names that this code gives to attributes, functions, classes and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__slots__" for t in node.targets
        ):
            yield from ast.literal_eval(node.value)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C.Future",
        "import torch\ntorch.autograd._profiler_enabled()",
        "from torch.utils._pytree import tree_map",
        "from torch import _jit_internal",
        "import torch.distributed as dist\ndist._broadcast_coalesced",
        "from torch.autograd.variable import Variable\nVariable._execution_engine",
        "import torch\nisinstance(x, torch.jit.ScriptModule)",
        "from torch.autograd import profiler_legacy",
        "import importlib\nimportlib.import_module('torch._dynamo')",
    ],
)
def test_private_uses_are_found(source):
    assert private_uses(source)


@pytest.mark.parametrize("source", ["import torch\ntorch.__version__", "import torch\ntorch.futures.Future", "a._b"])
def test_public_uses_are_not_private(source):
    assert private_uses(source) == []


def test_private_names_of_torch_are_used_in_one_module():
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file != LOOKED_UP_IN]
    uses = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in files
        for line, name in private_uses(file.read_text(), () if file.parent == PACKAGE / "jit" else FLEETING)
    ]
    assert uses == []


def test_private_attributes_belong_to_farprop():
    # The source does not show the class of an object, so farprop may use only private attributes that it defines.
    trees = {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py")) if file != LOOKED_UP_IN}
    defined = {name for tree in trees.values() for name in _defined(tree)} | OF_OTHERS
    uses = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in defined
    ]
    assert uses == []


def test_every_module_has_its_layer():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (layers,) = (c["layers"] for c in config["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    placed = {name.strip() for layer in layers for name in layer.replace("|", ":").split(":")}
    modules = {
        f"farprop.{path.stem}"
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and path.stem != "__init__"
    }
    assert modules == placed, "name each module of farprop in the layers of pyproject.toml"
