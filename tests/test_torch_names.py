"""Farprop has torch's names, with torch's signatures, so that changing the import is the whole migration.

``docs/compat.md`` has a table of the names that are missing, and one of the signatures that differ, with the reasons.
Both are compared with what plain torch has in one process and what ``farprop.compat`` has in another.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.torch_names import Known, Parameter

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "compat.md"


MODULES_WITH_ALL = ("rpc", "rpc.api", "rpc.backend_registry", "rpc.constants", "rpc.internal", "rpc.options")


def _listed(which: str, given: str = "") -> dict[str, Known]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.torch_names", which],
        input=given,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Known] = json.loads(done.stdout)
    return found


@functools.cache
def _both() -> tuple[dict[str, Known], dict[str, Known]]:
    theirs = _listed("torch")
    return theirs, _listed("farprop", json.dumps(list(theirs)))


def _table(title: str) -> dict[str, str]:
    """Reasons by name, from the section with this title. Its headings are modules or classes, and rows have names."""
    section = DOCUMENT.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    owner = ""
    for line in section.splitlines():
        if line.startswith("### "):
            owner = line.strip("#` ")
        elif line.startswith("| `"):
            names, reason = line.strip("| ").split(" | ")
            for name in re.findall(r"`([^`]+)`", names):
                assert f"{owner}.{name}" not in found, f"{owner}.{name} is there twice"
                found[f"{owner}.{name}"] = reason
    return found


def test_every_name_of_torch_exists_or_is_in_the_table() -> None:
    theirs, ours = _both()
    missing = {name for name in theirs if not ours[name]["is_there"]}
    # The attributes of a missing class are not listed.
    missing -= {name for name in missing if name.rpartition(".")[0] in missing}
    table = _table("Missing names")
    assert {
        "missing, and not in the table": sorted(missing - table.keys()),
        "in the table, and not missing": sorted(table.keys() - missing),
    } == {"missing, and not in the table": [], "in the table, and not missing": []}
    assert all(len(reason) > 20 for reason in table.values())


def test_name_lists_have_names_of_each_kind() -> None:
    theirs, ours = _both()
    # One of each kind: functions, a constant, and what classes and their instances have, in Python and in C++.
    for name in (
        "rpc.init_rpc",
        "rpc.api._invoke_rpc_builtin",
        "rpc.constants._DEFAULT_RPC_TIMEOUT_SEC",
        "rpc.TensorPipeAgent.get_metrics",
        "optim.optimizer.DistributedOptimizer.remote_optimizers",
        "rpc.RpcBackendOptions.rpc_timeout",
    ):
        assert theirs[f"torch.distributed.{name}"]["is_there"]
        assert ours[f"torch.distributed.{name}"]["is_there"]
    assert len(theirs) > 500
    assert "torch.distributed.rpc.Future" not in theirs
    assert "torch.distributed.rpc.api.functools" not in theirs


def _differences(theirs: Known, ours: Known) -> list[str]:
    if not theirs["signatures"] or not ours["signatures"]:
        return []
    mine = ours["signatures"][0]
    if not theirs["is_cpp"]:
        return _compared(theirs["signatures"][0], mine)
    return [text for signature in theirs["signatures"] for text in _calls_for(signature, mine)]


def _compared(theirs: list[Parameter], ours: list[Parameter]) -> list[str]:
    if {p["kind"] for p in theirs if p["name"] != "self"} == {"VAR_POSITIONAL", "VAR_KEYWORD"}:
        return []  # the signature accepts anything
    return [] if theirs == ours else [f"torch has {_shown(theirs)}, farprop {_shown(ours)}"]


def _calls_for(theirs: list[Parameter], ours: list[Parameter]) -> list[str]:
    """C++ functions: every call that their documentation allows has to work with ours."""
    by_position = [p for p in theirs if p["kind"] == "POSITIONAL_ONLY"]
    named = [p for p in theirs if p["kind"] == "POSITIONAL_OR_KEYWORD"]
    mine = {p["name"]: p for p in ours}
    texts = []
    for place, parameter in enumerate(named, len(by_position)):
        own = mine.get(parameter["name"])
        if own is None or ours.index(own) != place:
            texts.append(f"{parameter['name']} is not at place {place}: {_shown(ours)}")
        elif parameter["default"] is not None and not _same_default(parameter["default"], own["default"]):
            texts.append(f"the default of {parameter['name']} is {parameter['default']}, here {own['default']}")
    most = len(by_position) + len(named)
    needed = [p for p in ours if p["default"] is None and not p["kind"].startswith("VAR")]
    if len([p for p in ours if not p["kind"].startswith("VAR")]) < most:
        texts.append(f"takes too few: {_shown(ours)}")
    if len(needed) > len([p for p in theirs if p["default"] is None and not p["kind"].startswith("VAR")]):
        texts.append(f"needs too many: {_shown(ours)}")
    texts += [
        f"torch takes any number, as {kind}" for kind in ("VAR_POSITIONAL", "VAR_KEYWORD")
        if kind in {p["kind"] for p in theirs} and kind not in {p["kind"] for p in ours}
    ]  # fmt: skip
    return texts


def _same_default(theirs: str, ours: str | None) -> bool:
    empty = {"{}", "[]", "()", "mappingproxy({})"}
    number = r"-?\d+(\.\d+)?"
    if ours is not None and re.fullmatch(number, theirs) and re.fullmatch(number, ours):
        return float(theirs) == float(ours)
    return theirs == ours or (theirs in empty and ours in empty)


def _shown(parameters: list[Parameter]) -> str:
    return ", ".join(
        f"{p['name']}[{p['kind'].lower()}]" + ("" if p["default"] is None else f"={p['default']}") for p in parameters
    )


def test_every_signature_equals_that_of_torch_or_is_in_the_table() -> None:
    theirs, ours = _both()
    different = {name: found for name in theirs if (found := _differences(theirs[name], ours[name]))}
    table = _table("Signatures that differ")
    assert {name: found for name, found in different.items() if name not in table} == {}
    assert sorted(table.keys() - different.keys()) == []


@pytest.mark.parametrize(
    ("line", "ours", "expected"),
    [
        ("f(self: A, timeout: float = -1.0) -> None", "self, timeout=-1.0", []),
        ("f(self: A, timeout: float = -1.0) -> None", "self, seconds=-1.0", ["timeout is not at place 1"]),
        ("f(self: A, timeout: float = -1.0) -> None", "self, timeout=0", ["the default of timeout is -1.0, here 0"]),
        ("f(self: A) -> None", "self, more", ["needs too many"]),
        ("f(arg0: str, arg1: Map[str, int], *args, **kwargs) -> B", "a, b, /, *c, **d", []),
        ("f(arg0: str, arg1: int) -> B", "a", ["takes too few"]),
        ("f(arg0: str, *args) -> B", "a", ["torch takes any number, as VAR_POSITIONAL"]),
    ],
)
def test_differences_from_cpp_functions_are_found(line: str, ours: str, expected: list[str]) -> None:
    from tests.support.torch_names import _known, _parsed

    own = _known(eval(f"lambda {ours}: None"))["signatures"][0]
    found = _calls_for(_parsed(line), own)
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))


def test_star_imports_give_the_same_names_as_torch() -> None:
    for name in (*MODULES_WITH_ALL, "autograd"):
        theirs, ours = (importlib.import_module(f"{package}.{name}") for package in ("torch.distributed", "farprop"))
        assert set(theirs.__all__) - set(getattr(ours, "__all__", dir(ours))) == set(), name


def test_program_that_uses_private_names_prints_the_same(tmp_path: Path) -> None:
    program = str(ROOT / "tests" / "support" / "private_api_program.py")
    seen = {}
    for name, how in (("torch", []), ("farprop", ["-m", "farprop.compat"])):
        # Torch warns of deprecated things that its own modules use.
        command = [sys.executable, "-W", "ignore", *how, program, str(tmp_path / name)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        seen[name] = [json.loads(line) for line in done.stdout.splitlines()]
    # The options have the path of the store.
    assert json.dumps(seen["farprop"]).replace("/farprop", "/torch") == json.dumps(seen["torch"])
    assert len(seen["torch"]) == program_facts(program)


def program_facts(program: str) -> int:
    return Path(program).read_text().count("@fact\n")
