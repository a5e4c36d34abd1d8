"""Runs the blocks of a program on one worker, real or simulated, and registers its hooks on tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tests.autograd.oracle.operators import compute
from tests.autograd.oracle.program import Leaf, Program

Tensor = torch.Tensor


class Interpreter:
    """One worker's part in a program. Subclasses say how calls are made."""

    def __init__(self, program: Program, rank: int, hooked: bool = True) -> None:
        self.program = program
        self.rank = rank
        self.leaves: dict[int, Tensor] = {}
        self.log: list[Call] = []
        self.retained: dict[Retained, Tensor | None] = {}
        self.kept: list[Any] = []
        self.keeps_nodes = False
        self._hooked = hooked
        self._lock = threading.Lock()

    # How calls are made. Values are tensors and references.

    def call(self, worker: int, block: int, packing: str, values: list[Any]) -> list[Any]:
        raise NotImplementedError

    def start(self, worker: int, block: int, packing: str, values: list[Any]) -> Any:
        raise NotImplementedError

    def wait(self, handle: Any) -> list[Any]:
        raise NotImplementedError

    def remote(self, worker: int, block: int, packing: str, values: list[Any]) -> Any:
        raise NotImplementedError

    def here(self, reference: Any) -> list[Any]:
        raise NotImplementedError

    def owned(self, reference: Any) -> list[Any]:
        raise NotImplementedError

    def wrap(self, values: list[Any]) -> Any:
        raise NotImplementedError

    # Shared by all subclasses

    def leaf(self, number: int) -> Tensor:
        with self._lock:  # concurrent calls may use it
            if number not in self.leaves:
                leaf = self.program.leaves[number]
                made = make_leaf(leaf, self.program, number)
                if self.keeps_nodes:
                    # Torch can deadlock if two threads use a leaf whose node no graph refers to (docs/autograd.md).
                    self.kept.append((-1, made.view_as(made)))
                self.leaves[number] = made
                if self._hooked:
                    for hook, kind, factor in leaf.hooks:
                        register(made, kind, hook, factor, self.log, self.kept)
            return self.leaves[number]

    def take_retained(self, passes: int) -> None:
        """Note the gradients that tensors retain after so many passes, so that the next pass begins with none."""
        for hook, tensor in self.kept:
            if hook >= 0:
                self.retained[Retained(hook, passes)] = None if tensor.grad is None else tensor.grad.detach()
        for hook, tensor in self.kept:  # two hooks may be of one tensor
            if hook >= 0:
                tensor.grad = None

    def run(self, block: int, values: Sequence[Any]) -> list[Any]:
        code = self.program.blocks[block]
        registers: dict[int, Any] = dict(enumerate(values))
        for kind, sets, reads, more in code.steps:
            results = self.step(kind, [registers[r] for r in reads], more)
            registers.update(zip(sets, results, strict=True))
        return [registers[r] for r in code.outputs]

    def step(self, kind: str, values: list[Any], more: Any) -> Sequence[Any]:
        if kind == "op":
            return compute(more[0], values, more[1])
        if kind == "leaf":
            return (self.leaf(more),)
        if kind == "hook":
            if self._hooked:
                number, hook, factor = more
                register(values[0], hook, number, factor, self.log, self.kept)
            return ()
        if kind == "call":
            return self.call(*more, values)
        if kind == "start":
            return (self.start(*more, values),)
        if kind == "wait":
            return self.wait(values[0])
        if kind == "remote":
            return (self.remote(*more, values),)
        if kind == "here":
            return self.here(values[0])
        if kind == "owned":
            return self.owned(values[0])
        if kind == "wrap":
            return (self.wrap(values),)
        if kind == "const":
            return tuple(torch.ones(shape, dtype=torch.float64) for shape in more)
        assert kind == "off", kind
        with torch.no_grad():
            return self.run(more, values)


