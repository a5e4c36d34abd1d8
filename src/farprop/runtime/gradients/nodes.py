"""The two nodes that stand for a message in the graphs of its two ends.

A pass starts behind a send, and ends at a receive, which notes the gradients that it gets. Their names are torch's,
because people look at them. No node leads to a send, so it need not be one of torch's, which are slow to make.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from farprop._torch import AUTOGRAD_KEY, LeafNode, is_key_excluded, is_view, node_type
from farprop.errors import UsageError
from farprop.protocol.passes import Target

# Makes torch give outputs a grad_fn. It gets no gradient.
_token = torch.empty(0, requires_grad=True)


class SendRpcBackward:
    """Where a message left this worker. ``next_functions`` are the edges of its tensors that require grad. If some
    changed devices on the way (``placed``), ``devices`` are those that they were on, where their gradients belong.
    """

    __slots__ = ("_edges", "_ends", "devices")

    def __init__(self, tensors: list[torch.Tensor], placed: bool = False) -> None:
        self.devices = [tensor.device for tensor in tensors] if placed else None
        # Not the tensors themselves: their memory may be freed. Leaves are kept alive by the graph in any case.
        self._ends: list[Any] = [_end_of(tensor) for tensor in tensors]
        self._edges: tuple[tuple[Any, int], ...] | None = None

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        # Several threads may ask first at the same time. Whoever got hold of the ends before they went has all of them.
        ends = self._ends
        if self._edges is None:
            self._edges = tuple([end if type(end) is tuple else _edge_of(end) for end in ends])
            self._ends = []
        return self._edges

    def name(self) -> str:
        return "torch::distributed::autograd::SendRpcBackward"

    def __repr__(self) -> str:
        return f"<SendRpcBackward of {len(self.next_functions)} tensors>"


def is_recorded() -> bool:
    """Whether torch notes what operators do: not inside of a custom operator, however grad mode is set."""
    return not is_key_excluded(AUTOGRAD_KEY)


def _end_of(tensor: torch.Tensor) -> Any:
    """The tensor's edge; the tensor itself if it is a leaf."""
    # Asking a view for its node takes a lock of torch's with the interpreter's in hand. Another thread that uses the
    # view may have the first and wait for the other. Operators give the interpreter's lock away, and get there too.
    if is_view(tensor) and is_recorded():
        return _edge_of(tensor)
    node = tensor.grad_fn
    return tensor if node is None else (node, tensor.output_nr)


def _edge_of(tensor: torch.Tensor) -> tuple[Any, int]:
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return _edge_of(tensor)
    # A sparse tensor has no views; a function that drops its input leads to any.
    made: Any = tensor.view_as(tensor) if tensor.layout is torch.strided else _touch(tensor)
    return made.grad_fn.next_functions[0]  # type: ignore[no-any-return]


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
    """What receives got in the run of the engine that this thread is in."""

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
# Without the layer of Python around it, which looks for transforms of functorch: they don't cross workers.
_receive: Any = super(torch.autograd.Function, _Receive).apply
RECEIVE_TYPE: Any = node_type(_Receive, _token, [torch.empty(0)], 0, None)


def _noting(name: str) -> Any:
    """A node does not show its hooks, so receives note that they have some: then whoever stops at them runs them."""
    register = getattr(RECEIVE_TYPE, name)

    def noting(node: Any, hook: Any) -> Any:
        node.is_hooked = True
        return register(node, hook)

    return noting


RECEIVE_TYPE.is_hooked = False
RECEIVE_TYPE.register_hook = _noting("register_hook")
RECEIVE_TYPE.register_prehook = _noting("register_prehook")
LEAF_TYPE: Any = LeafNode


def make_receive(tensors: list[torch.Tensor], context_id: int, target: Target) -> Any:
    """A node that these tensors, which were built from a message, are the outputs of. None where grad is off."""
    _receive(_token, tensors, context_id, target)
    return tensors[0].grad_fn
