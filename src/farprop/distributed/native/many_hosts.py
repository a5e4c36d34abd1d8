"""Collectives of ranks on several hosts: by messages, and in shared memory where a host has several ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from farprop.distributed import messages
from farprop.distributed.native.calls import Call
from farprop.distributed.native.frames import Kind, bytes_of
from farprop.distributed.native.inbox import Receipt
from farprop.distributed.native.mesh import Mesh
from farprop.distributed.native.one_host import OneHost
from farprop.distributed.reduction import Reduction

# From so many bytes on, each host reduces a share; below, the fewest messages are what counts.
_LARGE = 64 * 1024
_PATIENCE = 0.1


class _Steps:
    """The messages of one collective among some ranks of the group, which are numbered from 0 here."""

    def __init__(self, mesh: Mesh, call: Call, ranks: Sequence[int]) -> None:
        self._mesh, self._call, self._ranks = mesh, call, ranks
        self.rank = ranks.index(mesh.rank)
        self.size = len(ranks)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        call = self._call
        data = bytes_of(tensor.contiguous())
        self._mesh.send(self._ranks[to], Kind.PART, call.number, call.statement, data, call.deadline)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self._wait(self._expect(tensor, source), source)

    def swap(self, tensor: torch.Tensor, into: torch.Tensor, partner: int) -> None:
        """The rank that is sent to reads whatever it does, so both may send at once."""
        self.send(tensor, partner)
        self.receive(into, partner)

    def _expect(self, tensor: torch.Tensor, source: int) -> _Arrival:
        arrival = _Arrival()
        receipt = Receipt(Kind.PART, self._ranks[source], self._call.number, bytes_of(tensor), None, arrival.on_end)
        self._mesh.expect(receipt)
        return arrival

    def _wait(self, arrival: _Arrival, source: int) -> None:
        call, rank = self._call, self._ranks[source]
        if not arrival.ended.wait(_PATIENCE):
            # Perhaps it does something else, and waits for us. And when time is up, the others have to know who came.
            self._mesh.tell(Kind.STATED, call.statement, _PATIENCE, call.number)
        while not arrival.ended.wait(max(0.0, call.deadline - time.monotonic())):
            self._mesh.standing.check([rank], call)
        if arrival.error is not None:
            self._mesh.standing.check([rank], call)
            raise arrival.error


class _Arrival:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: Exception | None = None

    def on_end(self, _: Receipt, error: Exception | None) -> None:
        self.error = error
        self.ended.set()


class _Begun(Reduction):
    """The first half of a reduction: it is begun, and not ended."""

    def __init__(self, whole: Reduction) -> None:
        self.__dict__.update(vars(whole))

    def end(self, total: torch.Tensor) -> None:
        pass


class _Ended(Reduction):
    """The second half: it was begun before, and is ended."""

    def __init__(self, whole: Reduction) -> None:
        self.__dict__.update(vars(whole))

    def begin(self, tensor: torch.Tensor) -> None:
        pass


class ManyHosts:
    """``local`` is for the ranks of this host, if there are several. The first rank of a host speaks for it."""

    def __init__(self, mesh: Mesh, hosts: Sequence[Sequence[int]], local: OneHost | None) -> None:
        self._mesh = mesh
        self._everybody = sorted(rank for host in hosts for rank in host)
        self._own = next(host for host in hosts if mesh.rank in host)
        self._speakers = [host[0] for host in hosts]
        self._host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
        self._local = local

    @property
    def _is_speaker(self) -> bool:
        return self._own[0] == self._mesh.rank

    def barrier(self, call: Call) -> None:
        self.allreduce(call, torch.zeros(1), Reduction(dist.ReduceOp.SUM, len(self._everybody)))

    def allreduce(self, call: Call, tensor: torch.Tensor, reduction: Reduction) -> None:
        """The sum of each host, then the sum of those, then back to all of the host."""
        if self._local is not None:
            self._local.reduce(call, tensor, 0, _Begun(reduction))
        else:
            reduction.begin(tensor)
        if self._is_speaker:
            steps = self._steps(call, self._speakers)
            if tensor.nbytes < _LARGE:
                messages.allreduce(steps, tensor, _Ended(reduction))
            else:
                self._reduce_in_shares(steps, tensor, _Ended(reduction))
        if self._local is not None:
            self._local.broadcast(call, tensor, 0)

    def _reduce_in_shares(self, steps: Any, tensor: torch.Tensor, reduction: Reduction) -> None:
        shares = list(tensor.tensor_split(steps.size))
        total = torch.empty_like(shares[steps.rank])
        messages.reduce_scatter(steps, total, shares, reduction)
        messages.allgather(steps, shares, total)

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> None:
        host = self._host_of[root]
        is_home = root in self._own
        if is_home and self._local is not None:
            self._local.broadcast(call, tensor, self._own.index(root))
        if self._is_speaker:
            messages.broadcast(self._steps(call, self._speakers), tensor, host)
        if not is_home and self._local is not None:
            self._local.broadcast(call, tensor, 0)

    def reduce(self, call: Call, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
        messages.reduce(self._all(call), tensor, root, reduction)

    def scatter(self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
        messages.scatter(self._all(call), output, inputs, root)

    def gather(self, call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        messages.gather(self._all(call), outputs, tensor, root)

    def allgather(self, call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        messages.allgather(self._all(call), outputs, tensor)

    def reduce_scatter(
        self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction
    ) -> None:
        messages.reduce_scatter(self._all(call), output, inputs, reduction)

    def all_to_all(self, call: Call, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        messages.all_to_all(self._all(call), outputs, inputs)

    def _all(self, call: Call) -> Any:
        return self._steps(call, self._everybody)

    def _steps(self, call: Call, ranks: Sequence[int]) -> Any:
        return _Steps(self._mesh, call, ranks)
