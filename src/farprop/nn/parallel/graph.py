"""What a forward pass has left behind: its outputs, and the parameters that lead to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from farprop.runtime.gradients.contexts import current_context


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


def leaves_behind(outputs: Iterable[torch.Tensor]) -> set[torch.Tensor]:
    """The leaves that the outputs were computed from, here; those that were sent to other workers count, too."""
    stack: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    leaves = {output for output in outputs if output.requires_grad and output.grad_fn is None}
    context = current_context.get()
    if context is not None:
        # The way from a value that came back to those that went out is not in the graph of this worker.
        stack.extend(node for send in list(context.sends.values()) for node, _ in send.next_functions)
    seen = set()
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
