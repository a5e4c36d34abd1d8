"""The two nodes that stand for a message in the graphs of its two ends.

They are never run as other nodes are: a pass starts behind a send and stops in front of a receive. Their names are
torch's, because people look at them.
"""

from __future__ import annotations

from typing import Any

import torch

from farprop.errors import UsageError
from farprop.protocol.passes import Target

# Makes torch give outputs a grad_fn. It gets no gradient.
_token = torch.empty(0, requires_grad=True)


def _forward_of_send(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
    return torch.empty(0)


def _forward_of_receive(
    ctx: Any, token: torch.Tensor, tensors: list[torch.Tensor], context_id: int, target: Target
) -> tuple[torch.Tensor, ...]:
    ctx.set_materialize_grads(False)
    ctx.context_id = context_id
    ctx.target = target
    ctx.count = len(tensors)
    return tuple(tensors)


def _refuse(ctx: Any, *gradients: Any) -> Any:
    raise UsageError(
        "This graph goes on at another worker. Run the backward pass with "
        "farprop.autograd.backward(context_id, [loss]) inside of the context that the call was made in."
    )


def _function(name: str, forward: Any) -> Any:
    return type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(_refuse)})


_Send = _function("torch::distributed::autograd::SendRpc", _forward_of_send)
_Receive = _function("torch::distributed::autograd::RecvRpc", _forward_of_receive)
RECEIVE_TYPE: Any = _Receive._backward_cls
LEAF_TYPE: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
SEND_NAME = "torch::distributed::autograd::SendRpcBackward"
RECEIVE_NAME = "torch::distributed::autograd::RecvRpcBackward"


def make_send(tensors: list[torch.Tensor]) -> Any:
    """A node whose ``next_functions`` are the edges of these tensors."""
    with torch.enable_grad():
        return _Send.apply(*tensors).grad_fn


def make_receive(tensors: list[torch.Tensor], context_id: int, target: Target) -> Any:
    """A node that these tensors, which were built from a message, are the outputs of. None where grad is off."""
    _Receive.apply(_token, tensors, context_id, target)
    return tensors[0].grad_fn
