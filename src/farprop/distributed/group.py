"""The base of process groups that are written in Python."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from typing import Any, overload

import torch
import torch.distributed as dist

from farprop.distributed import derived, messages, sparse
from farprop.distributed.arguments import as_list, as_lists, operation, pieces, root, split, time_limit
from farprop.distributed.reduction import Reduction
from farprop.distributed.steps import Steps
from farprop.distributed.work import CoalescedWork, Work, completed
from farprop.errors import UsageError
from farprop.runtime.uncompiled import uncompiled_methods

__all__ = ["ProcessGroup"]

# Under torch's newer names; the base sends the older ones here.
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
    """A group of ranks, to be derived from: write a few primitives, and the other collectives follow.

    Either ``send`` and ``recv``, or ``allreduce``, ``broadcast`` and ``allgather``, which are called as torch calls
    them: ``allreduce(tensors, opts)`` with a list of one tensor, and so on. They return a :class:`Work`. What is
    derived from them runs in the calling thread and is done when the call returns; write the collectives that have to
    overlap with other things.

    Args:
        store: what :meth:`get_group_store` returns; it may be left out, also by place.
        rank: of this process in the group.
        size: how many ranks the group has.
        timeout: how long a derived collective waits for another rank, if the call does not say.
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

    # What torch asks groups for

    def getBackendName(self) -> str:  # noqa: N802
        """What ``name()`` returns."""
        return type(self).__name__

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def get_group_store(self) -> dist.Store | None:  # type: ignore[override]
        """The store that the group was made with."""
        return self._group_store

    def __repr__(self) -> str:
        return f"<{self.name()} group, rank {self.rank()} of {self.size()}>"

    # Primitives

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        """Send a tensor to a rank. It may block until that rank receives."""
        raise UsageError(self._missing("send"))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        """Receive a tensor that a rank has sent with this tag; those of one rank come in order."""
        raise UsageError(self._missing("recv"))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work:
        """Receive from whoever sends first. It can't be derived."""
        raise UsageError(f"{type(self).__name__} can't receive from any rank. Give the rank, or write recv_anysource.")

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        tensors, reduction = as_list(tensors), self._reduction(opts)
        for tensor in tensors:
            if tensor.is_sparse:
                sparse.allreduce(self._steps("allreduce", opts), tensor, reduction)
            else:
                messages.allreduce(self._by_messages("allreduce", opts), tensor, reduction)
        return completed(tensors)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        tensors = as_list(tensors)
        for tensor in tensors:
            messages.broadcast(self._by_messages("broadcast", opts), tensor, root(opts))
        return completed(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        lists, tensors = as_lists(outputs, inputs)
        for output, tensor in zip(lists, tensors, strict=True):
            messages.allgather(self._by_messages("allgather", opts), output, tensor)
        return completed(list(chain(*lists)))

    # What follows from them

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Work:
        tensors, steps = as_list(tensors), self._steps("reduce", opts)
        op = operation(opts) if op is None and not isinstance(opts, int) else operation(op)
        for tensor in tensors:
            if self._has_messages:
                messages.reduce(steps, tensor, root(opts), self._reduction(op))
            else:
                derived.reduce(steps, tensor, root(opts), op)
        return completed(tensors)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        lists, tensors = as_lists(outputs, inputs)
        way = messages if self._has_messages else derived
        for number, tensor in enumerate(tensors):
            way.gather(self._steps("gather", opts), lists[number] if lists else [], tensor, root(opts))
        return completed(list(chain(*lists)))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        lists, tensors = as_lists(inputs, outputs)
        way = messages if self._has_messages else derived
        for number, tensor in enumerate(tensors):
            way.scatter(self._steps("scatter", opts), tensor, lists[number] if lists else [], root(opts))
        return completed(tensors)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        lists, tensors = as_lists(inputs, outputs)
        steps = self._steps("reduce_scatter", opts)
        for parts, tensor in zip(lists, tensors, strict=True):
            if self._has_messages:
                messages.reduce_scatter(steps, tensor, parts, self._reduction(opts))
            else:
                derived.reduce_scatter(steps, tensor, parts, operation(opts))
        return completed(tensors)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        way = messages if self._has_messages else derived
        way.all_to_all(self._steps("alltoall", opts), outputs, inputs)
        return completed(outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        parts = split(output, output_split_sizes, self.size())
        self.alltoall(parts, split(input, input_split_sizes, self.size()), opts).wait()
        return completed([output])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        whole = output.contiguous()
        self._steps("all_gather_single", opts).allgather(pieces(whole, input, self.size()), input)
        if whole is not output:
            output.copy_(whole)
        return completed([output])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter([output], [pieces(input.contiguous(), output, self.size())], opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        steps = self._steps("allreduce_coalesced", opts)
        for tensor in tensors:
            steps.allreduce(tensor, operation(opts))
        return completed(tensors)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """``outputs`` has a list for each rank, like ``inputs``."""
        steps = self._steps("allgather_coalesced", opts)
        for number, tensor in enumerate(inputs):
            steps.allgather([output[number] for output in outputs], tensor)
        return completed(list(chain(*outputs)))

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor, opts).wait()
        return completed(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts).wait()
        return completed(outputs)

    def barrier(self, opts: Any = None) -> Work:
        """Done when every rank has called it."""
        self._steps("barrier", opts).allreduce(torch.zeros(1), dist.ReduceOp.SUM)
        return completed([])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names who has not come in time; ``wait_all_ranks`` to name all of them, and not the first.

        Only a group with ``send`` and ``recv`` can tell. ``torch.distributed.monitored_barrier`` takes Gloo groups
        alone, so this is called on the group; under ``farprop.compat`` it takes this one, too.
        """
        # No time at all would mean no limit to those who wait.
        limit = self.timeout if timeout is None else max(timeout, timedelta(milliseconds=1))
        steps = Steps(self, "monitoredBarrier", limit)
        if self._has_messages:
            messages.monitored_barrier(steps, wait_all_ranks)
        else:
            steps.allreduce(torch.zeros(1), dist.ReduceOp.SUM)

    # Several as one

    @property
    def supports_coalescing(self) -> bool:
        return True

    def start_coalescing(self) -> None:
        """What is called from now on belongs together, until :meth:`end_coalescing`."""
        if self._coalesced is not None:
            raise UsageError("start_coalescing() was called twice without end_coalescing().")
        works = self._coalesced = []

        def noting(collective: Callable[..., Any]) -> Callable[..., Any]:
            def note(*args: Any, **kwargs: Any) -> Any:
                works.append(collective(*args, **kwargs))
                return works[-1]

            return note

        # Here they hide the methods of the class, which nothing stands in front of otherwise.
        self.__dict__.update({name: noting(getattr(self, name)) for name in COLLECTIVES})

    def end_coalescing(self) -> Work:
        """The work of everything that was called since :meth:`start_coalescing`."""
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

    # Torch's older names of the same

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single(output, input, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single(output, input, opts)

    def alltoall_base(self, *args: Any) -> Work:
        return self.all_to_all_single(*args)

    def allgather_into_tensor_coalesced(self, *args: Any) -> Work:
        return self.all_gather_single_coalesced(*args)

    def reduce_scatter_tensor_coalesced(self, *args: Any) -> Work:
        return self.reduce_scatter_single_coalesced(*args)

    # How

    @property
    def _has_messages(self) -> bool:
        return type(self).send is not ProcessGroup.send and type(self).recv is not ProcessGroup.recv

    def _reduction(self, opts: Any) -> Reduction:
        return Reduction(operation(opts), self.size())

    def _steps(self, name: str, opts: Any) -> Steps:
        return Steps(self, name, time_limit(opts, self.timeout))

    def _by_messages(self, name: str, opts: Any) -> Steps:
        if not self._has_messages:
            raise UsageError(self._missing(name))
        return self._steps(name, opts)

    def _missing(self, name: str) -> str:
        return (
            f"{type(self).__name__} has no {name}. A group has to have send and recv, "
            "or allreduce, broadcast and allgather."
        )
