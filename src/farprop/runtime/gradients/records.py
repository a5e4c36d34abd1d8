"""What profiles show of a backward pass, under torch's names."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from farprop._torch import profiler_enabled

PASS = "torch::distributed::autograd::backward"
SEND = "torch::distributed::autograd::SendRpcBackward"
RECEIVE = "torch::distributed::autograd::RecvRpcBackward"

is_recording = profiler_enabled
_NOTHING = nullcontext()


def recorded(name: str) -> AbstractContextManager[object]:
    """``with recorded(PASS):`` shows the block in the profile that this thread is under, if any."""
    return torch.autograd.profiler.record_function(name) if is_recording() else _NOTHING
