"""``import farprop.rpc`` and ``import farprop.compat`` import little more than torch: each in a process of its own."""

import json
import subprocess
import sys

import pytest

# Layers above farprop.rpc. Programs import them by name, and compat when it is installed.
HIGHER = ("farprop.nn", "farprop.optim", "farprop.jit", "farprop.distributed", "farprop.autograd")

PROGRAM = """
import json, sys
import torch
before = set(sys.modules)
import {module}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def imported_beyond_torch(module: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)], capture_output=True, text=True, timeout=100, check=True
    )
    names: list[str] = json.loads(done.stdout)
    assert module in names
    return names


@pytest.mark.parametrize("module", ["farprop.rpc", "farprop.compat"])
def test_import_brings_nothing_heavy(module: str) -> None:
    names = imported_beyond_torch(module)
    packages = {name.partition(".")[0] for name in names}
    # Neither cryptography nor cloudpickle, and no modules of torch that `import torch` itself leaves out.
    assert packages - sys.stdlib_module_names == {"farprop", "msgspec"}
    assert [name for name in names if name.startswith(HIGHER)] == []
