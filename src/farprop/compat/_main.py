"""Running a script or module as ``__main__``, here and again in the children that multiprocessing starts.

multiprocessing (spawn and forkserver) gives a child the parent's main module by running it again, before it
unpickles what the child is to do. If the main module has a ``__spec__``, it runs the module of that *name*:
that is how it follows ``python -m``. So the user's program gets a spec that names ``farprop.compat._child``.
That module redirects and then runs the program, which it finds through an environment variable. Nothing of
multiprocessing is patched, and grandchildren go the same way.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import types
from typing import Any, Final

VARIABLE: Final = "FARPROP_COMPAT_MAIN"
_CHILD: Final = "farprop.compat._child"


class _MainSpec(importlib.machinery.ModuleSpec):
    """Names the child's module, but leaves relative imports of the program as they are without it."""

    def __init__(self, package: str) -> None:
        super().__init__(_CHILD, None)
        self._package = package

    @property
    def parent(self) -> str:
        return self._package


def run_script(path: str, arguments: list[str]) -> None:
    """What ``python path arguments...`` does."""
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    os.environ[VARIABLE] = "path:" + os.path.abspath(path)
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(path))
    _run(code, path, package=None)


def run_module(name: str, arguments: list[str]) -> None:
    """What ``python -m name arguments...`` does."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name += ".__main__"
        spec = importlib.util.find_spec(name)
    loader = spec.loader if spec is not None else None
    code = loader.get_code(name) if isinstance(loader, importlib.abc.InspectLoader) else None
    if spec is None or spec.origin is None or code is None:
        raise ImportError(f"no module named {name} that can be run")
    os.environ[VARIABLE] = "module:" + name
    sys.argv = [spec.origin, *arguments]
    _run(code, spec.origin, package=spec.parent or "")


def run_again() -> dict[str, Any]:
    """Run the program in a child, as multiprocessing would have; return its names."""
    kind, _, name = os.environ.get(VARIABLE, "").partition(":")
    if not name or name.endswith(".__main__"):
        # Python doesn't run the __main__ of a package again either: it rarely has a guard.
        return {}
    if kind == "path":
        names = runpy.run_path(name, run_name="__mp_main__")
    else:
        names = runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
    # The child keeps its own spec, by which its own children find it.
    return {key: value for key, value in names.items() if not (key.startswith("__") and key.endswith("__"))}


def _run(code: types.CodeType, path: str, package: str | None) -> None:
    main = types.ModuleType("__main__")
    vars(main).update(
        __file__=path,
        __package__=package,
        __builtins__=__builtins__,
        __cached__=None,
        __spec__=_MainSpec(package or ""),
    )
    # multiprocessing made the second name for our own main module when it was imported.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(code, vars(main))
