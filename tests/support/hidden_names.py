"""How farprop behaves with a torch that lacks a name.

``python -m tests.support.hidden_names 0 2`` imports torch once, and forks a child for each name that ``farprop._torch``
looks up; or for every second one, from the first. The child hides the name and imports farprop. Then it restores the
name, because torch itself may need it. It writes the outcome as JSON, one ``Outcome`` per line.
"""

from __future__ import annotations

import gc
import importlib
import json
import operator
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn

MODULES = ("rpc", "autograd", "nn", "nn.parallel", "optim", "distributed", "jit", "compat")

# Modules that a future torch may remove as a whole.
WHOLE_MODULES = (
    "torch.jit",
    "torch._jit_internal",
    "torch._sources",
    "torch.autograd.profiler_legacy",
    "torch.distributed.nn",
    "torch.distributed.remote_device",
    "torch.distributed.rpc",
    "torch.utils._pytree",
)


@dataclass
class Outcome:
    """The result of a child."""

    name: str
    warnings: list[tuple[str, str]]  # classes and texts, of the imports and of install()
    uses: dict[str, str]  # for each use that was tried, "" or the error


class _Gone:
    """A missing attribute: it hides that of a base class that can't be changed."""

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        raise AttributeError("hidden")


class _Without:
    """A C++ object without one of its attributes."""

    def __init__(self, whole: object, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError("hidden")
        return getattr(self._whole, name)


@contextmanager
def hidden(path: str) -> Iterator[None]:
    """Hide a name of torch, which may be a module."""
    parent, _, name = path.rpartition(".")
    owner = _found(parent)
    module = sys.modules.get(path)
    if module is not None:
        sys.modules[path] = None  # type: ignore[assignment]
    above, _, own = parent.rpartition(".")
    # From the dictionary of the owner, so that a method is not bound.
    before = vars(owner).get(name) if hasattr(owner, "__dict__") else None
    if isinstance(owner, type):
        setattr(owner, name, _Gone())
    elif before is not None:
        delattr(owner, name)
    else:
        setattr(_found(above), own, _Without(owner, name))
    try:
        yield
    finally:
        if before is not None:
            setattr(owner, name, before)
        elif isinstance(owner, type):
            delattr(owner, name)
        else:
            setattr(_found(above), own, owner)
        if module is not None:
            sys.modules[path] = module


def _found(path: str) -> Any:
    return operator.attrgetter(path.partition(".")[2])(torch) if "." in path else torch


def look(name: str) -> Outcome:
    """Import and use farprop without this name. Can be called once per process."""
    with warnings.catch_warnings(record=True) as seen, hidden(name):
        warnings.simplefilter("always")
        for module in MODULES:
            importlib.import_module(f"farprop.{module}")
        importlib.import_module("farprop.compat").install()
    texts = [(warning.category.__name__, str(warning.message)) for warning in seen]
    return Outcome(name, texts, _use())


def _use() -> dict[str, str]:
    import farprop.rpc as rpc

    uses = {}
    with tempfile.TemporaryDirectory() as directory:
        store = dist.FileStore(f"{directory}/store", 1)
        options = rpc.TensorPipeRpcBackendOptions(init_method=store)
        rpc.init_rpc("self", rank=0, world_size=1, rpc_backend_options=options)
        dist.init_process_group("farprop", store=dist.PrefixStore("group", store), rank=0, world_size=1)
        for use in (_backward, _train, _remote_module):
            uses[use.__name__.strip("_")] = _error_of(use)
        dist.destroy_process_group()
        rpc.shutdown()
    return uses


def _error_of(use: Callable[[], None]) -> str:
    try:
        use()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _backward() -> None:
    import farprop.autograd as dist_autograd
    import farprop.rpc as rpc

    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        future = rpc.rpc_async("self", torch.mul, (x, 3))
        loss = (future.wait() + rpc.remote("self", torch.add, (x.view(2), 1)).to_here()).sum()
        dist_autograd.backward(context_id, [loss])
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [4.0, 4.0]
    try:
        rpc.rpc_async("self", operator.truediv, (1, 0)).wait()
    except ZeroDivisionError:
        return
    raise AssertionError("it did not raise")


def _train() -> None:
    from farprop.nn.parallel import DistributedDataParallel

    module = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    module(torch.arange(6.0).view(3, 2)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def _remote_module() -> None:
    from farprop.nn import RemoteModule

    assert RemoteModule("self/cpu", torch.nn.Linear, (2, 3))(torch.ones(1, 2)).shape == (1, 3)


def _run_in_child(run: Callable[[], Any]) -> Any:
    """Run a function in a fork of this process; returns its result."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as file:
                json.dump(run(), file)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"a child ended with {os.waitstatus_to_exitcode(status)}")
    return json.loads(text)


def _names_and_imports() -> list[list[str]]:
    for module in MODULES:
        importlib.import_module(f"farprop.{module}")
    names = list(importlib.import_module("farprop._torch").names)
    return [names, [name for name in sys.modules if not name.startswith(("farprop", "torch"))]]


def main() -> None:
    """Try every name."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        # The first child compiles farprop for the others. Not in the environment: torch would be compiled, too.
        sys.pycache_prefix, sys.dont_write_bytecode = directory, False
        names, others = _run_in_child(_names_and_imports)
        for name in others:  # so that children start fast
            if name not in sys.modules:
                importlib.import_module(name)
        gc.collect()
        gc.freeze()  # a collection over all of torch takes longer than everything else in a child
        first, step = map(int, sys.argv[1:])
        for name in [*names, *WHOLE_MODULES][first::step]:
            print(json.dumps(_run_in_child(lambda name=name: asdict(look(name)))), flush=True)


if __name__ == "__main__":
    main()
