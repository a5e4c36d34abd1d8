"""``python -m farprop.compat script.py ...``: run a program with farprop in place of ``torch.distributed.rpc``.

The program runs as ``__main__``, in this process and again in child processes. With spawn and forkserver,
multiprocessing runs the parent's main module again in a child, before it unpickles the child's task. If the main module
has a ``__spec__``, it runs the module of that *name*, which is how it supports ``python -m``. So the user's program
gets a spec that names ``farprop.compat._child``. That module calls ``install()`` and then runs the program, which it
finds through an environment variable. Nothing of multiprocessing is patched, and it works for grandchildren, too.
"""

import importlib.machinery
import os
import runpy
import sys
from typing import Any, Final

from farprop.compat import install
from farprop.program import load_module, load_script, run_as_main

USAGE = """\
usage: python -m farprop.compat script.py [argument ...]
       python -m farprop.compat -m module [argument ...]

Runs the program with torch.distributed.rpc and torch.distributed.autograd on farprop, in this process and in
those it starts with multiprocessing or torch.multiprocessing. With torchrun, it goes before the script:

       torchrun ... -m farprop.compat script.py [argument ...]"""

VARIABLE: Final = "FARPROP_COMPAT_MAIN"
_CHILD: Final = "farprop.compat._child"


class _MainSpec(importlib.machinery.ModuleSpec):
    """Names the child's module, and keeps the program's own package for its relative imports."""

    def __init__(self, package: str) -> None:
        super().__init__(_CHILD, None)
        self._package = package

    @property
    def parent(self) -> str:
        return self._package


def run_script(path: str, arguments: list[str]) -> None:
    """Do what ``python path arguments...`` does."""
    code = load_script(path, arguments)
    os.environ[VARIABLE] = "path:" + os.path.abspath(path)
    run_as_main(code, path, None, _MainSpec(""))


def run_module(name: str, arguments: list[str]) -> None:
    """Do what ``python -m name arguments...`` does."""
    code, spec = load_module(name, arguments)
    os.environ[VARIABLE] = "module:" + spec.name
    package = spec.parent or ""
    run_as_main(code, sys.argv[0], package, _MainSpec(package))


def run_again() -> dict[str, Any]:
    """Run the program in a child, as multiprocessing would have; returns its globals."""
    kind, _, name = os.environ.get(VARIABLE, "").partition(":")
    if not name or name.endswith(".__main__"):
        # Neither does multiprocessing run the __main__ of a package again: it rarely has a guard.
        return {}
    if kind == "path":
        names = runpy.run_path(name, run_name="__mp_main__")
    else:
        names = runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
    # The child keeps its own __spec__, which its own children need.
    return {key: value for key, value in names.items() if not (key.startswith("__") and key.endswith("__"))}


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit code."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    as_module = arguments[:1] == ["-m"]
    if as_module:
        del arguments[0]
    if not arguments or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    name, *rest = arguments
    if not as_module and not os.path.isfile(name):
        print(f"farprop.compat: no such script: {name}", file=sys.stderr)
        return 2
    install()
    if as_module:
        run_module(name, rest)
    else:
        run_script(name, rest)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
