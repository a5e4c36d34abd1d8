"""The base class of process groups that are written in Python."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from typing import Any, overload

import torch
import torch.distributed as dist

from farprop.distributed import composed_collectives, p2p_collectives
from farprop.distributed.arguments import as_list, as_lists, operation, pieces, root, split, time_limit
from farprop.distributed.composed_collectives import BlockingGroup, sparse_allreduce
from farprop.distributed.reduction import Reduction
from farprop.distributed.work import CoalescedWork, Work, completed
from farprop.errors import UsageError
from farprop.runtime.dynamo_disable import uncompiled_methods

__all__ = ["ProcessGroup"]

# Under torch's newer names. The methods with the older names call these.
COLLECTIVES = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
)


@uncompiled_methods
class ProcessGroup(dist.ProcessGroup):
    """A base class for groups: implement a few primitives, and all other collectives follow from them.

    The primitives are either ``send`` and ``recv``, or ``allreduce``, ``broadcast`` and ``allgather``. They are called
    as torch calls them: ``allreduce(tensors, opts)`` with a list of one tensor, and so on. They return a
    :class:`Work`. The collectives that follow from them run in the calling thread and are done when the call returns;
    implement those that have to overlap with other work.

    Args:
        store: what :meth:`get_group_store` returns. It may be left out: ``ProcessGroup(rank, size)``.
        rank: of this process in the group.
        size: the number of ranks.
        timeout: how long a composed collective waits for another rank, if the call does not say.

    Raises:
        UsageError: the group has no such rank.

    Example:
        >>> class MyGroup(ProcessGroup):
        ...     def send(self, tensors, dst, tag): ...
        ...     def recv(self, tensors, src, tag): ...
    """

    @overload
    def __init__(self, rank: int, size: int, timeout: timedelta = ...) -> None: ...

    @overload
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta = ...) -> None: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        has_store = "store" in kwargs or (args and isinstance(args[0], dist.Store))
        self._set_up(*args, **kwargs) if has_store else self._set_up(None, *args, **kwargs)

    def _set_up(
        self, store: dist.Store | None, rank: int, size: int, timeout: timedelta = dist.default_pg_timeout
    ) -> None:
        if not 0 <= rank < size:
            raise UsageError(f"A group of {size} ranks has no rank {rank}.")
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.timeout = timeout
        self._group_store = store
        self._name = self._description = ""
        self._coalesced: list[Any] | None = None

    def __init_subclass__(cls) -> None:
        uncompiled_methods(cls)

    # What torch asks of groups

    def getBackendName(self) -> str:  # noqa: N802
        """The name of the backend, which ``name()`` returns.

        Returns:
            The name.
        """
        return type(self).__name__

    def getGroupName(self) -> str:  # noqa: N802
        """The name that torch gave the group.

        Returns:
            The name.
        """
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called by torch.

        Args:
            name: the group's name.
        """
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description that torch gave the group.

        Returns:
            The description.
        """
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Called by torch.

        Args:
            description: the group's description.
        """
        self._description = description

    def get_group_store(self) -> dist.Store | None:  # type: ignore[override]
        """The store that the group was made with.

        Returns:
            The store; None if there was none.
        """
        return self._group_store

    def __repr__(self) -> str:
        return f"<{self.name()} group, rank {self.rank()} of {self.size()}>"

    # Primitives

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        """Send a tensor to a rank. It may block until that rank receives.

        Args:
            tensors: a list of one tensor.
            dst: the rank in the group.
            tag: for the ``recv`` that it is meant for.

        Returns:
            The work.

        Raises:
            UsageError: the group does not implement it.
        """
        raise UsageError(self._missing("send"))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        """Receive a tensor that a rank has sent with this tag. Messages of one rank arrive in order.

        Args:
            tensors: a list of one tensor, to receive into.
            src: the rank in the group.
            tag: of the ``send``.

        Returns:
            The work.

        Raises:
            UsageError: the group does not implement it.
        """
        raise UsageError(self._missing("recv"))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work:
        """Receive from the rank that sends first. It does not follow from the other primitives.

        Args:
            tensors: a list of one tensor, to receive into.
            tag: of the ``send``.

        Returns:
            The work.
        """
        raise UsageError(
            f"{type(self).__name__} can't receive from any rank. Give the rank, or implement recv_anysource."
        )

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Reduce tensors over all ranks, in place.

        Args:
            tensors: a tensor, or a list of them.
            opts: torch's options: the operation and the timeout.
            timeout: how long to wait, for calls without options.

        Returns:
            The work.
        """
        tensors, reduction = as_list(tensors), self._reduction(opts)
        for tensor in tensors:
            if tensor.is_sparse:
                sparse_allreduce(self._blocking("allreduce", opts), tensor, reduction)
            else:
                p2p_collectives.allreduce(self._blocking_p2p("allreduce", opts), tensor, reduction)
        return completed(tensors)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Copy tensors of one rank to all ranks, in place.

        Args:
            tensors: a tensor, or a list of them.
            opts: torch's options: the root and the timeout.
            timeout: how long to wait, for calls without options.

        Returns:
            The work.
        """
        tensors = as_list(tensors)
        for tensor in tensors:
            p2p_collectives.broadcast(self._blocking_p2p("broadcast", opts), tensor, root(opts))
        return completed(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Collect a tensor of each rank on all ranks.

        Args:
            outputs: a list of lists: a tensor for each rank.
            inputs: a list of tensors, one for each list of outputs.
            opts: torch's options: the timeout.

        Returns:
            The work.
        """
        lists, tensors = as_lists(outputs, inputs)
        for output, tensor in zip(lists, tensors, strict=True):
            p2p_collectives.allgather(self._blocking_p2p("allgather", opts), output, tensor)
        return completed(list(chain(*lists)))

    # Collectives that follow from the primitives

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Work:
        """Reduce tensors over all ranks, into those of one rank.

        Args:
            tensors: a tensor, or a list of them.
            opts: torch's options: the root, the operation and the timeout.
            op: the operation, for calls without options.
            timeout: how long to wait, for calls without options.

        Returns:
            The work.
        """
        tensors, group = as_list(tensors), self._blocking("reduce", opts)
        op = operation(opts) if op is None and not isinstance(opts, int) else operation(op)
        for tensor in tensors:
            if self._has_p2p:
                p2p_collectives.reduce(group, tensor, root(opts), self._reduction(op))
            else:
                composed_collectives.reduce(group, tensor, root(opts), op)
        return completed(tensors)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Collect a tensor of each rank on one rank.

        Args:
            outputs: at the root, a list of lists: a tensor for each rank.
            inputs: a list of tensors.
            opts: torch's options: the root and the timeout.
            timeout: how long to wait, for calls without options.

        Returns:
            The work.
        """
        lists, tensors = as_lists(outputs, inputs)
        algorithms = p2p_collectives if self._has_p2p else composed_collectives
        for number, tensor in enumerate(tensors):
            algorithms.gather(self._blocking("gather", opts), lists[number] if lists else [], tensor, root(opts))
        return completed(list(chain(*lists)))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Give each rank one of the tensors of one rank.

        Args:
            outputs: a list of tensors, to receive into.
            inputs: at the root, a list of lists: a tensor for each rank.
            opts: torch's options: the root and the timeout.
            timeout: how long to wait, for calls without options.

        Returns:
            The work.
        """
        lists, tensors = as_lists(inputs, outputs)
        algorithms = p2p_collectives if self._has_p2p else composed_collectives
        for number, tensor in enumerate(tensors):
            algorithms.scatter(self._blocking("scatter", opts), tensor, lists[number] if lists else [], root(opts))
        return completed(tensors)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Reduce tensors over all ranks, and give each rank one of them.

        Args:
            outputs: a list of tensors, to receive into.
            inputs: a list of lists: a tensor for each rank.
            opts: torch's options: the operation and the timeout.
            timeout: how long to wait, for calls without options.

        Returns:
            The work.
        """
        lists, tensors = as_lists(inputs, outputs)
        group = self._blocking("reduce_scatter", opts)
        for parts, tensor in zip(lists, tensors, strict=True):
            if self._has_p2p:
                p2p_collectives.reduce_scatter(group, tensor, parts, self._reduction(opts))
            else:
                composed_collectives.reduce_scatter(group, tensor, parts, operation(opts))
        return completed(tensors)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Send a tensor to each rank, and receive one from each.

        Args:
            outputs: a tensor for each rank, to receive into.
            inputs: a tensor for each rank.
            opts: torch's options: the timeout.

        Returns:
            The work.
        """
        algorithms = p2p_collectives if self._has_p2p else composed_collectives
        algorithms.all_to_all(self._blocking("alltoall", opts), outputs, inputs)
        return completed(outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        """Like :meth:`alltoall`, with parts of one tensor.

        Args:
            output: the tensor to receive into.
            input: the tensor to send.
            output_split_sizes: the rows from each rank; empty for equal parts.
            input_split_sizes: the rows for each rank; empty for equal parts.
            opts: torch's options: the timeout.

        Returns:
            The work.
        """
        parts = split(output, output_split_sizes, self.size())
        self.alltoall(parts, split(input, input_split_sizes, self.size()), opts).wait()
        return completed([output])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Like :meth:`allgather`, into one tensor.

        Args:
            output: the tensor to receive into, with room for all ranks.
            input: the tensor of this rank.
            opts: torch's options: the timeout.

        Returns:
            The work.
        """
        whole = output.contiguous()
        self._blocking("all_gather_single", opts).allgather(pieces(whole, input, self.size()), input)
        if whole is not output:
            output.copy_(whole)
        return completed([output])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Like :meth:`reduce_scatter`, with parts of one tensor.

        Args:
            output: the tensor to receive into.
            input: a part for each rank.
            opts: torch's options: the operation and the timeout.

        Returns:
            The work.
        """
        return self.reduce_scatter([output], [pieces(input.contiguous(), output, self.size())], opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Reduce several tensors over all ranks, in place.

        Args:
            tensors: the tensors.
            opts: torch's options: the operation and the timeout.

        Returns:
            The work.
        """
        group = self._blocking("allreduce_coalesced", opts)
        for tensor in tensors:
            group.allreduce(tensor, operation(opts))
        return completed(tensors)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Collect several tensors of each rank on all ranks.

        Args:
            outputs: for each rank, a list like ``inputs``.
            inputs: the tensors of this rank.
            opts: torch's options: the timeout.

        Returns:
            The work.
        """
        group = self._blocking("allgather_coalesced", opts)
        for number, tensor in enumerate(inputs):
            group.allgather([output[number] for output in outputs], tensor)
        return completed(list(chain(*outputs)))

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Several calls of :meth:`all_gather_single`, as one.

        Args:
            outputs: the tensors to receive into.
            inputs: the tensors of this rank.
            opts: torch's options: the timeout.

        Returns:
            The work.
        """
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor, opts).wait()
        return completed(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Several calls of :meth:`reduce_scatter_single`, as one.

        Args:
            outputs: the tensors to receive into.
            inputs: a tensor with a part for each rank, for each output.
            opts: torch's options: the operation and the timeout.

        Returns:
            The work.
        """
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts).wait()
        return completed(outputs)

    def barrier(self, opts: Any = None) -> Work:
        """Wait until every rank has called it.

        Args:
            opts: torch's options: the timeout.

        Returns:
            The work.
        """
        self._blocking("barrier", opts).allreduce(torch.zeros(1), dist.ReduceOp.SUM)
        return completed([])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that have not come in time.

        Only a group with ``send`` and ``recv`` can name them. ``torch.distributed.monitored_barrier`` only accepts Gloo
        groups, so call this on the group; under ``farprop.compat`` it accepts this one, too.

        Args:
            timeout: how long to wait; the group's timeout without it.
            wait_all_ranks: name all missing ranks, and not only the first.

        Raises:
            CollectiveTimeoutError: a rank has not come in time.
        """
        # A timeout of zero would mean no limit further down.
        limit = self.timeout if timeout is None else max(timeout, timedelta(milliseconds=1))
        group = BlockingGroup(self, "monitoredBarrier", limit)
        if self._has_p2p:
            p2p_collectives.monitored_barrier(group, wait_all_ranks)
        else:
            group.allreduce(torch.zeros(1), dist.ReduceOp.SUM)

    # Coalescing

    @property
    def supports_coalescing(self) -> bool:
        """Whether collectives can be made one work. True."""
        return True

    def start_coalescing(self) -> None:
        """Make one work of the collectives that are called from now on, until :meth:`end_coalescing`.

        Raises:
            UsageError: it was called twice.
        """
        if self._coalesced is not None:
            raise UsageError("start_coalescing() was called twice without end_coalescing().")
        works = self._coalesced = []

        def recording(collective: Callable[..., Any]) -> Callable[..., Any]:
            def record(*args: Any, **kwargs: Any) -> Any:
                works.append(collective(*args, **kwargs))
                return works[-1]

            return record

        # Attributes of the object hide the methods of the class. So subclasses override methods as usual, and calls
        # cost nothing extra while nothing is coalesced.
        self.__dict__.update({name: recording(getattr(self, name)) for name in COLLECTIVES})

    def end_coalescing(self) -> Work:
        """End what :meth:`start_coalescing` began.

        Returns:
            The work of all collectives since then.

        Raises:
            UsageError: :meth:`start_coalescing` was not called.
        """
        if self._coalesced is None:
            raise UsageError("end_coalescing() was called without start_coalescing().")
        for name in COLLECTIVES:
            del self.__dict__[name]
        works, self._coalesced = self._coalesced, None
        return CoalescedWork(works)

    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Work:
        return self.end_coalescing()

    # Torch's older names

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single(output, input, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single(output, input, opts)

    def alltoall_base(self, *args: Any) -> Work:
        """Torch's older name of :meth:`all_to_all_single`.

        Args:
            *args: its arguments.

        Returns:
            The work.
        """
        return self.all_to_all_single(*args)

    def allgather_into_tensor_coalesced(self, *args: Any) -> Work:
        """Torch's older name of :meth:`all_gather_single_coalesced`.

        Args:
            *args: its arguments.

        Returns:
            The work.
        """
        return self.all_gather_single_coalesced(*args)

    def reduce_scatter_tensor_coalesced(self, *args: Any) -> Work:
        """Torch's older name of :meth:`reduce_scatter_single_coalesced`.

        Args:
            *args: its arguments.

        Returns:
            The work.
        """
        return self.reduce_scatter_single_coalesced(*args)

    # Choosing an algorithm

    @property
    def _has_p2p(self) -> bool:
        return type(self).send is not ProcessGroup.send and type(self).recv is not ProcessGroup.recv

    def _reduction(self, opts: Any) -> Reduction:
        return Reduction.from_op(operation(opts), self.size())

    def _blocking(self, name: str, opts: Any) -> BlockingGroup:
        return BlockingGroup(self, name, time_limit(opts, self.timeout))

    def _blocking_p2p(self, name: str, opts: Any) -> BlockingGroup:
        if not self._has_p2p:
            raise UsageError(self._missing(name))
        return self._blocking(name, opts)

    def _missing(self, name: str) -> str:
        return (
            f"{type(self).__name__} has no {name}. A group has to have send and recv, "
            "or allreduce, broadcast and allgather."
        )
