"""The side that a process of a benchmark belongs to: the modules of torch.distributed, or of farprop."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.nn import Module


class Api:
    """The modules of one side: `torch.distributed`'s or `farprop`'s."""

    def __init__(self, package: str) -> None:
        self.package = package

    @cached_property
    def rpc(self) -> ModuleType:
        return importlib.import_module(f"{self.package}.rpc")

    @cached_property
    def autograd(self) -> ModuleType:
        return importlib.import_module(f"{self.package}.autograd")

    @cached_property
    def optim(self) -> ModuleType:
        return importlib.import_module(f"{self.package}.optim")

    @cached_property
    def nn(self) -> ModuleType:
        return importlib.import_module(f"{self.package}.nn")

    @cached_property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all ranks: a new one on farprop's backend, or None for the default group on Gloo."""
        if self.package != "farprop":
            return None
        importlib.import_module("farprop.distributed")  # registers the backend
        made: dist.ProcessGroup = dist.new_group(backend="farprop")
        return made

    @cached_property
    def data_parallel(self) -> type[Module]:
        package = "farprop" if self.package == "farprop" else "torch"
        found: type[Module] = importlib.import_module(f"{package}.nn.parallel").DistributedDataParallel
        return found


class Side:
    """For functions that run on other workers. ``api`` is None in a process that makes no calls."""

    api: Api | None = None

    @property
    def rpc(self) -> ModuleType:
        if self.api is None:
            raise RuntimeError("this process makes no calls")
        return self.api.rpc

    def async_execution(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function that returns a future. In a process that makes no calls, it stays as it is."""
        return function if self.api is None else self.rpc.functions.async_execution(function)


side = Side()
