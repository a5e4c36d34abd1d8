"""The cases, one file per subject. A file registers its cases with `@case` and is imported at the end.

The function of a case gets the side's `Api` and the name of the other worker, if there is one. It checks one result, so
that a wrong answer is never timed, and returns a function that takes one sample.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType

import torch.distributed as dist
from torch.nn import Module

Sample = Callable[[], object]


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


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    label: str
    goal: float
    """torch's time over ours that we want to reach."""
    prepare: Callable[[Api, str], Sample]
    samples: int
    """Samples in each round, unless its time is over before."""
    warmup: int
    """Samples before each round that don't count."""
    calls: int
    """Calls in one sample; times are reported per call."""
    env: Mapping[str, str] = field(default_factory=dict)
    """For farprop's processes; cases with another environment run in other processes."""
    floor: str = ""
    """The bare ping-pong to compare with, if any."""
    ranks: int = 0
    """The size of the process group that runs it; 0 for two RPC workers."""
    against: Mapping[str, str] | None = None
    """Compare with farprop itself, in this environment, and not with torch."""


CASES: dict[str, Case] = {}


def case(
    name: str,
    label: str,
    *,
    goal: float,
    samples: int,
    warmup: int,
    calls: int = 1,
    env: Mapping[str, str] | None = None,
    floor: str = "",
    ranks: int = 0,
    against: Mapping[str, str] | None = None,
) -> Callable[[Callable[[Api, str], Sample]], Callable[[Api, str], Sample]]:
    """Register the decorated function as a case."""

    def register(prepare: Callable[[Api, str], Sample]) -> Callable[[Api, str], Sample]:
        if name in CASES:
            raise ValueError(f"two cases are named {name!r}")
        CASES[name] = Case(name, label, goal, prepare, samples, warmup, calls, env or {}, floor, ranks, against)
        return prepare

    return register


# The order of these is the order of the table.
for _family in ("calls", "security", "autograd", "script", "groups"):
    importlib.import_module(f"{__name__}.{_family}")
