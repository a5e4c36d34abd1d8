"""``farprop.autograd`` has every name that programs may take from ``torch.distributed.autograd``."""

from __future__ import annotations

import typing
from types import ModuleType

import torch.distributed.autograd as theirs

import farprop.autograd as ours


def test_every_name_of_torchs_is_there() -> None:
    imported = {"annotations", *dir(typing)}
    names = {n for n, v in vars(theirs).items() if not n.startswith("__") and not isinstance(v, ModuleType)} - imported
    assert {"backward", "context", "get_gradients", "is_available", "_is_valid_context"} <= names
    assert names <= set(dir(ours))
