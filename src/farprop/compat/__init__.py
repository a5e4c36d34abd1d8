"""Run code written for ``torch.distributed.rpc`` on farprop, without touching it.

``farprop.compat.install()`` at the top of a script, or ``python -m farprop.compat script.py``, makes
``torch.distributed.rpc``, ``torch.distributed.autograd``, ``torch.distributed.nn.RemoteModule``,
``torch.distributed.optim.DistributedOptimizer`` and ``torch.nn.parallel.DistributedDataParallel`` stand for farprop's
in this process. What your own modules took from torch before ``install()`` stays torch's, so call it first.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed
import torch.futures

from farprop.compat.barriers import monitored_barrier
from farprop.compat.futures import wait_all

__all__ = ["install"]

# What farprop does not have is left to torch. The rest of torch.distributed.nn and torch.distributed.optim is about
# process groups, and stays torch's.
_REPLACEMENTS: Final = {
    "torch.distributed.rpc": "farprop.rpc",
    "torch.distributed.autograd": "farprop.autograd",
    "torch.distributed.nn.api.remote_module": "farprop.nn.remote_module",
    "torch.distributed.optim.optimizer": "farprop.optim.optimizer",
}

# Where torch's own names of these modules come from: the modules, and the C++ modules under them.
_OWNERS: Final = (*_REPLACEMENTS, "torch._C._distributed_rpc", "torch._C._distributed_autograd")
_NOTHING: Final = object()
_lock: Final = threading.Lock()
_installed = False


class _AliasLoader(importlib.abc.Loader):
    """Gives the import system a module that already exists under another name."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        # The import system has just written the alias over the module's own spec.
        module.__spec__ = self._spec


class _AliasFinder(importlib.abc.MetaPathFinder):
    """Finds ``torch.distributed.rpc.x`` as ``farprop.rpc.x``, on demand.

    On demand because importing some submodules has effects (``_testing`` registers a backend), and because
    without this Python would load ``farprop/rpc/x.py`` a second time under torch's name.
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
    """What was changed in torch and in the import system, so that it can be undone."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute."""
        old = vars(owner).get(name, _NOTHING)
        self._made(lambda: vars(owner).pop(name, None) if old is _NOTHING else setattr(owner, name, old))
        setattr(owner, name, value)

    def set_module(self, name: str, module: types.ModuleType | None) -> types.ModuleType | None:
        """Put a module under a name, or take away what is there; returns what was there."""
        old = sys.modules.pop(name, None)
        self._made(lambda: sys.modules.pop(name, None) if old is None else sys.modules.update({name: old}))
        if module is not None:
            sys.modules[name] = module
        return old

    def find_with(self, finder: importlib.abc.MetaPathFinder) -> None:
        """Have modules looked for here first."""
        self._made(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)
        sys.meta_path.insert(0, finder)

    def teach_torchscript(self) -> None:
        """Put farprop's hooks into TorchScript, if that can be done."""
        # By its name: it is a layer above.
        was_there = "farprop.jit" in sys.modules
        jit = importlib.import_module("farprop.jit")
        if jit._install() or not was_there:
            self._made(jit._uninstall)

    def _made(self, undo: Callable[[], object]) -> None:
        # Before the change itself: an interrupt may come between the two, and to undo what was not done is harmless.
        self._undo.append(undo)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()


def install() -> None:
    """Make ``torch.distributed.rpc``, ``autograd``, ``nn.RemoteModule`` and ``optim.DistributedOptimizer`` farprop's.

    So are ``torch.nn.parallel.DistributedDataParallel``, ``torch.futures.wait_all`` and
    ``torch.distributed.monitored_barrier``. A second call does nothing. If it raises, torch is as it was.
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
    # Optimizers and torch.compile end up importing this, and it takes private names from the RPC when it is imported.
    # Import it while it finds all of torch's; what it took is made ours below.
    with contextlib.suppress(ImportError):  # of a torch without it, which then nobody imports
        importlib.import_module("torch.distributed.nn")
    # What is in a package that nobody has imported yet is found by the finder when somebody does:
    # torch.distributed.optim takes seconds to import, and most programs don't need it.
    ours = {
        theirs: importlib.import_module(name)
        for theirs, name in _REPLACEMENTS.items()
        if _exists(name) and theirs.rpartition(".")[0] in sys.modules
    }
    parallel = importlib.import_module("farprop.nn.parallel")
    changes.teach_torchscript()
    # Nothing below imports anything.
    replaced: dict[str, types.ModuleType] = {}
    for theirs, module in ours.items():
        replaced |= _replace(changes, theirs, module)
    changes.find_with(_AliasFinder())
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
    """Put our module, and those in it if it is a package, under their name; return their modules by name."""
    # All of their modules go, also those we have no counterpart of: half torch, half farprop helps nobody.
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
    """Put our class where torch's modules have theirs; the module that theirs is from has other things."""
    for name, found in list(sys.modules.items()):
        if _within(name, "torch") and getattr(found, "__dict__", {}).get(theirs.__name__) is theirs:
            changes.set(found, theirs.__name__, ours)


def _rebind(changes: _Changes, replaced: dict[str, types.ModuleType]) -> None:
    """Point the names that torch's own modules took from the replaced modules at ours.

    ``torch.nn.parallel.distributed`` and ``torch.jit.annotations``, for two, have taken ``RRef`` by the time
    ``import torch`` returns.
    """
    # The value keeps its old owner next to it, so that no id is reused while we look.
    ours: dict[int, tuple[object, object]] = {}
    for name, module in replaced.items():
        new = sys.modules.get(name)
        if new is None:
            continue
        ours[id(module)] = (module, new)
        for attribute, value in vars(module).items():
            # Only what is the module's own (classes, functions, instances of its classes), not its imports.
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
