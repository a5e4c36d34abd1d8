"""The pages of the site have every name that they promise. That the site can be built, `make docs` shows."""

from __future__ import annotations

import importlib
import re
import runpy
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.autograd
import torch.distributed.nn.api.remote_module
import torch.distributed.optim
import torch.distributed.rpc
import torch.distributed.rpc.functions
import torch.distributed.rpc.internal

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

# Reference

# What people import. Everything in their __all__ has to be in the reference.
PUBLIC_MODULES = (
    "farprop.autograd",
    "farprop.compat",
    "farprop.dashboard",
    "farprop.distributed",
    "farprop.errors",
    "farprop.inspect",
    "farprop.jit",
    "farprop.nn",
    "farprop.nn.parallel",
    "farprop.optim",
    "farprop.profiler",
    "farprop.rpc",
    "farprop.rpc.functions",
    "farprop.telemetry.opentelemetry",
    "farprop.telemetry.prometheus",
    "farprop.telemetry.torch_debug",
    "farprop.testing",
)


def _public_names(module: ModuleType) -> set[str]:
    own = (n for n, v in vars(module).items() if not n.startswith("_") and _is_of(v, module.__name__))
    return {f"{module.__name__}.{name}" for name in getattr(module, "__all__", None) or own}


def _is_of(value: object, module: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module


def _referenced() -> set[str]:
    """The names that Sphinx's directives in docs/reference write down."""
    found = set()
    for page in (DOCS / "reference").glob("*.rst"):
        for kind, target, options in re.findall(r"^\.\. auto(\w+):: (\S+)\n((?:   .*\n?)*)", page.read_text(), re.M):
            if kind != "module":
                found.add(target)
            elif ":members:" in options and target != "farprop.launch.ray":  # which needs Ray
                found |= _public_names(importlib.import_module(target))
    return found


def test_every_public_name_is_in_the_reference() -> None:
    public = {name for module in PUBLIC_MODULES for name in _public_names(importlib.import_module(module))}
    # A name that two modules have is written down once.
    public -= {"farprop.rpc.functions"}
    assert sorted(public - _referenced()) == []
    assert len(public) > 100


def test_every_module_with_public_names_is_known() -> None:
    """A new package that people import has to be added to the list above, and to docs/reference."""
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    packages = {name for layer in layers for name in re.findall(r"farprop\.\w+", layer)}
    internal = {"__main__", "_torch", "cli", "config", "doctor", "ids", "locks", "program", "protocol", "runtime"}
    internal |= {"transport", "wire", "launch"}  # of launch, `farprop.workers` and Ray's are in the reference
    public = packages - {f"farprop.{name}" for name in internal}
    assert public == {".".join(module.split(".")[:2]) for module in PUBLIC_MODULES}
    assert {"farprop.workers", "farprop.launch.pool.Worker"} <= _referenced()


# Migration

TORCH_MODULES = (
    torch.distributed.rpc,
    torch.distributed.rpc.functions,
    torch.distributed.rpc.internal,
    torch.distributed.autograd,
    torch.distributed.optim,
    torch.distributed.nn.api.remote_module,
)
TORCHS_OWN = ("torch.distributed.", "torch._C._distributed")


def _names_of_torch(module: ModuleType) -> set[str]:
    names = {n for n, v in vars(module).items() if getattr(v, "__module__", "").startswith(TORCHS_OWN)}
    names |= set(getattr(module, "__all__", ()))
    names -= {"T", "Store"}  # a type variable, and what a module only imports
    return {name for name in names if not name.startswith("_")}


def _rows(module: str) -> dict[str, str]:
    """What the table of a module has for each of torch's names."""
    section = (DOCS / "howto" / "migrate.md").read_text().split(f"\n### {module}\n")[1].split("\n### ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (`[\w.]+`|none) \|", section, re.MULTILINE))


@pytest.mark.parametrize("module", [pytest.param(module, id=module.__name__) for module in TORCH_MODULES])
def test_migration_has_every_name_of_torch(module: ModuleType) -> None:
    assert module.__name__.startswith("torch.")
    rows = _rows(module.__name__)
    assert set(rows) == _names_of_torch(module)
    for ours in rows.values():
        if ours != "none":
            where, _, name = ours.strip("`").rpartition(".")
            assert hasattr(importlib.import_module(where), name), ours


# Drawings


def test_pages_of_a_section_are_in_its_table() -> None:
    navigation = runpy.run_path(str(DOCS / "conf.py"))["navigation"]
    for section in ("tutorial/index", "howto/index", "guides/index", "explanation/index", "project/index"):
        page = DOCS / f"{section}.md"
        linked = {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+\.md)", page.read_text())}
        assert {DOCS / f"{below}.md" for below in navigation[section]} <= linked, section


def test_drawings_are_those_of_the_program(tmp_path: Path) -> None:
    names = runpy.run_path(str(DOCS / "drawings.py"))
    names["draw_all"](tmp_path)
    for drawn in tmp_path.iterdir():
        assert drawn.read_text() == (DOCS / "images" / drawn.name).read_text(), "run python docs/drawings.py"


def test_charts_show_what_the_pages_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    for file, drawn in runpy.run_path(str(DOCS / "charts.py"))["draw_all"]().items():
        assert drawn == (DOCS / "images" / file).read_text(), "run python docs/charts.py"


def test_map_has_every_layer() -> None:
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    packages = {name for layer in layers for name in re.findall(r"farprop\.(\w+)", layer)} - {"__main__"}
    drawn = set(re.findall(r">(\w+)</text>", (DOCS / "images" / "map.svg").read_text()))
    assert packages <= drawn


# Learning curves of the examples


def test_learning_curves_show_what_the_pages_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    drawn = runpy.run_path(str(DOCS / "learning_curves.py"))["draw_all"]()
    assert len(drawn) == 4
    for file, text in drawn.items():
        assert text == (DOCS / "images" / file).read_text(), "run python docs/learning_curves.py"
