"""Run code written for ``torch.distributed.rpc`` on farprop, without touching it.

``farprop.compat.install()`` at the top of a script, or ``python -m farprop.compat script.py``, makes
``torch.distributed.rpc``, ``torch.distributed.autograd``, ``torch.distributed.nn.RemoteModule``,
``torch.distributed.optim.DistributedOptimizer`` and ``torch.nn.parallel.DistributedDataParallel`` refer to farprop's in
this process. Names that your own modules imported from torch before ``install()`` stay torch's, so call it first.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed
import torch.futures

from farprop.compat.torch_functions import monitored_barrier, wait_all
from farprop.locks import make_lock

__all__ = ["install"]

# Torch's modules, and the modules that replace them. The rest of torch.distributed.nn and torch.distributed.optim is
# about process groups, and stays torch's.
_REPLACEMENTS: Final = {
    "torch.distributed.rpc": "farprop.rpc",
    "torch.distributed.autograd": "farprop.autograd",
    "torch.distributed.nn.api.remote_module": "farprop.nn.remote_module",
    "torch.distributed.optim.optimizer": "farprop.optim.optimizer",
}

# The modules that define what is replaced: the Python modules, and the C++ modules under them.
_OWNERS: Final = (*_REPLACEMENTS, "torch._C._distributed_rpc", "torch._C._distributed_autograd")
_NOTHING: Final = object()
_lock: Final = make_lock("compat")
_installed = False


class _AliasLoader(importlib.abc.Loader):
    """Loads a module under a second name."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        # The import system has just replaced the module's own spec with the alias's.
        module.__spec__ = self._spec


class _AliasFinder(importlib.abc.MetaPathFinder):
    """Finds ``farprop.rpc.x`` when ``torch.distributed.rpc.x`` is imported.

    Submodules are not imported beforehand, because some have side effects (``_testing`` registers a backend). Without
    this finder Python would load ``farprop/rpc/x.py`` a second time under torch's name.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        for theirs, ours in _REPLACEMENTS.items():
            if not _within(fullname, theirs) or not _exists(ours):
                continue
            name = ours + fullname.removeprefix(theirs)
            if importlib.util.find_spec(name) is not None:
                return importlib.machinery.ModuleSpec(fullname, _AliasLoader(name))
        return None


class _Changes:
    """Changes to torch and to the import system, which can be undone."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute."""
        old = vars(owner).get(name, _NOTHING)
        self._on_undo(lambda: vars(owner).pop(name, None) if old is _NOTHING else setattr(owner, name, old))
        setattr(owner, name, value)

    def set_module(self, name: str, module: types.ModuleType | None) -> types.ModuleType | None:
        """Register a module under a name, or remove the one that is there; returns the old one."""
        old = sys.modules.pop(name, None)
        self._on_undo(lambda: sys.modules.pop(name, None) if old is None else sys.modules.update({name: old}))
        if module is not None:
            sys.modules[name] = module
        return old

    def add_finder(self, finder: importlib.abc.MetaPathFinder) -> None:
        """Make a finder the first one that is asked."""
        self._on_undo(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)
        sys.meta_path.insert(0, finder)

    def hook_torchscript(self) -> None:
        """Install farprop's hooks in TorchScript, if this torch allows it."""
        # Imported by name, because it is in a higher layer.
        was_there = "farprop.jit" in sys.modules
        jit = importlib.import_module("farprop.jit")
        if jit._install() or not was_there:
            self._on_undo(jit._uninstall)

    def _on_undo(self, undo: Callable[[], object]) -> None:
        # Called before the change: an interrupt may come between the two, and undoing a change not made is harmless.
        self._undo.append(undo)

    def undo(self) -> None:
        """Undo all changes, the last one first."""
        while self._undo:
            self._undo.pop()()


