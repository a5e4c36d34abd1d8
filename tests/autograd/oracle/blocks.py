"""Makes one block: the steps of a worker in a call, and the blocks of the calls that it makes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.autograd.oracle.choices import EXACT, ROUNDED
from tests.autograd.oracle.interpreter import ON_LEAVES, ON_RECEIVED, ON_RESULTS
from tests.autograd.oracle.local import LocalInterpreter, LocalReference
from tests.autograd.oracle.operators import IN_PLACE, compute
from tests.autograd.oracle.program import Block, Leaf, Step

Tensor = torch.Tensor
_LARGEST = {True: 40.0, False: 10.0}  # by is_exact: numbers stay small, so that sums stay exact
_WITH_NONE = ("silent", "picky")  # programs with these are compared less strictly
_PACKINGS = ("plain", "plain", "plain", "list", "dict", "names", "closure")


@dataclass
class Plan:
    """What all blocks of a program share while it is made."""

    rng: random.Random
    workers: int
    is_exact: bool
    is_tidy: bool  # everything is used, as FAST needs it
    hook_rate: float
    call_rate: float
    budget: int
    has_big: bool
    has_none: bool
    interpreters: list[LocalInterpreter] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    hooks: int = 0

    def hook(self, kinds: tuple[str, ...]) -> tuple[int, str, int]:
        self.hooks += 1
        return self.hooks, self.rng.choice(kinds), self.rng.choice((0, 0, 2, -1))


class BlockMaker:
    """Makes a block. It may change the values of a message in place, unless they share memory with each other."""

    def __init__(self, plan: Plan, worker: int, values: list[Any], depth: int, frozen: Iterable[int] = ()) -> None:
        self.plan = plan
        self.worker = worker
        self.registers: dict[int, Any] = dict(enumerate(values))
        self._inputs = len(values)
        self._depth = depth
        self._steps: list[Step] = []
        self._used: set[int] = set()
        self._frozen = set(frozen)
        self._shared = set(frozen)  # may share memory on a worker, though not in one process
        self._handles: dict[int, set[int]] = {}  # calls without a wait, and which of their values to freeze
        self._received = set(range(self._inputs))
        self._taken: set[int] = set()  # references whose values were taken here

    # The values

    def tensors(self) -> dict[int, Tensor]:
        return {r: v for r, v in self.registers.items() if isinstance(v, Tensor)}

    def differentiable(self) -> list[int]:
        return [r for r, v in self.tensors().items() if v.requires_grad]

    def _references(self) -> list[int]:
        return [r for r, v in self.registers.items() if isinstance(v, LocalReference)]

    def block(self, outputs: list[int]) -> Block:
        return Block(self._inputs, tuple(self._steps), tuple(outputs))

    # Adding steps

    def fill(self) -> None:
        rng, plan = self.plan.rng, self.plan
        self._leaf()
        for _ in range(rng.randint(3, 20 if self._depth == 0 else 9)):
            if plan.budget <= 0:
                break
            plan.budget -= 1
            if rng.random() < 0.1:
                self._leaf()
            elif rng.random() < plan.call_rate and self._depth < 4:
                self._call()
            elif self._references() and rng.random() < 0.4:
                self._use_reference(rng.choice(self._references()))
            elif self._handles and rng.random() < 0.4:
                self._wait(rng.choice(list(self._handles)))
            elif rng.random() < 0.05 and not plan.is_tidy:
                self._off()
            elif rng.random() < 0.06:
                self._wrap()
            else:
                self._op()
            if rng.random() < plan.hook_rate:
                self._hook()
        for handle in list(self._handles):  # without a wait, the call could overlap with the passes
            self._wait(handle)
        for reference in self._references():
            if plan.is_tidy and reference not in self._taken:  # other blocks may have it without using it
                self._use_reference(reference)

    def _step(self, kind: str, reads: tuple[int, ...], more: Any) -> list[int]:
        """Add a step to the program, and run it here."""
        values = self.plan.interpreters[self.worker].step(kind, [self.registers[r] for r in reads], more)
        return self._record(kind, reads, more, values)

    def _record(self, kind: str, reads: tuple[int, ...], more: Any, values: Any) -> list[int]:
        sets = [len(self.registers) + i for i in range(len(values))]
        self.registers.update(zip(sets, values, strict=True))
        self._steps.append((kind, tuple(sets), reads, more))
        self._used.update(reads if kind != "hook" else ())
        return sets

    def _leaf(self) -> None:
        rng, plan = self.plan.rng, self.plan
        mine = [number for number, leaf in enumerate(plan.leaves) if leaf.worker == self.worker]
        if not mine or rng.random() < 0.4:
            shape: tuple[int, ...] = rng.choice([(2, 3), (3, 2), (3, 3), (3,), (), (2, 2), (1, 3), (2, 1, 3)])
            if plan.has_big and rng.random() < 0.3:
                shape = (70, 70)  # too large for a message's head
            kind = rng.choice(("tensor", "tensor", "parameter", "turned", "single"))
            count = rng.choice((1, 1, 2, 4)) if rng.random() < plan.hook_rate else 0
            hooks = tuple(plan.hook(ON_LEAVES) for _ in range(count))
            mine = [len(plan.leaves)]
            plan.leaves.append(Leaf(self.worker, shape, kind, rng.random() < 0.3, hooks))
            for interpreter in plan.interpreters:
                interpreter.program = interpreter.program._replace(leaves=tuple(plan.leaves))
        (register,) = self._step("leaf", (), rng.choice(mine))
        self._frozen.add(register)

    def _op(self) -> None:
        rng, plan = self.plan.rng, self.plan
        table = EXACT if plan.is_exact else ROUNDED
        tensors = self.tensors()
        for name in rng.sample(list(table), 8):
            choice = table[name](rng, tensors)
            if name in _WITH_NONE and not plan.has_none:
                continue
            if (plan.is_tidy and name == "detach") or choice is None or not self._is_sound(name, *choice):
                continue
            reads, parameters = choice
            try:
                results = self._step("op", reads, (name, parameters))
            except RuntimeError:
                continue  # torch refuses changes in place of some views, and their use after one
            self._freeze_aliases(results)
            return

    def _is_sound(self, name: str, reads: tuple[int, ...], parameters: tuple[Any, ...]) -> bool:
        """Whether the results are of reasonable size, and only tensors that may be changed are changed."""
        limit = _LARGEST[self.plan.is_exact]
        if name in IN_PLACE:
            x = self.registers[reads[0]]
            return reads[0] not in self._frozen and is_dense(x) and float(x.detach().abs().max()) <= limit / 2
        with torch.no_grad():
            results = compute(name, [self.registers[r].clone() for r in reads], parameters)
        return all(r.numel() < 10_000 and (not r.numel() or float(r.abs().max()) <= limit) for r in results)

    def _freeze_aliases(self, results: list[int]) -> None:
        kept = {storage_ptr(self.registers[r]) for r in self._frozen if isinstance(self.registers[r], Tensor)}
        self._frozen.update(r for r in results if storage_ptr(self.registers[r]) in kept)
        shared = {storage_ptr(self.registers[r]) for r in self._shared if isinstance(self.registers[r], Tensor)}
        self._shared.update(r for r in results if storage_ptr(self.registers[r]) in shared)

    def _freeze(self, registers: Iterable[int]) -> None:
        """Nothing that shares memory with these may be changed in place from now on."""
        self._frozen.update(registers)
        self._freeze_aliases(list(self.tensors()))

    # Hooks

    def _hook(self) -> None:
        candidates = [r for r in self.differentiable() if self.registers[r].grad_fn is not None]
        if not candidates:
            return
        register = self.plan.rng.choice(candidates)
        # By the tensor, because some operators return their argument, such as flatten().
        is_received = any(self.registers[r] is self.registers[register] for r in self._received)
        hook = self.plan.hook(ON_RECEIVED if is_received else ON_RESULTS)
        self._steps.append(("hook", (), (register,), hook))
        if hook[1] == "retain":
            self._freeze([register])  # torch fails if it is not the first output of its node

    # Calls

    def _call(self, to_scalar: bool = False) -> int | None:
        """A call of a new block. ``to_scalar`` makes it a remote one, whose value can be the root of a pass."""
        rng, plan = self.plan.rng, self.plan
        kind = "remote" if to_scalar else rng.choice(("call", "call", "start", "remote"))
        if not torch.is_grad_enabled():
            kind = "call"
        worker = rng.randrange(plan.workers)
        reads = self._some(rng.randint(0, 5))
        values = [self.registers[r] for r in reads]
        inner = BlockMaker(
            plan,
            worker,
            plan.interpreters[self.worker].copied(values, as_sent=True),
            self._depth + 1,
            self.entangled(reads),
        )
        number = len(plan.blocks)
        plan.blocks.append(Block(0, (), ()))
        with torch.enable_grad():
            inner.fill()
            outputs = inner.results(to_scalar)
        if not outputs:
            return None
        plan.blocks[number] = inner.block(outputs)
        results = [inner.registers[r] for r in outputs]
        more = (worker, number, rng.choice(_PACKINGS))
        if kind == "remote":
            self._freeze(reads)  # the call may run concurrently
            (reference,) = self._record(kind, reads, more, [LocalReference(worker, results)])
            return reference
        copies = plan.interpreters[self.worker].copied(results)
        if kind == "start":
            self._freeze(reads)
            (handle,) = self._record(kind, reads, more, [copies])
            self._handles[handle] = inner.entangled(outputs)
        else:
            self._arrived(self._record(kind, reads, more, copies), inner.entangled(outputs))
        return None

    def entangled(self, registers: Sequence[int]) -> set[int]:
        """Indices of these registers whose values can't be changed alone at the other end of a message."""
        found = entangled([self.registers[r] for r in registers])
        return found | {index for index, r in enumerate(registers) if r in self._shared}

    def _some(self, count: int) -> tuple[int, ...]:
        rng = self.plan.rng
        pool = [r for r in self.registers if not isinstance(self.registers[r], list)]
        # Prefers unused values, so that chains get long.
        unused = [r for r in pool if r not in self._used] if rng.random() < 0.7 else []
        return tuple(rng.choice(unused or pool) for _ in range(count))

    def _arrived(self, sets: list[int], frozen: set[int]) -> None:
        self._received.update(sets)
        self._frozen.update(sets[index] for index in frozen)
        self._shared.update(sets[index] for index in frozen)

    def _wait(self, handle: int) -> None:
        self._arrived(self._record("wait", (handle,), None, self.registers[handle]), self._handles.pop(handle))

    def _use_reference(self, register: int) -> None:
        is_mine = self.registers[register].owner == self.worker
        kind = "owned" if is_mine and self.plan.rng.random() < 0.7 else "here"
        sets = self._step(kind, (register,), None)
        self._taken.add(register)
        self._received.update(sets)
        self._shared.update(sets)
        self._freeze(sets)

    def _wrap(self) -> None:
        reads = tuple(r for r in self._some(self.plan.rng.randint(1, 2)) if isinstance(self.registers[r], Tensor))
        if reads:
            self._freeze(reads)
            self._step("wrap", reads, None)

    def _off(self) -> None:
        """Add a block that runs here with grad off."""
        reads = self._some(self.plan.rng.randint(1, 3))
        inner = BlockMaker(self.plan, self.worker, [self.registers[r] for r in reads], self._depth, range(len(reads)))
        number = len(self.plan.blocks)
        self.plan.blocks.append(Block(0, (), ()))
        with torch.no_grad():
            inner.fill()
        outputs = inner.results()
        self.plan.blocks[number] = inner.block(outputs)
        sets = self._record("off", reads, number, [inner.registers[r] for r in outputs])
        self._shared.update(sets)
        self._freeze(sets)

    # Results

    def results(self, to_scalar: bool = False) -> list[int]:
        rng = self.plan.rng
        if self.plan.is_tidy:
            tied = self._tied()
            return list(self._some(1)) if tied is None else [tied]
        if to_scalar:
            return self._scalars(1)
        return sorted(set(self._some(rng.randint(1, 3))))

    def roots(self) -> list[int]:
        """Scalars to run passes from, and perhaps a reference to one on another worker."""
        if self.plan.is_tidy:
            tied = self._tied()
            return [] if tied is None else [tied]
        away = self._call(to_scalar=True) if self.plan.rng.random() < 0.3 else None
        return self._scalars(self.plan.rng.randint(1, 3)) + ([] if away is None else [away])

    def _scalars(self, count: int) -> list[int]:
        found: list[int] = []
        for _ in range(count):
            usable = [r for r in self.differentiable() if not self.registers[r].is_complex()]
            if not usable:
                break
            register = max(self.plan.rng.choice(usable), self.plan.rng.choice(usable))
            value = self.registers[register]
            is_root = value.numel() == 1 and value.grad_fn is not None and self.plan.rng.random() < 0.7
            if self.plan.rng.random() < 0.5 and (tied := self._tied()) is not None:
                register, is_root = tied, True
            found.append(register if is_root else self._step("op", (register,), ("total", ()))[0])
        return found

    def _tied(self) -> int | None:
        """A scalar that depends on all values with a graph."""
        total: int | None = None
        for register in self.differentiable():
            if register in self._used or (not self.plan.is_tidy and self.plan.rng.random() < 0.3):
                continue
            if self.registers[register].is_complex():
                (register,) = self._step("op", (register,), ("parts", ()))
            (scalar,) = self._step("op", (register,), ("total", ()))
            total = scalar if total is None else self._step("op", (total, scalar), ("add", ()))[0]
        return total


def storage_ptr(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, Tensor) else 0


def is_dense(tensor: Tensor) -> bool:
    """Whether no two elements share memory."""
    return tensor.numel() > 0 and not any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def entangled(values: list[Any]) -> set[int]:
    """Indices of the values that can't be changed alone at the other end of a message, as they share memory."""
    storages = [storage_ptr(value) for value in values]
    return {
        i
        for i, v in enumerate(values)
        if isinstance(v, Tensor) and (storages.count(storages[i]) > 1 or not is_dense(v))
    }
