"""The reducer: connects autograd's hooks, the bucket schedule and a process group."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from farprop import _torch
from farprop._torch import queue_callback
from farprop.distributed import NativeProcessGroup
from farprop.distributed.interop import implementer, rank_of, result_of, tensor_of, wait_for
from farprop.errors import ReductionError, UsageError
from farprop.locks import make_lock
from farprop.nn.parallel.bucket_buffers import (
    BucketBuffers,
    ContextGradients,
    EndReduction,
    GradAttribute,
    GradBucket,
    GradStorage,
)
from farprop.nn.parallel.unused_parameters import UsedParameters, reachable_leaves
from farprop.protocol.ddp_buckets import BucketIndices, BucketSchedule, ParameterInfo, State, assign_buckets
from farprop.runtime.autograd.engine import running_pass

_log = logging.getLogger(__name__)

# A communication hook: called with a state and a GradBucket. The second type is Any, so that hooks annotated with
# torch's GradBucket fit.
CommHook = Callable[[Any, Any], Future[torch.Tensor]]


class Reducer:
    """Averages the gradients of parameters across the ranks of a group.

    Args:
        parameters: Those that require grad, in the same order on all ranks.
        names: Their names, for error messages.
        sparse: Which of them get sparse gradients.
        group: Any process group.
        limits: Bytes of the first bucket, and of the later ones.
        may_delay: Whether buckets may be joined and reduced at the end of the backward pass, if that is faster.
        as_views: Whether gradients are views of the bucket buffers.
        find_unused: Whether to look for parameters without a gradient after each forward pass.
        is_static: Whether to learn in the first iteration which gradients are accumulated, and how often.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        sparse: Sequence[bool],
        group: dist.ProcessGroup,
        *,
        limits: tuple[int, int],
        may_delay: bool,
        as_views: bool,
        find_unused: bool,
        is_static: bool,
    ) -> None:
        self.group = group
        self._allreduce_group = implementer(group, "allreduce")
        self._parameters, self._names, self._sparse = list(parameters), list(names), list(sparse)
        self._infos = [
            ParameterInfo(name, leaf.numel() * leaf.element_size(), (leaf.dtype, leaf.device), is_sparse)
            for leaf, name, is_sparse in zip(parameters, names, sparse, strict=True)
        ]
        self._limits = limits
        self._may_delay = may_delay
        self._delays = False  # whether buckets are reduced at the end of the backward pass
        self._in_place = _in_place_group(group)
        self._as_views = as_views
        self._finds_unused = find_unused and not is_static
        self._rebuilds = not self._finds_unused  # with unused parameters the order changes from pass to pass
        self._hook: tuple[CommHook, Any] | None = None  # with its state
        self._scale: float | None = None  # what gradients are multiplied by before they are reduced
        self._grad_attribute = GradAttribute(as_views)
        self._storage: GradStorage = self._grad_attribute
        self._lock = make_lock("reducer")
        self._schedule = BucketSchedule(self._infos, self._first_buckets(), rank_of(group), is_static)
        self._buffers = self._new_buffers()
        self._used = UsedParameters(len(self._parameters), self._parameters[0].device)
        handles = [
            leaf.register_post_accumulate_grad_hook(_grad_hook(weakref.ref(self), index))
            for index, leaf in enumerate(self._parameters)
        ]
        weakref.finalize(self, _remove, handles)

    def set_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce buckets with a communication hook from now on."""
        if self._hook is not None:
            raise UsageError("A communication hook can be registered once. Make a new DistributedDataParallel.")
        self._hook, self._in_place = (hook, state), None

    def make_static(self) -> None:
        """Learn the graph in the first iteration, which must not have begun."""
        if self._schedule.state is not State.IDLE or self._schedule.is_order_known:
            raise UsageError(
                "_set_static_graph() should be called before training loop starts. Pass static_graph=True to "
                "DistributedDataParallel, or call it before the first forward pass."
            )
        self._finds_unused, self._rebuilds = False, True
        self._schedule.is_learning = True

    # Forward passes

    def check_finished(self) -> None:
        """Raise ``ReductionError`` if gradients of the last iteration are missing.

        Other ranks may wait for the buckets that were not launched here, so those are launched first.
        """
        schedule = self._schedule
        if schedule.state in (State.IDLE, State.ARMED):
            return
        is_incomplete = schedule.state is State.RUNNING  # else the backward pass raised later, so its caller knows
        text = schedule.missing_message()
        try:
            for index in schedule.missing:
                self._buffers.add(index, None, None)
            if is_incomplete:
                self._launch(schedule.launch_remaining(), self._exchanges_used)
            self._used.wait()
            for buffer in self._buffers.buffers:
                buffer.wait()
            schedule.note_shadowed()
        finally:
            self._abort()
        if is_incomplete:
            raise ReductionError(text)

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor], divisor: int) -> None:
        """Expect a backward pass from ``outputs`` that reduces. ``divisor`` makes the sums over ranks averages."""
        self._scale = None if divisor == 1 or self._hook is not None else 1 / divisor
        unused: list[int] = []
        if self._exchanges_used:
            tensors = list(outputs)
            reachable = reachable_leaves(tensors)
            unused = [index for index, leaf in enumerate(self._parameters) if leaf not in reachable]
            # If no parameter gets a gradient, only the outputs tell that the backward pass has begun.
            reducer = weakref.ref(self)
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: _begin(reducer))
        self._schedule.arm(unused)

    def rebuild_if_due(self) -> None:
        """After the first iteration, rebuild the buckets in the order in which rank 0 accumulated its gradients."""
        schedule = self._schedule
        if not self._rebuilds or not schedule.is_order_known:
            return
        self._rebuilds = False
        if self._in_place is not None and self._may_delay:
            # Without a processor to run beside the backward pass, a reduction only gets in its way.
            (self._delays,) = map(bool, self._from_rank_0([not self._in_place.has_spare_processors]))
        limits = (sys.maxsize, sys.maxsize) if self._delays else self._limits
        buckets = assign_buckets(self._infos, schedule.order, *limits)
        if self._in_place is not None:
            # Small gradients next to each other, so that they make one piece.
            large = self._buffers.large
            buckets = tuple(tuple(sorted(bucket, key=lambda index: index in large)) for bucket in buckets)
        # The ranks take order and sizes from rank 0.
        *order, count = self._from_rank_0([*chain(*buckets), len(buckets)])
        sizes = self._from_rank_0([len(bucket) for bucket in buckets][:count] + [0] * (count - len(buckets)))
        members = iter(order)
        schedule.set_buckets([tuple(islice(members, size)) for size in sizes])
        _log.debug("Rank %d: rebuilt buckets of %s parameters", rank_of(self.group), sizes)
        old, self._buffers = self._buffers, self._new_buffers()
        if self._as_views:
            with torch.no_grad():
                self._buffers.adopt(old)

    def shadow(self) -> None:
        """Take part in the collectives of the other ranks' backward pass, without gradients of this rank."""
        schedule = self._schedule
        if schedule.is_learning:
            raise UsageError("With static_graph=True every rank needs an input for the first iteration.")
        ends = [self._reduce(bucket, buffer.zeros()) for bucket, buffer in enumerate(self._buffers.buffers)]
        if self._exchanges_used:
            self._used.launch(self._allreduce_group)
        for end_reduction in ends:
            end_reduction()
        self._used.wait()
        schedule.note_shadowed()

    # Backward passes

    def begin(self) -> None:
        """Start the backward pass, which has reached an output of the module."""
        with self._lock, torch.no_grad(), self._abort_on_error():
            self._begin()

    def on_gradient(self, index: int, leaf: torch.Tensor) -> None:
        """Take the gradient of a parameter, which was just accumulated."""
        if torch.is_grad_enabled():  # with create_graph
            with torch.no_grad():
                self.on_gradient(index, leaf)
            return
        with self._lock:
            schedule = self._schedule
            if self._exchanges_used:
                self._used.mark(index)
            if schedule.state is State.IDLE:
                return
            try:
                if schedule.state is State.ARMED:
                    self._begin()
                launches = schedule.mark_ready(index)
                # Small gradients are copied when their bucket is launched: this code runs for every parameter.
                if index in self._buffers.large and schedule.is_ready(index):
                    self._take_large(index, leaf)
                if launches:
                    self._launch_and_finish(launches)
            except BaseException:
                self._abort()
                raise

    def _take_large(self, index: int, leaf: torch.Tensor) -> None:
        is_attribute = self._storage is self._grad_attribute
        if self._in_place is not None and is_attribute and not self._as_views and self._buffers.lend(index):
            return
        self._buffers.add(index, self._storage.get(leaf), self._scale_of_copy(index))
        if self._as_views and is_attribute and index in self._buffers.views:
            # Frees the gradient's own memory. The next layer's gradient can reuse it while it is cached.
            leaf.grad = self._buffers.views[index]

    def _begin(self) -> None:
        schedule = self._schedule
        if schedule.state is not State.ARMED:
            return
        running = running_pass.get()
        self._storage = self._grad_attribute if running is None else ContextGradients(running)
        launches = schedule.begin(can_learn=running is None)
        if schedule.learns_now:
            queue_callback(self._end_learning)
            return
        if launches:
            self._launch_and_finish(launches)

    def _end_learning(self) -> None:
        """Reduce everything at the end of the first backward pass of a static graph."""
        with self._lock, torch.no_grad(), self._abort_on_error():
            launches = self._schedule.end_learning()
            self._launch(launches, exchanges_used=True)
        self._finish()

    def _launch_and_finish(self, launches: Sequence[int]) -> None:
        self._launch(launches, self._exchanges_used)
        if self._schedule.state is State.LAUNCHED:
            if self._storage is self._grad_attribute:
                queue_callback(self._finish)
            else:
                self._finish()  # nothing tells when a distributed pass ends on this worker

    @property
    def _exchanges_used(self) -> bool:
        return self._finds_unused or self._schedule.is_learning

    def _launch(self, buckets: Sequence[int], exchanges_used: bool) -> None:
        for bucket in buckets:
            buffer = self._buffers.buffers[bucket]
            self._buffers.fill(bucket, self._storage, self._scale_of_copy(self._schedule.buckets[bucket][0]))
            buffer.end_reduction = self._reduce(bucket, buffer.flat)
        if exchanges_used and self._schedule.state is State.LAUNCHED:
            self._used.launch(self._allreduce_group)

    def _scale_of_copy(self, index: int) -> float | None:
        """What a gradient is multiplied by while it is copied. A reduction in place does that by itself."""
        return self._scale if self._in_place is None or self._sparse[index] else None

    def _reduce(self, index: int, buffer: torch.Tensor) -> EndReduction:
        buffers = self._buffers.buffers
        if self._in_place is not None and not buffer.is_sparse:
            pieces = self._buffers.pieces(index, buffer)
            if self._delays:
                return partial(_sum_now, self._in_place, pieces, self._scale)
            return partial(_end_sum, self._in_place.sum_scaled(pieces, self._scale, is_awaited=False))
        bucket = GradBucket(buffers[index], index, index == len(buffers) - 1, buffer)
        if self._hook is None:
            # Its gradients are already divided by the number of ranks.
            future = self._allreduce_group.allreduce([bucket.buffer()], dist.AllreduceOptions()).get_future()
        else:
            hook, state = self._hook
            future = _checked_future(hook, hook(state, bucket))
        return lambda: tensor_of(result_of(future))

    def _finish(self) -> None:
        """Wait for each bucket, all of which are launched, and store its gradients."""
        with torch.no_grad(), self._abort_on_error():
            self._used.wait()
            for bucket, buffer in enumerate(self._buffers.buffers):
                buffer.wait()
                self._buffers.store(bucket, self._storage, self._used.used_by_no_rank)
            self._schedule.finish()
            self._used.reset()

    @contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._abort()
            raise

    def _abort(self) -> None:
        """End the iteration after an error. Collectives under way may still write to the old buffers."""
        _log.debug("Rank %d: aborts an iteration in state %s", rank_of(self.group), self._schedule.state.value)
        self._schedule.abort()
        self._buffers.take_back()
        self._buffers = self._new_buffers()
        self._used.abort()

    def _first_buckets(self) -> Sequence[BucketIndices]:
        """Buckets for the first iteration. Backward passes reach parameters roughly in reverse order.

        If buckets will be rebuilt, nothing is sent before all gradients are ready: a model may have collectives of its
        own in its backward pass, and a bucket launched in a guessed order could be matched with those.
        """
        limits = (sys.maxsize, sys.maxsize) if self._rebuilds else self._limits
        buckets = assign_buckets(self._infos, range(len(self._parameters)), *limits)
        return sorted(buckets, key=min, reverse=True)

    def _from_rank_0(self, numbers: Sequence[int]) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int32, device=self._parameters[0].device)
        wait_for(implementer(self.group, "broadcast").broadcast([tensor], dist.BroadcastOptions()))
        return tensor.tolist()

    def _new_buffers(self) -> BucketBuffers:
        return BucketBuffers(self._parameters, self._names, self._sparse, self._schedule.buckets)


