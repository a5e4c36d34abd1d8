"""Running a program as ``__main__`` in a process that farprop started, as ``python`` would have run it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import sys
import types


def load_script(path: str, arguments: list[str]) -> types.CodeType:
    """Prepare what ``python path arguments...`` does; returns the program's code."""
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(path))
    return code


def load_module(name: str, arguments: list[str]) -> tuple[types.CodeType, importlib.machinery.ModuleSpec]:
    """Prepare what ``python -m name arguments...`` does; returns the program's code and its spec.

    Raises:
        ImportError: there is no such module, or it can't be run.
    """
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name += ".__main__"
        spec = importlib.util.find_spec(name)
    loader = spec.loader if spec is not None else None
    code = loader.get_code(name) if isinstance(loader, importlib.abc.InspectLoader) else None
    if spec is None or spec.origin is None or code is None:
        raise ImportError(f"no module named {name} that can be run")
    sys.argv = [spec.origin, *arguments]
    return code, spec


def run_as_main(
    code: types.CodeType, path: str, package: str | None, spec: importlib.machinery.ModuleSpec | None
) -> None:
    """Run a program's code as ``__main__``.

    Args:
        code: the code.
        path: its file.
        package: the module's package, None for a script.
        spec: the module's spec, None for a script. Multiprocessing looks at it to find the program again in a child.
    """
    main = types.ModuleType("__main__")
    vars(main).update(
        __file__=path,
        __package__=package,
        __builtins__=__builtins__,
        __cached__=None,
        __spec__=spec,
    )
    # multiprocessing registered farprop's own main module under the second name when it was imported.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(code, vars(main))