def make_leaf(leaf: Leaf, program: Program, number: int) -> Tensor:
    source = torch.Generator().manual_seed(program.seed * 1000 + number)
    shape = leaf.shape[::-1] if leaf.kind == "turned" else leaf.shape
    if program.exact:
        value = torch.randint(-2, 3, shape, generator=source).double()
    else:
        value = torch.randn(shape, generator=source, dtype=torch.float64)
    if leaf.kind == "turned":
        value = value.permute(tuple(reversed(range(len(shape)))))
    if leaf.kind == "single":
        value = value.float()
    return torch.nn.Parameter(value) if leaf.kind == "parameter" else value.requires_grad_()


def as_result(values: list[Any]) -> Any:
    """The return value of a function with these results: a single one is returned without a list."""
    return values[0] if len(values) == 1 else values


def as_list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [value[key] for key in sorted(value)]
    return list(value) if isinstance(value, list | tuple) else [value]


def scalar_of(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """A scalar to differentiate again, of the gradients that have a graph. Scaled, so that numbers stay small."""
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is None or not gradient.requires_grad or not gradient.numel():
            continue
        dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        if dense.is_complex():
            dense = torch.view_as_real(dense.resolve_conj())
        scaled = dense.double() / (1 + dense.detach().abs().max().double())
        term = (scaled * scaled + scaled).sum()
        total = term if total is None else total + term
    return total


class Retained(NamedTuple):
    """Where a gradient was retained: by which hook, and after how many passes."""

    hook: int
    passes: int


# A factor of 0 means that the hook leaves the gradient as it is.
ON_LEAVES = ("tensor", "before", "after", "accumulated")
ON_RESULTS = ("tensor", "before", "after", "retain")
ON_RECEIVED = ("received", "retain")  # in one process these are different nodes

_RAMP = torch.arange(1, 5000, dtype=torch.float64)


class Call(NamedTuple):
    """One call of a hook: which, what it saw (None for an undefined gradient), and whether grad was enabled."""

    hook: int
    seen: tuple[float | None, ...]
    grad_enabled: bool


def print_of(gradient: Tensor | None) -> float | None:
    """A number that is different for different gradients, almost certainly."""
    if gradient is None:
        return None
    with torch.no_grad():
        dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        if dense.is_complex():
            dense = torch.view_as_real(dense.resolve_conj())
        flat = dense.reshape(-1).double()
        return float(flat @ _RAMP[: flat.numel()])


def register(tensor: Tensor, kind: str, number: int, factor: int, log: list[Call], kept: list[Any]) -> None:
    """Register a hook on a tensor, or on its node."""

    def note(*gradients: Tensor | None) -> None:
        log.append(Call(number, tuple(map(print_of, gradients)), torch.is_grad_enabled()))

    def scaled(gradients: tuple[Tensor | None, ...]) -> Any:
        note(*gradients)
        return tuple(None if g is None else g * factor for g in gradients) if factor else None

    def on_tensor(gradient: Tensor | None) -> Any:
        note(gradient)
        return gradient * factor if factor and gradient is not None else None

    # Torch crashes if, while it registers a hook on a view, it finds that the base was changed in place.
    _ = tensor.grad_fn
    if kind == "tensor":
        tensor.register_hook(on_tensor)
    elif kind == "received":
        # If only some tensors of a message are used, the hooks of the others see None.
        tensor.register_hook(lambda gradient: None if gradient is None else on_tensor(gradient))
    elif kind == "accumulated":
        tensor.register_post_accumulate_grad_hook(lambda _: note())
    elif kind == "retain":
        tensor.retain_grad()
        kept.append((number, tensor))
    else:
        node = torch.autograd.graph.get_gradient_edge(tensor).node
        kept.append((-1, node))  # keeps the node of a leaf alive
        if kind == "before":
            node.register_prehook(scaled)
        else:
            node.register_hook(_after(scaled, note))


def _after(scaled: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    def hook(results: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]) -> Any:
        if not results:  # a leaf's node has no results
            return note(*gradients)
        return scaled(results)

    return hook
