"""Run code written for ``torch.distributed.rpc`` on farprop, without touching it.

``farprop.compat.install()`` at the top of a script, or ``python -m farprop.compat script.py``, makes
``torch.distributed.rpc``, ``torch.distributed.autograd``, ``torch.distributed.nn.RemoteModule``,
``torch.distributed.optim.DistributedOptimizer`` and ``torch.nn.parallel.DistributedDataParallel`` stand for farprop's
in this process. What your own modules took from torch before ``install()`` stays torch's, so call it first.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import types
from collections.abc import Sequence
from typing import Final

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


def install() -> None:
    """Make ``torch.distributed.rpc``, ``autograd``, ``nn.RemoteModule`` and ``optim.DistributedOptimizer`` farprop's.

    So are ``torch.nn.parallel.DistributedDataParallel``, ``torch.futures.wait_all`` and
    ``torch.distributed.monitored_barrier``. A second call does nothing.
    """
    global _installed
    with _lock:
        if _installed:
            return
        # Optimizers and torch.compile end up importing this, and it takes private names from the RPC when it
        # is imported. Import it while it finds all of torch's; what it took is made ours below.
        importlib.import_module("torch.distributed.nn")
        replaced: dict[str, types.ModuleType] = {}
        for theirs, ours in _REPLACEMENTS.items():
            # What is in a package that nobody has imported yet is found by the finder when somebody does:
            # torch.distributed.optim takes seconds to import, and most programs don't need it.
            if _exists(ours) and theirs.rpartition(".")[0] in sys.modules:
                replaced |= _replace(theirs, importlib.import_module(ours))
        sys.meta_path.insert(0, _AliasFinder())
        _rebind(replaced)
        torch.futures.wait_all = wait_all
        torch.distributed.monitored_barrier = torch.distributed.distributed_c10d.monitored_barrier = monitored_barrier
        # By its name: it is a layer above, and is there to change what torch.jit.script does.
        importlib.import_module("farprop.jit")
        _replace_class(torch.nn.parallel.DistributedDataParallel, "farprop.nn.parallel")
        _installed = True


def _exists(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _replace(theirs: str, ours: types.ModuleType) -> dict[str, types.ModuleType]:
    """Put our module, and those in it if it is a package, under their name; return their modules by name."""
    # All of their modules go, also those we have no counterpart of: half torch, half farprop helps nobody.
    replaced = {name: sys.modules.pop(name) for name in list(sys.modules) if _within(name, theirs)}
    for name, module in list(sys.modules.items()):
        if _within(name, ours.__name__):
            sys.modules[theirs + name.removeprefix(ours.__name__)] = module
    parent, _, name = theirs.rpartition(".")
    setattr(sys.modules[parent], name, ours)
    return replaced


def _replace_class(theirs: type, module: str) -> None:
    """Put our class of that name where torch's modules have theirs; the module that theirs is from has other things."""
    ours = getattr(importlib.import_module(module), theirs.__name__)
    for name, found in list(sys.modules.items()):
        if _within(name, "torch") and getattr(found, "__dict__", {}).get(theirs.__name__) is theirs:
            setattr(found, theirs.__name__, ours)


def _rebind(replaced: dict[str, types.ModuleType]) -> None:
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
                setattr(module, attribute, ours[id(value)][1])