def _in_place_group(group: dist.ProcessGroup) -> NativeProcessGroup | None:
    """The group, if gradients can be reduced in the memory where they are."""
    # A class that derives from it may override the collectives.
    return group if type(group) is NativeProcessGroup and group.is_in_shared_memory else None


def _sum_now(group: NativeProcessGroup, pieces: Sequence[torch.Tensor], scale: float | None) -> None:
    group.sum_scaled(pieces, scale, is_awaited=True).wait()


def _end_sum(work: dist.Work) -> None:
    wait_for(work)


# Parameters may live longer than the module around them, so their hooks hold a weak reference to the reducer.


def _grad_hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    def on_gradient(leaf: torch.Tensor) -> None:
        found = reducer()
        if found is not None:
            found.on_gradient(index, leaf)

    return on_gradient


def _begin(reducer: weakref.ref[Reducer]) -> None:
    found = reducer()
    if found is not None:
        found.begin()


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _checked_future(hook: CommHook, result: object) -> Future[Any]:
    """What a user's hook returned; raises ``UsageError`` if it is not a future."""
    if not isinstance(result, _torch.Future):  # futures made in C++ are not instances of torch.futures.Future
        raise UsageError(
            f"The communication hook {getattr(hook, '__qualname__', hook)} has to return a torch.futures.Future of the "
            f"reduced buffer, but returned {type(result).__name__}."
        )
    return result  # type: ignore[no-any-return]
