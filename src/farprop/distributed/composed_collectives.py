"""Collectives composed of ``allreduce``, ``broadcast`` and ``allgather``.

They move more data than those of ``p2p_collectives``: some of it goes to ranks that do not need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from farprop.distributed.interop import wait_within
from farprop.distributed.reduction import ReduceKind, Reduction
from farprop.errors import CollectiveTimeoutError, UsageError

# The messages of composed collectives have a tag of their own, so that no ``recv`` of the user gets them.
_TAG = 1 << 30


class BlockingGroup:
    """Calls one primitive of a group at a time, and waits for it. The other collectives are composed of such calls.

    The tensors that it passes to the group are contiguous.

    Args:
        group: the group whose primitives are called.
        name: the collective that is composed, for errors.
        timeout: how long each primitive may take.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, timeout: timedelta) -> None:
        self._group = group
        self._name = name
        self._timeout = timeout
        self.rank: int = group.rank()
        self.size: int = group.size()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._wait(self._group.send([tensor.contiguous()], to, _TAG), f"rank {to}")

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        received = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._wait(self._group.recv([received], source, _TAG), f"rank {source}")
        if received is not tensor:
            tensor.copy_(received)

    def exchange(self, tensor: torch.Tensor, into: torch.Tensor, partner: int) -> None:
        """Send to a rank and receive from it. The lower one sends first: ``send`` may block until it is received."""
        if self.rank < partner:
            self.send(tensor, partner)
            self.receive(into, partner)
        else:
            received = torch.empty_like(into, memory_format=torch.contiguous_format)
            self.receive(received, partner)  # not into ``into`` yet, which may be the tensor that is sent
            self.send(tensor, partner)
            into.copy_(received)

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp | ReduceKind) -> None:
        options = AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]  # torch converts a constant
        options.timeout = self._timeout
        self._wait(self._group.allreduce([tensor], options), "the others")

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = self._timeout
        self._wait(self._group.broadcast([tensor], options), f"rank {root}")

    def allgather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        options = AllgatherOptions()
        options.timeout = self._timeout
        self._wait(self._group.allgather([list(outputs)], [tensor.contiguous()], options), "the others")

    def _wait(self, work: Any, whom: str) -> None:
        try:
            if wait_within(work, self._timeout):
                return
            cause = None
        except TimeoutError as error:
            cause = error
        raise CollectiveTimeoutError(
            f"Rank {self.rank} timed out in {self._name} after {self._timeout.total_seconds():g} s: it waited for "
            f"{whom}. Every rank of a group has to call the same collectives in the same order."
        ) from cause


def reduce(group: BlockingGroup, tensor: torch.Tensor, root: int, op: ReduceOp | ReduceKind) -> None:
    """All-reduce a copy. Only the root keeps the result."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.allreduce(total, op)
    if group.rank == root:
        tensor.copy_(total)


def gather(group: BlockingGroup, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
    """All-gather. Only the root keeps the result."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size)]
    group.allgather(parts, tensor)
    if group.rank == root:
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part)


def scatter(group: BlockingGroup, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
    """Broadcast all inputs. Each rank keeps its own."""
    whole = output.new_empty((group.size, *output.shape))
    if group.rank == root:
        torch.stack(list(inputs), out=whole)
    group.broadcast(whole, root)
    output.copy_(whole[group.rank])


def reduce_scatter(
    group: BlockingGroup, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp | ReduceKind
) -> None:
    """All-reduce all inputs. Each rank keeps its own."""
    whole = torch.stack(list(inputs))
    group.allreduce(whole, op)
    output.copy_(whole[group.rank])


def all_to_all(group: BlockingGroup, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """All-gather all inputs. Each rank keeps those that are meant for it.

    Ranks may send different amounts, so they exchange the counts first.

    Raises:
        UsageError: an output does not have the size of the input that is sent to it.
    """
    counts = [torch.empty(group.size, dtype=torch.int64) for _ in range(group.size)]
    group.allgather(counts, torch.tensor([tensor.numel() for tensor in inputs]))
    longest = max(int(row.sum()) for row in counts)
    mine = inputs[0].new_zeros(longest)
    own = torch.cat([tensor.reshape(-1) for tensor in inputs])
    mine[: own.numel()].copy_(own)
    everything = [torch.empty_like(mine) for _ in range(group.size)]
    group.allgather(everything, mine)
    for sender, output in enumerate(outputs):
        before, count = int(counts[sender][: group.rank].sum()), int(counts[sender][group.rank])
        if count != output.numel():
            raise UsageError(
                f"Rank {sender} sends {count} elements to rank {group.rank}, which expects {output.numel()}."
            )
        output.copy_(everything[sender][before : before + count].view_as(output))


class AllGather(Protocol):
    """The part of a group that ``sparse_allreduce`` uses."""

    @property
    def size(self) -> int: ...
    def allgather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None: ...


def sparse_allreduce(group: AllGather, tensor: torch.Tensor, reduction: Reduction) -> None:
    """Sum a sparse tensor of every rank: each rank gets the elements of all, and adds them in the order of ranks.

    Raises:
        UsageError: the operation is neither a sum nor an average.
    """
    if reduction.kind not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UsageError(f"Sparse tensors can be added up or averaged, but the operation is {reduction.kind}.")
    own = tensor.coalesce()
    indices, values = own.indices(), own.values()
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(group.size)]
    group.allgather(counts, torch.tensor([indices.size(1)]))
    longest = max(int(count) for count in counts)
    mine = indices.new_zeros((longest, indices.size(0))), values.new_zeros((longest, *values.shape[1:]))
    mine[0][: indices.size(1)] = indices.t()
    mine[1][: indices.size(1)] = values
    gathered: list[list[torch.Tensor]] = []
    for part in mine:
        outputs = [torch.empty_like(part) for _ in range(group.size)]
        group.allgather(outputs, part)
        gathered.append([output[: int(count)] for output, count in zip(outputs, counts, strict=True)])
    total = torch.sparse_coo_tensor(
        torch.cat(gathered[0]).t(), torch.cat(gathered[1]), tensor.shape, check_invariants=False
    ).coalesce()
    reduction.postscale(total)
    tensor.copy_(total)
