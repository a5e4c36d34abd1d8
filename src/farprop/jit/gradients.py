"""``farprop.autograd`` in compiled code."""

from __future__ import annotations

from typing import Any

from farprop import autograd
from farprop._torch import DictType, IntType, ListType, TensorType
from farprop.jit.python_functions import ANY, NONE, python_function

_INT, _TENSOR = IntType.get(), TensorType.get()


def _get_gradients(context_id: Any) -> Any:
    return autograd.get_gradients(context_id)


def _backward(context_id: Any, roots: Any, retain_graph: Any, mode: Any, timeout: Any) -> None:
    autograd.backward(context_id, roots, bool(retain_graph), mode=mode, timeout=timeout)


get_gradients = python_function(_get_gradients, "get_gradients", DictType(_TENSOR, _TENSOR), context_id=_INT)
dist_backward = python_function(
    _backward,
    "dist_backward",
    NONE,
    context_id=_INT,
    roots=ListType(_TENSOR),
    retain_graph=ANY,
    mode=ANY,
    timeout=ANY,
)
