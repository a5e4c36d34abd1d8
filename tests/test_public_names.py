"""``dir()`` of farprop's packages shows their API, and not what they import."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

PACKAGES = (
    *("autograd", "compat", "dashboard", "distributed", "inspect", "jit", "nn", "nn.parallel", "optim", "profiler"),
    *("rpc", "testing"),
)


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_shows_the_api(name: str) -> None:
    package = importlib.import_module(f"farprop.{name}")
    shown = dir(package)
    assert shown == sorted(package.__all__)
    for each in shown:
        found = getattr(package, each)
        assert not isinstance(found, ModuleType) or found.__name__.startswith("farprop."), each


def test_dir_of_farprop_shows_what_is_looked_up_on_first_use() -> None:
    program = "import farprop; print(sorted(dir(farprop))); print(farprop.workers.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["['__version__', 'pipeline', 'profile', 'workers']", "workers"]
