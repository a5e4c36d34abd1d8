"""The send node and the recv node of a message, in the graphs of its sender and its receiver.

A backward pass enters a worker's graph at a send node and leaves it at a recv node, which records its gradients. The
nodes have torch's names, because users see them. No other node leads to a send node, so it need not be a node of
torch's, which are slow to make.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from farprop._torch import AUTOGRAD_KEY, LeafNode, is_key_excluded, is_view, node_type
from farprop.errors import UsageError
from farprop.protocol.backward import Target

# An input that requires grad, so that torch gives the outputs a grad_fn. It gets no gradient.
_token = torch.empty(0, requires_grad=True)
LEAF_TYPE: Any = LeafNode


class SendRpcBackward:
    """The send node of a message.

    ``next_functions`` are the edges of its tensors that require grad. If tensors changed devices on the way
    (``placed``), ``devices`` are their devices on this worker, to which their gradients are moved.
    """

    __slots__ = ("_ends", "_held", "devices", "edges")

    def __init__(self, tensors: Sequence[torch.Tensor], placed: bool = False) -> None:
        self.devices = [tensor.device for tensor in tensors] if placed else None
        self._held: list[torch.Tensor] = []
        # Not the tensors themselves, so that their memory can be freed. The graph keeps leaves alive in any case.
        self._ends: list[Any] = [_end_of(tensor, self._held) for tensor in tensors]
        # The cached ``next_functions``; None while ``_ends`` has leaves whose edges are not known.
        self.edges: tuple[tuple[Any, int], ...] | None = None
        if all(type(end) is tuple for end in self._ends):
            self.edges = tuple(self._ends)

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        # Several threads may get here at the same time. A thread that read ``_ends`` before it is cleared has the list.
        ends = self._ends
        if self.edges is None:
            self.edges = tuple([end if type(end) is tuple else _edge_of(end, self._held) for end in ends])
            self._ends = []
        return self.edges

    def name(self) -> str:
        return "torch::distributed::autograd::SendRpcBackward"

    def __repr__(self) -> str:
        return f"<SendRpcBackward of {len(self.next_functions)} tensors>"


def is_recorded() -> bool:
    """Whether torch records operators in a graph. Inside of a custom operator it does not, even in grad mode."""
    return not is_key_excluded(AUTOGRAD_KEY)


def edge_of(tensor: torch.Tensor, held: list[torch.Tensor]) -> tuple[Any, int]:
    """The edge that a tensor's gradient arrives at. ``held`` gets what keeps the node of a leaf alive."""
    if tensor.grad_fn is None or is_view(tensor):
        return _edge_of(tensor, held)
    return tensor.grad_fn, tensor.output_nr


def _end_of(tensor: torch.Tensor, held: list[torch.Tensor]) -> Any:
    """The tensor's edge; the tensor itself if it is a leaf and torch does not record."""
    # Reading a view's grad_fn takes a lock of torch's while the interpreter's lock is held. Another thread that uses
    # the view may hold torch's lock and wait for the interpreter's. Operators release the interpreter's lock first.
    if is_view(tensor) and is_recorded():
        return _edge_of(tensor, held)
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    # Before the message is sent: the called function may call back and use the leaf here, on another thread.
    return _edge_of(tensor, held) if is_recorded() else tensor


def _edge_of(tensor: torch.Tensor, held: list[torch.Tensor]) -> tuple[Any, int]:
    """The tensor's edge. If the tensor is a leaf, ``held`` gets a tensor that keeps the leaf's node alive.

    Torch refers to the node of a leaf weakly, and locks the leaf to look it up. If the node is gone, or only Python
    refers to it, torch waits for the interpreter's lock meanwhile, and deadlocks with a thread that has the
    interpreter's lock and waits for the leaf's: one that applies a ``torch.autograd.Function`` to it. A tensor that was
    computed from the leaf refers to the node, so no look-up has to wait.
    """
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return _edge_of(tensor, held)
    # A sparse tensor has no views. An autograd function that ignores its input works for any tensor.
    made: Any = tensor.view_as(tensor) if tensor.layout is torch.strided else _touch(tensor)
    edge: tuple[Any, int] = made.grad_fn.next_functions[0]
    if type(edge[0]) is LEAF_TYPE:
        held.append(made)
    return edge


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


_touch: Any = _Touch.apply


def _forward_of_receive(
    ctx: Any, token: torch.Tensor, tensors: list[torch.Tensor], context_id: int, target: Target
) -> tuple[torch.Tensor, ...]:
    ctx.set_materialize_grads(False)
    ctx.context_id = context_id
    ctx.target = target
    ctx.count = len(tensors)
    ctx.on_cpu = all(tensor.is_cpu for tensor in tensors)
    return tuple(tensors)


class _Noting(threading.local):
    """The gradients that recv nodes recorded in this thread's run of the engine."""

    gradients: dict[tuple[Any, int], torch.Tensor] | None = None


noting = _Noting()


def _note(ctx: Any, *gradients: Any) -> Any:
    noted = noting.gradients
    if noted is not None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                noted[ctx, index] = gradient
        return None, None, None, None
    raise UsageError(
        "This graph goes on at another worker. Run the backward pass with "
        "farprop.autograd.backward(context_id, [loss]) inside of the context that the call was made in."
    )


_Receive: Any = type(
    "torch::distributed::autograd::RecvRpc",
    (torch.autograd.Function,),
    {"forward": staticmethod(_forward_of_receive), "backward": staticmethod(_note)},
)
# Skips the Python wrapper, which handles functorch's transforms: they don't cross workers.
_receive: Any = super(torch.autograd.Function, _Receive).apply
RECEIVE_TYPE: Any = node_type(_Receive, _token, [torch.empty(0)], 0, None)


def _noting(name: str) -> Any:
    """Wrap a method that registers hooks. A node does not show its hooks, so recv nodes record that they have some."""
    register = getattr(RECEIVE_TYPE, name)

    def noting(node: Any, hook: Any) -> Any:
        node.is_hooked = True
        return register(node, hook)

    return noting


RECEIVE_TYPE.is_hooked = False
RECEIVE_TYPE.register_hook = _noting("register_hook")
RECEIVE_TYPE.register_prehook = _noting("register_prehook")


def make_receive(tensors: list[torch.Tensor], context_id: int, target: Target) -> Any:
    """Make the recv node of a message, with its tensors as outputs; None if grad mode is off."""
    _receive(_token, tensors, context_id, target)
    return tensors[0].grad_fn
