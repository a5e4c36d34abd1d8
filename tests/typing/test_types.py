"""Type checkers know what calls return, and find wrong arguments: ``uses.py`` has the comments that this compares."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
USES = Path(__file__).with_name("uses.py")


class Found(NamedTuple):
    """What a checker says of the lines of a file."""

    types: dict[int, str]
    errors: dict[int, list[str]]


def run_mypy() -> Found:
    """With the project's settings, and the cache of ``make lint``: without one, it reads torch for half a minute."""
    command = [sys.executable, "-m", "mypy", "--output=json", "--no-error-summary", str(USES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    found = Found({}, defaultdict(list))
    for line in done.stdout.splitlines():
        row = json.loads(line)
        assert Path(ROOT, row["file"]) == USES, row
        _note(found, row["line"], row["message"], row["severity"] == "error", r'Revealed type is "(.*)"')
    assert found.types, done.stdout + done.stderr
    return found


def run_pyright(tmp_path: Path) -> Found:
    settings = {
        "include": [str(USES)],
        "extraPaths": [str(ROOT / "src"), str(ROOT)],
        "pythonVersion": "3.11",
        "typeCheckingMode": "standard",
    }
    project = tmp_path / "pyrightconfig.json"
    project.write_text(json.dumps(settings))
    # basedpyright brings Node.js with it. Pyright's own package would download it here.
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(project)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = Found({}, defaultdict(list))
    for row in json.loads(done.stdout)["generalDiagnostics"]:
        assert Path(row["file"]) == USES, row
        line = row["range"]["start"]["line"] + 1
        _note(found, line, row["message"], row["severity"] == "error", r'Type of ".*" is "(.*)"')
    return found


def _note(found: Found, line: int, text: str, is_error: bool, revealed: str) -> None:
    match = re.fullmatch(revealed, text, re.DOTALL)
    if match is not None:
        found.types[line] = re.sub(r"\b(\w+\.)+(?=\w)", "", match[1])
    elif is_error:
        found.errors[line].append(text)


def expected(checker: str) -> tuple[dict[int, str], set[int]]:
    types, errors = {}, set()
    for number, line in enumerate(USES.read_text().splitlines(), 1):
        _, _, comment = line.partition("  #: ")
        if comment in ("error", f"error in {checker}"):
            errors.add(number)
        elif comment and not comment.startswith("error"):
            types[number] = comment
    return types, errors


@pytest.mark.timeout(300)  # for mypy without a cache
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_results_are_known_and_wrong_arguments_found(checker: str, tmp_path: Path) -> None:
    found = run_mypy() if checker == "mypy" else run_pyright(tmp_path)
    types, errors = expected(checker)
    assert len(types) > 60
    assert len(errors) > 30
    wrong = {line: (found.types.get(line), kind) for line, kind in types.items() if found.types.get(line) != kind}
    assert wrong == {}
    assert {line: found.errors[line] for line in found.errors.keys() - errors} == {}
    assert sorted(errors - found.errors.keys()) == []
