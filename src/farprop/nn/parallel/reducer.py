"""The reducer: autograd's hooks on one side, a process group on the other, the machine of buckets in between."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist

from farprop._torch import queue_callback
from farprop.distributed.calling import implementer, rank_of, result_of, wait_for
from farprop.errors import ReductionError, UsageError
from farprop.nn.parallel.graph import leaves_behind
from farprop.nn.parallel.homes import Home, InContext, InGrad
from farprop.nn.parallel.hooks import CommHook, GradBucket, checked_future, reduce_by_sum
from farprop.nn.parallel.memory import Memory
from farprop.nn.parallel.use import Use
from farprop.protocol.buckets import Bucket, Parameter, Reduction, State, assign
from farprop.runtime.gradients.running import running_pass


class Reducer:
    """Reduces the gradients of parameters across the ranks of a group.

    Args:
        parameters: those that require grad, in the same order on all ranks.
        names: theirs, for errors.
        sparse: which of them get sparse gradients.
        group: any process group.
        limits: bytes of the first bucket, and of the others.
        as_views: gradients are views of the buckets.
        find_unused: look for parameters without a gradient in each forward pass.
        is_static: learn in the first iteration which gradients come, and how often.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        sparse: Sequence[bool],
        group: dist.ProcessGroup,
        *,
        limits: tuple[int, int],
        as_views: bool,
        find_unused: bool,
        is_static: bool,
    ) -> None:
        self.group = group
        self._allreduces = implementer(group, "allreduce")
        self._parameters, self._names, self._sparse = list(parameters), list(names), list(sparse)
        self._known = [
            Parameter(name, leaf.numel() * leaf.element_size(), (leaf.dtype, leaf.device), is_sparse)
            for leaf, name, is_sparse in zip(parameters, names, sparse, strict=True)
        ]
        self._limits = limits
        self._as_views = as_views
        self._finds_unused = find_unused and not is_static
        self._rebuilds = not self._finds_unused  # an order that changes all the time is none
        self._hook: tuple[CommHook, Any] | None = None
        self._scale: float | None = None
        self._in_grad = InGrad(as_views)
        self._home: Home = self._in_grad
        self._lock = threading.Lock()
        self._machine = Reduction(self._known, self._first_buckets(), rank_of(group), is_static)
        self._memory = self._new_memory()
        self._use = Use(len(self._parameters), self._parameters[0].device)
        handles = [
            leaf.register_post_accumulate_grad_hook(_hook_of(weakref.ref(self), index))
            for index, leaf in enumerate(self._parameters)
        ]
        weakref.finalize(self, _remove, handles)

    def set_hook(self, state: Any, hook: CommHook) -> None:
        """From now on buckets are reduced by a communication hook."""
        if self._hook is not None:
            raise UsageError("A communication hook can be registered once. Make a new DistributedDataParallel.")
        self._hook = hook, state

    def make_static(self) -> None:
        """Learn the graph in the first iteration, which has not begun yet."""
        if self._machine.state is not State.REST or self._machine.is_order_known:
            raise UsageError(
                "_set_static_graph() should be called before training loop starts. Pass static_graph=True to "
                "DistributedDataParallel, or call it before the first forward pass."
            )
        self._finds_unused, self._rebuilds = False, True
        self._machine.is_learning = True

    # Forward passes

    def check_finished(self) -> None:
        """Raise if the gradients of the last iteration did not all come.

        Other ranks may wait for the buckets that were not launched here, so those are launched first.
        """
        machine = self._machine
        if machine.state in (State.REST, State.EXPECTING):
            return
        is_incomplete = machine.state is State.RUNNING  # else the backward pass raised later, so its caller knows
        text = machine.unfinished()
        try:
            for index in machine.missing:
                self._memory.take(index, None, None)
            if is_incomplete:
                self._launch(machine.force(), self._tells_use)
            self._use.wait()
            for bucket in self._memory.buckets:
                bucket.wait()
            machine.note_shadow()
        finally:
            self._abandon()
        if is_incomplete:
            raise ReductionError(text)

    def expect(self, outputs: Iterable[torch.Tensor], divisor: int) -> None:
        """A forward pass has run, and its backward pass is to reduce."""
        self._scale = None if divisor == 1 or self._hook is not None else 1 / divisor
        unused: list[int] = []
        if self._tells_use:
            tensors = list(outputs)
            found = leaves_behind(tensors)
            unused = [index for index, leaf in enumerate(self._parameters) if leaf not in found]
            # Perhaps no parameter gets a gradient; an output does.
            reducer = weakref.ref(self)
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: _begin(reducer))
        self._machine.expect(unused)

    def rebuild_if_due(self) -> None:
        """After the first iteration: buckets by the order in which gradients came on rank 0, and of its sizes."""
        machine = self._machine
        if not self._rebuilds or not machine.is_order_known:
            return
        self._rebuilds = False
        buckets = assign(self._known, machine.order, *self._limits)
        *order, count = self._of_rank_0([*chain(*buckets), len(buckets)])
        sizes = self._of_rank_0([len(bucket) for bucket in buckets][:count] + [0] * (count - len(buckets)))
        members = iter(order)
        machine.set_buckets([tuple(islice(members, size)) for size in sizes])
        old, self._memory = self._memory, self._new_memory()
        if self._as_views:
            with torch.no_grad():
                self._memory.adopt(old)

    def accompany(self) -> None:
        """Do in a backward pass of other ranks what they wait for, without gradients."""
        machine = self._machine
        if machine.is_learning:
            raise UsageError("With static_graph=True every rank has to have an input, or it can't learn the graph.")
        futures = [self._reduce(number, bucket.zeros()) for number, bucket in enumerate(self._memory.buckets)]
        if self._tells_use:
            self._use.launch(self._allreduces)
        for future in futures:
            result_of(future)
        self._use.wait()
        machine.note_shadow()

    # Backward passes

    def begin(self) -> None:
        """The backward pass has come to an output."""
        with self._lock, torch.no_grad(), self._or_abandon():
            self._begin()

    def came(self, index: int, leaf: torch.Tensor) -> None:
        """The gradient of a parameter was accumulated."""
        if torch.is_grad_enabled():  # with create_graph
            with torch.no_grad():
                self.came(index, leaf)
            return
        with self._lock:
            machine = self._machine
            if self._tells_use:
                self._use.note(index)
            if machine.state is State.REST:
                return
            try:
                if machine.state is State.EXPECTING:
                    self._begin()
                launches = machine.ready(index)
                # Small ones are taken when their bucket is launched: here, each line is paid for every parameter.
                if index in self._memory.large and machine.is_there(index):
                    self._memory.take(index, self._home.get(leaf), self._scale)
                    if self._as_views and self._home is self._in_grad and index in self._memory.views:
                        # Frees the gradient's own memory, which the next layer's can have while it is in the cache.
                        leaf.grad = self._memory.views[index]
                if launches:
                    self._go_on(launches)
            except BaseException:
                self._abandon()
                raise

    def _begin(self) -> None:
        machine = self._machine
        if machine.state is not State.EXPECTING:
            return
        running = running_pass.get()
        self._home = self._in_grad if running is None else InContext(running)
        launches = machine.begin(can_learn=running is None)
        if machine.learns_now:
            queue_callback(self._end_of_first)
            return
        if launches:
            self._go_on(launches)

    def _end_of_first(self) -> None:
        """The first backward pass of a static graph has ended. Everything is reduced now."""
        with self._lock, torch.no_grad(), self._or_abandon():
            launches = self._machine.learned()
            self._launch(launches, tells_use=True)
        self._finish()

    def _go_on(self, launches: Sequence[int]) -> None:
        self._launch(launches, self._tells_use)
        if self._machine.state is State.LAUNCHED:
            if self._home is self._in_grad:
                queue_callback(self._finish)
            else:
                self._finish()  # nobody says when a distributed pass ends

    @property
    def _tells_use(self) -> bool:
        return self._finds_unused or self._machine.is_learning

    def _launch(self, numbers: Sequence[int], tells_use: bool) -> None:
        for number in numbers:
            bucket = self._memory.buckets[number]
            self._memory.fill(number, self._home, self._scale)
            bucket.future = self._reduce(number, bucket.flat)
        if tells_use and self._machine.state is State.LAUNCHED:
            self._use.launch(self._allreduces)

    def _reduce(self, number: int, buffer: torch.Tensor) -> Any:
        buckets = self._memory.buckets
        bucket = GradBucket(buckets[number], number, number == len(buckets) - 1, buffer)
        if self._hook is None:
            return reduce_by_sum(self._allreduces, bucket)
        hook, state = self._hook
        return checked_future(hook, hook(state, bucket))

    def _finish(self) -> None:
        """All buckets are launched: wait for each, and bring its gradients home."""
        with torch.no_grad(), self._or_abandon():
            self._use.wait()
            for number, bucket in enumerate(self._memory.buckets):
                bucket.wait()
                self._memory.give(number, self._home, self._use.nowhere)
            self._machine.finish()
            self._use.forget()

    @contextmanager
    def _or_abandon(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """The iteration has failed. What is under way still uses the old memory."""
        self._machine.abandon()
        self._memory = self._new_memory()
        self._use.give_up()

    def _first_buckets(self) -> Sequence[Bucket]:
        """Backward passes meet parameters about in reverse.

        Where the real order will be known soon, nothing is sent before all gradients are there: a model may have
        collectives of its own in its backward pass, and one that is launched by a wrong order would meet those.
        """
        limits = (sys.maxsize, sys.maxsize) if self._rebuilds else self._limits
        buckets = assign(self._known, range(len(self._parameters)), *limits)
        return sorted(buckets, key=min, reverse=True)

    def _of_rank_0(self, numbers: Sequence[int]) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int32, device=self._parameters[0].device)
        wait_for(implementer(self.group, "broadcast").broadcast([tensor], dist.BroadcastOptions()))
        return tensor.tolist()

    def _new_memory(self) -> Memory:
        return Memory(self._parameters, self._names, self._sparse, self._machine.buckets)


# Parameters live longer than the module around them may, so their hooks don't keep it.


def _hook_of(reducer: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    def came(leaf: torch.Tensor) -> None:
        found = reducer()
        if found is not None:
            found.came(index, leaf)

    return came


def _begin(reducer: weakref.ref[Reducer]) -> None:
    found = reducer()
    if found is not None:
        found.begin()


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
