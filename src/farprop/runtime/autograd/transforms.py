"""Tensors of torch's function transforms and of forward mode: they mean something in their own process only."""

from __future__ import annotations

from typing import Any

import torch

from farprop._torch import current_transform, tree_map_only
from farprop.errors import UsageError

_INSTEAD = (
    "Apply the transform on the other worker, to a function that is called there, or use farprop.autograd.grad, hvp "
    "and jvp, which go through calls."
)


def explanation() -> UsageError | None:
    """If this thread is inside of a transform, the error to raise after a call could not be encoded."""
    transform = current_transform()
    if transform is None:
        return None
    kind = str(transform.key()).rpartition(".")[2].lower()
    return UsageError(
        f"A call inside of a transform of torch.func ({kind}) has a tensor that the transform has wrapped. It can't be "
        f"sent to another worker. {_INSTEAD}"
    )


def refuse_dual(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if an argument has a tangent of forward mode: it would be lost on the way."""

    def check(tensor: torch.Tensor) -> None:
        if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            raise UsageError(
                "A call has a dual tensor of torch's forward mode, whose tangent can't be sent to another worker. "
                f"{_INSTEAD}"
            )

    tree_map_only(torch.Tensor, check, (args, kwargs))
