"""Finds out which parameters were used: in the graph of this rank, and on any rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import Node

from farprop.distributed.interop import wait_for
from farprop.runtime.autograd.contexts import current_context


class UsedParameters:
    """Which parameters any rank used. A parameter that no rank used keeps the gradient that it has, or none.

    Args:
        count: The number of parameters.
        device: Where the ranks exchange their counts.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.used_by_no_rank: set[int] = set()
        """As of the last exchange between the ranks."""
        self._used_here = bytearray(count)  # since the last reduction, which may be several backward passes ago
        self._device = device
        self._in_flight: tuple[dist.Work, torch.Tensor] | None = None  # with the counts that the work writes

    def mark(self, index: int) -> None:
        """Note that this rank used a parameter."""
        self._used_here[index] = 1

    def launch(self, group: dist.ProcessGroup) -> None:
        """Start the exchange between the ranks."""
        counts = torch.tensor(list(self._used_here), dtype=torch.int32, device=self._device)
        self._in_flight = group.allreduce([counts], dist.AllreduceOptions()), counts

    def wait(self) -> None:
        """Wait for the exchange, if one was started."""
        if self._in_flight is not None:
            (work, counts), self._in_flight = self._in_flight, None
            wait_for(work)
            self.used_by_no_rank = {index for index, count in enumerate(counts.tolist()) if not count}

    def abort(self) -> None:
        """Ignore an exchange that is under way."""
        self._in_flight = None

    def reset(self) -> None:
        """Start anew after a reduction."""
        self._used_here = bytearray(len(self._used_here))


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module returned."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)
    elif is_dataclass(output):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name))


def reachable_leaves(outputs: Sequence[torch.Tensor]) -> set[torch.Tensor]:
    """The leaves of this worker that the outputs depend on, also through calls to other workers."""
    stack: list[Node | None] = [output.grad_fn for output in outputs]
    leaves = {output for output in outputs if output.requires_grad and output.grad_fn is None}
    context = current_context.get()
    if context is not None:
        # This worker's graph has no edge from a received tensor to the tensors that were sent before. So everything
        # that was sent counts as used.
        stack.extend(node for send in list(context.sends.values()) for node, _ in send.next_functions)
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(leaf)
        stack.extend(following for following, _ in node.next_functions)
    return leaves
