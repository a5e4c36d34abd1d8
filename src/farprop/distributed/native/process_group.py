"""The ready-made group: what torch calls of the backend ``farprop``."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from farprop.config import Settings
from farprop.distributed.arguments import (
    as_list,
    as_lists,
    bytes_of,
    check_device,
    copy_back,
    dtype_name,
    operation,
    root,
    time_limit,
)
from farprop.distributed.interop import NO_TIMEOUT
from farprop.distributed.native.bootstrap import connect_group
from farprop.distributed.native.collective_ops import Algorithms, CollectiveOp, CollectiveOps, Tensors
from farprop.distributed.native.collective_queue import CollectiveQueue
from farprop.distributed.native.framing import FrameKind
from farprop.distributed.native.hierarchical import Hierarchical
from farprop.distributed.native.intra_node import IntraNode
from farprop.distributed.native.matching import PostedRecv
from farprop.distributed.native.mesh import Mesh
from farprop.distributed.native.shm_arena import ShmArena
from farprop.distributed.process_group import ProcessGroup
from farprop.distributed.reduction import ReduceKind, Reduction
from farprop.distributed.work import CompletedWork, Work, begin_profile_event, completed, end_profile_event
from farprop.errors import CollectiveTimeoutError, UsageError, renewed
from farprop.locks import make_lock
from farprop.protocol.events import COLLECTIVE
from farprop.runtime import first_failure
from farprop.runtime.recorder import recorder

_MAX_TIMEOUT = timedelta(days=7)  # timedelta.max is more than system calls take
_open_groups: weakref.WeakSet[NativeProcessGroup] = weakref.WeakSet()


class NativeProcessGroup(ProcessGroup):
    """The group of the backend ``farprop``, made by ``init_process_group``.

    Ranks of one host reduce in shared memory; hosts talk over TCP.

    Args:
        store: where the ranks find each other.
        rank: of this process in the group.
        size: the number of ranks.
        timeout: how long a collective may take if the call does not say; at most a week.

    Raises:
        RendezvousError: not all ranks came in time, or they can't be a group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        timeout = min(timeout, _MAX_TIMEOUT)
        super().__init__(store, rank, size, timeout)
        settings = Settings.from_env()
        connections = connect_group(store, rank, size, settings, timeout.total_seconds())
        hosts, memory = connections.hosts, connections.memory
        self._arena: ShmArena | None = None
        self._mesh = Mesh(
            rank, connections.peers, settings.max_message_bytes, self._on_state_change, connections.limits
        )
        local = None
        if memory is not None:
            host = next(host for host in hosts if rank in host)
            on_long_wait = self._mesh.announce if len(hosts) > 1 else None
            wakeup_fds = connections.wakeup_fds
            self._arena = ShmArena(host, host.index(rank), memory, wakeup_fds, self._mesh.state, on_long_wait)
            local = IntraNode(self._arena)
        self._intra_node = local if len(hosts) == 1 else None
        algorithms: Algorithms = self._intra_node or Hierarchical(self._mesh, hosts, local)
        self._ops = CollectiveOps(algorithms, rank, size)
        self._queue = CollectiveQueue(f"farprop-collectives-rank{rank}")
        self._reductions: dict[ReduceKind, Reduction] = {}
        self._close_lock = make_lock("native_group")
        self._is_closed = False
        self._closed = threading.Event()
        self._is_forked = False
        _open_groups.add(self)
        first_failure.watch_end()

    def getBackendName(self) -> str:  # noqa: N802
        return "farprop"

    # Messages

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        """Send a tensor. It is done when the system has the bytes: the other rank always reads.

        Raises:
            UsageError: the tensor is not on the CPU, or the group is closed.
            CollectiveError: it can't be sent; ``Mesh.send`` says when.
        """
        self._check_open()
        tensor = tensors[0]
        check_device(tensor)
        deadline = time.monotonic() + self.timeout.total_seconds()
        event = begin_profile_event("send", [tensor])
        began = time.monotonic() if recorder.is_on else 0.0
        try:
            data = bytes_of(tensor.contiguous())
            self._mesh.send(dst, FrameKind.MESSAGE, tag, dtype_name(tensor), data, deadline)
        finally:
            end_profile_event(event)
            if began:
                recorder.span(COLLECTIVE, "send", began, bytes=tensor.nbytes)
        return completed([tensor])

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        return self._receive(tensors[0], src, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work:
        return self._receive(tensors[0], None, tag)

    def _receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> Work:
        self._check_open()
        check_device(tensor)
        return _RecvWork(self._mesh, tensor, source, tag, self.timeout)

    # Collectives

    def barrier(self, opts: Any = None) -> Work:
        return self._start("barrier", [], opts, [self._ops.barrier()], [])

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        tensors, reduction = as_list(tensors), self._reduction(opts)
        ops = [self._ops.allreduce(tensor, reduction) for tensor in tensors]
        return self._start("all_reduce", tensors, opts, ops, tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    @property
    def is_in_shared_memory(self) -> bool:
        """Whether all ranks share memory. Then :meth:`sum_scaled` can be used."""
        return self._intra_node is not None

    @property
    def has_spare_processors(self) -> bool:
        """Whether each rank of this host has a processor for collectives beside the one that it computes on."""
        return self._intra_node is None or len(os.sched_getaffinity(0)) >= 2 * self._intra_node.size

    def sum_scaled(self, tensors: Tensors, factor: float | None, is_awaited: bool) -> Work:
        """Multiply tensors by a factor, and sum them across the ranks, as one collective and in place.

        Args:
            tensors: flat and contiguous, of one dtype, on the CPU.
            factor: None for 1.
            is_awaited: whether the caller waits for it at once, so that it may run in this thread.

        Returns:
            The work.
        """
        assert self._intra_node is not None
        reduction = Reduction(dist.ReduceOp.SUM, factor=factor)
        reduction.check_dtype(tensors[0].dtype)
        opts = dist.AllreduceOptions()
        opts.asyncOp = not is_awaited
        op = self._ops.allreduce_together(tensors, reduction, self._intra_node)
        return self._start("all_reduce", tensors, opts, [op], tensors)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        tensors = as_list(tensors)
        ops = [self._ops.broadcast(tensor, root(opts)) for tensor in tensors]
        return self._start("broadcast", tensors, opts, ops, tensors)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Work:
        tensors = as_list(tensors)
        reduction = self._reduction(opts if op is None and not isinstance(opts, int) else op)
        ops = [self._ops.reduce(tensor, root(opts), reduction) for tensor in tensors]
        return self._start("reduce", tensors, opts, ops, tensors)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        lists, tensors = as_lists(outputs, inputs)
        ops = [
            self._ops.gather(lists[number] if lists else [], tensor, root(opts))
            for number, tensor in enumerate(tensors)
        ]
        return self._start("gather", tensors, opts, ops, list(chain(*lists)))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        lists, tensors = as_lists(inputs, outputs)
        ops = [
            self._ops.scatter(tensor, lists[number] if lists else [], root(opts))
            for number, tensor in enumerate(tensors)
        ]
        return self._start("scatter", list(chain(*lists)), opts, ops, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        lists, tensors = as_lists(outputs, inputs)
        ops = [self._ops.allgather(output, tensor) for output, tensor in zip(lists, tensors, strict=True)]
        return self._start("all_gather", tensors, opts, ops, list(chain(*lists)))

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        lists = [[output[number] for output in outputs] for number in range(len(inputs))]
        return self.allgather(lists, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        ops = [self._ops.all_gather_single(*pair) for pair in pairs]
        return self._start("all_gather", inputs, opts, ops, outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        lists, tensors = as_lists(inputs, outputs)
        reduction = self._reduction(opts)
        pairs = zip(tensors, lists, strict=True)
        ops = [self._ops.reduce_scatter(*pair, reduction) for pair in pairs]
        return self._start("reduce_scatter", list(chain(*lists)), opts, ops, tensors)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        reduction = self._reduction(opts)
        pairs = zip(outputs, inputs, strict=True)
        ops = [self._ops.reduce_scatter_single(*pair, reduction) for pair in pairs]
        return self._start("reduce_scatter", inputs, opts, ops, outputs)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._start("all_to_all", inputs, opts, [self._ops.all_to_all(outputs, inputs)], outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        collective = self._ops.all_to_all_single(output, input, output_split_sizes, input_split_sizes)
        return self._start("all_to_all", [input], opts, [collective], [output])

    # Running collectives

    def _reduction(self, opts: Any) -> Reduction:
        op = operation(opts)
        kind: Any = getattr(op, "op", op)
        if kind == dist.ReduceOp.PREMUL_SUM:  # each has its own factor
            return super()._reduction(opts)
        if kind not in self._reductions:
            self._reductions[kind] = super()._reduction(opts)
        return self._reductions[kind]

    def _start(self, name: str, inputs: Tensors, opts: Any, ops: Sequence[CollectiveOp], outputs: Tensors) -> Work:
        self._check_open()
        seconds = min(time_limit(opts, self.timeout), _MAX_TIMEOUT).total_seconds()
        event = begin_profile_event(name, inputs)

        def job() -> None:
            began = time.monotonic() if recorder.is_on else 0.0
            try:
                for op in ops:
                    self._run(op, seconds)
            finally:
                end_profile_event(event)
                if began:
                    recorder.span(COLLECTIVE, name, began, bytes=sum([tensor.nbytes for tensor in inputs]))

        if not getattr(opts, "asyncOp", True) and self._queue.run_inline(job):
            return CompletedWork(outputs)
        work = Work()
        self._queue.enqueue(job, work, outputs)
        return work

    def _run(self, op: CollectiveOp, seconds: float) -> None:
        call = self._mesh.state.begin(op.fingerprint, seconds)
        try:
            op.run(call)
        except BaseException as error:
            # Or the other ranks would wait for this one in vain.
            if self._arena is not None:
                self._arena.withdraw()
            self._mesh.state.fail_local(error)
            raise

    def _on_state_change(self) -> None:
        if self._arena is not None:
            self._arena.wake()

    def _check_open(self) -> None:
        if self._is_forked:
            raise UsageError(
                f"This process was forked from rank {self.rank()}, and is not a rank of its group. Use the group in "
                "the parent process."
            )
        if self._is_closed:
            raise UsageError("This group was destroyed. Make another one with init_process_group or new_group.")

    # The end

    def shutdown(self) -> None:
        """Called by ``destroy_process_group``. Works that are not done fail, here and on the other ranks."""
        error = sys.exception()  # ``destroy_process_group`` in a ``finally`` clause
        if error is not None:
            self.tell_failure(error)
        if threading.current_thread() is not threading.main_thread():
            self._close()
            return
        # In another thread, because an interrupt would leave the rest undone. It ends the wait, and nothing else.
        closing = threading.Thread(target=self._close, name=f"farprop-destroy-rank{self.rank()}", daemon=True)
        closing.start()
        closing.join()
        self._closed.wait()  # an interrupted call may have begun it

    def _close(self) -> None:
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            self._close_parts()
        finally:
            self._closed.set()

    def _close_parts(self) -> None:
        if self._queue.is_busy:
            self._mesh.state.fail_local(UsageError("the group was destroyed before it was done"))
        self._queue.close()
        self._mesh.close()
        if self._arena is not None:
            self._arena.close()

    def tell_failure(self, error: BaseException) -> None:
        """The program of this rank fails: tell the other ranks who failed first, and with what.

        Args:
            error: what the program fails with.
        """
        text = first_failure.last_words(error, f"rank {self.rank()}")
        if text and not self._is_closed:
            self._mesh.say_last_words(text)

    def leave(self) -> None:
        """Say goodbye, and nothing else: this process ends."""
        if not self._is_closed:
            self._mesh.say_goodbye()

    def abandon(self) -> None:
        """In a forked child: close the descriptors, touch nothing else. The threads are the parent's."""
        self._is_closed = self._is_forked = True
        self._close_lock, self._closed = make_lock("native_group"), threading.Event()
        self._closed.set()
        self._mesh.abandon()
        if self._arena is not None:
            self._arena.close()

    def abort(self) -> None:
        """Break the group: collectives that run fail on every rank. Then close it here."""
        if not self._is_closed:
            self._mesh.state.fail_local(UsageError("the group was aborted"))
            self.shutdown()


class _RecvWork(Work):
    """The work of a receive; whoever waits for it waits no longer than the group's timeout."""

    def __init__(self, mesh: Mesh, tensor: torch.Tensor, source: int | None, tag: int, timeout: timedelta) -> None:
        super().__init__()
        self._mesh = mesh
        self._timeout = timeout
        self._event = begin_profile_event("recvAnySource" if source is None else "recv", [tensor])
        self._tensor, self._received = tensor, tensor.detach().contiguous()
        buffer = bytes_of(self._received)
        self._recv = PostedRecv(FrameKind.MESSAGE, source, tag, buffer, dtype_name(tensor), self._on_done)
        self._whom = "any rank" if source is None else f"rank {source}"
        mesh.post(self._recv)

    def _on_done(self, _: PostedRecv, error: Exception | None) -> None:
        # Before the work ends: whoever waits for it may stop profiling next.
        end_profile_event(self._event)
        if error is not None:
            self.fail(error)
            return
        copy_back(self._tensor, self._received)
        self.complete([self._tensor])

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        limit = timeout if timeout > NO_TIMEOUT else self._timeout
        try:
            return super().wait(limit)
        except CollectiveTimeoutError:
            if self.is_completed():
                raise
            error = CollectiveTimeoutError(
                f"Rank {self._mesh.rank} waited {limit.total_seconds():g} s to receive from {self._whom}, with tag "
                f"{self._recv.key}."
            )
            if self._mesh.cancel(self._recv, error):
                raise renewed(error) from None
            return super().wait(limit)  # its message came at the last moment

    def _source_rank(self) -> int:
        return -1 if self._recv.source is None else self._recv.source


@atexit.register
def _leave_at_exit() -> None:
    """Tell the other ranks that a program that ends without destroy_process_group has left, and has not died."""
    error = first_failure.uncaught()
    if error is not None:
        _tell_failure(error)
    for group in list(_open_groups):
        group.leave()


@first_failure.at_failing_end
def _tell_failure(error: BaseException) -> None:
    for group in list(_open_groups):
        group.tell_failure(error)


def _after_fork_in_child() -> None:
    """A forked child is not a rank. If it kept the connections open, nobody would notice its parent's death."""
    for group in list(_open_groups):
        if not group._is_closed:
            group.abandon()
    _open_groups.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
