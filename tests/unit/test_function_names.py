"""Which functions are sent by name, and how names are resolved."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch

from farprop.wire.function_names import FunctionNotFound, name_of, resolve


def _decorated() -> None: ...


def test_names_of_functions() -> None:
    assert name_of(torch.add) == b"torch:add"
    assert name_of(min) == b"builtins:min"
    assert name_of(Path.exists) == b"pathlib:Path.exists"
    assert name_of(os.path.join) is not None
    for nameless in (lambda: 1, functools.partial(min), "x".join, [].append, Path().exists):
        assert name_of(nameless) is None
    for function in (torch.add, min, Path.exists, torch.nn.Linear, torch.nn.functional.relu):
        name = name_of(function)
        assert name is not None
        assert resolve(name) is function


def test_shadowed_function_has_no_name() -> None:
    wrapped = functools.wraps(_decorated)(lambda: 1)
    assert wrapped.__qualname__ == "_decorated"
    assert name_of(wrapped) is None


@pytest.mark.parametrize("name", [b"no.such.module:f", b"os:no_such", b"os:path.no_such", b"", b":", b"os"])
def test_unresolvable_names_raise(name: bytes) -> None:
    with pytest.raises((FunctionNotFound, ValueError)):
        resolve(name)
