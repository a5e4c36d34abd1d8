"""``python -m tests.fuzz.child TARGET [libFuzzer's arguments]``: fuzzes one target."""

from __future__ import annotations

import sys

import atheris

from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=["farprop"], enable_loader_override=False):
        run = TARGETS[name]()
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