def install() -> None:
    """Replace torch's RPC, distributed autograd, RemoteModule, DistributedOptimizer and DDP with farprop's.

    The names are ``torch.distributed.rpc``, ``torch.distributed.autograd``, ``torch.distributed.nn.RemoteModule``,
    ``torch.distributed.optim.DistributedOptimizer``, ``torch.nn.parallel.DistributedDataParallel``,
    ``torch.futures.wait_all`` and ``torch.distributed.monitored_barrier``. A second call does nothing. If the call
    raises, torch is unchanged.
    """
    global _installed
    with _lock:
        if _installed:
            return
        changes = _Changes()
        try:
            _install(changes)
        except BaseException:
            changes.undo()
            raise
        _installed = True


def _install(changes: _Changes) -> None:
    # Optimizers and torch.compile import this module at some point, and it imports private names of torch's RPC. So it
    # is imported now, while it still finds them; _rebind points them at farprop's below.
    with contextlib.suppress(ImportError):  # this torch may not have the module
        importlib.import_module("torch.distributed.nn")
    # Modules of packages that are not imported yet are left to the finder: torch.distributed.optim takes seconds to
    # import, and most programs don't need it.
    ours = {
        theirs: importlib.import_module(name)
        for theirs, name in _REPLACEMENTS.items()
        if _exists(name) and theirs.rpartition(".")[0] in sys.modules
    }
    parallel = importlib.import_module("farprop.nn.parallel")
    changes.hook_torchscript()
    # From here on nothing is imported.
    replaced: dict[str, types.ModuleType] = {}
    for theirs, module in ours.items():
        replaced |= _replace(changes, theirs, module)
    changes.add_finder(_AliasFinder())
    _rebind(changes, replaced)
    changes.set(torch.futures, "wait_all", wait_all)
    for owner in (torch.distributed, torch.distributed.distributed_c10d):
        changes.set(owner, "monitored_barrier", monitored_barrier)
    _replace_class(changes, torch.nn.parallel.DistributedDataParallel, parallel.DistributedDataParallel)


def _exists(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _replace(changes: _Changes, theirs: str, ours: types.ModuleType) -> dict[str, types.ModuleType]:
    """Register our module and its submodules under their name; returns their modules by name."""
    # All of their modules are removed, also those without a counterpart here: a mixture would not work.
    replaced: dict[str, types.ModuleType] = {}
    for name in list(sys.modules):
        if _within(name, theirs):
            module = changes.set_module(name, None)
            if module is not None:
                replaced[name] = module
    for name, module in list(sys.modules.items()):
        if _within(name, ours.__name__):
            changes.set_module(theirs + name.removeprefix(ours.__name__), module)
    parent, _, name = theirs.rpartition(".")
    changes.set(sys.modules[parent], name, ours)
    return replaced


def _replace_class(changes: _Changes, theirs: type, ours: type) -> None:
    """Replace a class wherever torch's modules refer to it; the rest of its module stays torch's."""
    for name, found in list(sys.modules.items()):
        if _within(name, "torch") and getattr(found, "__dict__", {}).get(theirs.__name__) is theirs:
            changes.set(found, theirs.__name__, ours)


def _rebind(changes: _Changes, replaced: dict[str, types.ModuleType]) -> None:
    """Point names that torch's own modules imported from the replaced modules at ours.

    For example, ``torch.nn.parallel.distributed`` and ``torch.jit.annotations`` have imported ``RRef`` by the time
    ``import torch`` returns.
    """
    # Keyed by the id of the old object. The old object is kept in the value, so that its id is not reused.
    ours: dict[int, tuple[object, object]] = {}
    for name, module in replaced.items():
        new = sys.modules.get(name)
        if new is None:
            continue
        ours[id(module)] = (module, new)
        for attribute, value in vars(module).items():
            # Only what the module defines (classes, functions, instances of its classes), not what it imports.
            owner = getattr(value, "__module__", None)
            own = isinstance(owner, str) and any(_within(owner, known) for known in _OWNERS)
            if own and hasattr(new, attribute):
                ours[id(value)] = (value, getattr(new, attribute))
    for name, module in list(sys.modules.items()):
        if not _within(name, "torch") or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in ours:
                changes.set(module, attribute, ours[id(value)][1])


def __dir__() -> list[str]:
    return __all__
