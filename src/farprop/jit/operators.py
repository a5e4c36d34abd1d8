"""Calls that stay inside a graph of ``torch.compile``.

The compiler cuts a graph at a call whose result it can't foresee. A custom operator says what its result will be. Each
function that is called so has an operator of its own, because what it says is a function, too.

The graph of a call is not in the compiler's. The operator keeps its two ends; its gradient is a backward pass of its
own through the other workers, in the same context, inside of the pass that reached it.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farprop.errors import UsageError
from farprop.rpc import api
from farprop.rpc.constants import UNSET_RPC_TIMEOUT
from farprop.runtime.current import current_agent
from farprop.runtime.gradients.contexts import Context, current_context
from farprop.wire.functions import name_of

_SCHEMA = "(str to, Tensor anchor, Tensor[] tensors, bool[] needs, bool records, float timeout) -> (Tensor, Tensor)"
_GRADIENTS = "gradients(Tensor gradient, Tensor number, Tensor[] tensors, bool[] needs) -> Tensor[]"

_library = torch.library.Library("farprop", "FRAGMENT")
_names: set[str] = set()
_numbers = itertools.count()


class _Ending(torch.autograd.Function):
    """Where gradients end."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None


# The compiler gives a result a gradient if an argument has one, and runs what computes gradients of arguments. But a
# function that is called may have parameters, and no such argument. So operators get this one. It is no leaf, so that
# it is not among the gradients that users see; and not empty, because gradients of empty tensors are left out.
_anchor: Tensor = _Ending.apply(torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]


class _Call(NamedTuple):
    """The ends of a call's graph: copies of its arguments, and its result."""

    arguments: list[Tensor]
    result: Tensor


_calls: weakref.WeakKeyDictionary[Context, dict[int, _Call]] = weakref.WeakKeyDictionary()
_contexts: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()


def operator(function: Callable[..., Tensor], result: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Declare calls of ``function`` that ``torch.compile`` keeps inside of its graph, also with ``fullgraph=True``.

    Args:
        function: takes tensors and returns one; other workers can import it.
        result: takes the same tensors, and returns an empty one of the shape and dtype that ``function`` will return.

    Returns a function: ``called(to, *tensors)`` is ``rpc_sync(to, function, tensors)``, and takes a ``timeout``, too.

    In a ``farprop.autograd.context()`` the call has gradients as others have, and ``farprop.autograd.backward`` runs
    them, in SMART mode. A backward pass through a call that was made outside of a context raises ``UsageError``.
    """
    if name_of(function) is None:
        raise UsageError(f"{function!r} has no name by which other workers find it. Define it in a module.")

    def call(
        to: str, anchor: Tensor, tensors: list[Tensor], needs: list[bool], records: bool, timeout: float
    ) -> tuple[Tensor, Tensor]:
        value, number = _call(to, function, tensors, needs, records, timeout)
        return value.detach().contiguous(), torch.tensor(number)

    def foresee(
        to: str, anchor: Tensor, tensors: list[Tensor], needs: list[bool], records: bool, timeout: float
    ) -> tuple[Tensor, Tensor]:
        return result(*tensors), torch.empty((), dtype=torch.int64)

    name = _new_name(function)
    _library.define(name + _SCHEMA)
    _library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"farprop::{name}", foresee, lib=_library)
    torch.library.register_autograd(f"farprop::{name}", _backward, setup_context=_keep_for_backward, lib=_library)
    operate = getattr(torch.ops.farprop, name)

    def called(to: str, *tensors: Tensor, timeout: float = UNSET_RPC_TIMEOUT) -> Tensor:
        records = torch.is_grad_enabled()
        needs = [records and tensor.requires_grad for tensor in tensors]
        return operate(to, _anchor, list(tensors), needs, records, timeout)[0]  # type: ignore[no-any-return]

    return called


def _new_name(function: Any) -> str:
    """Names are in the compiler's cache on disk, so they are the same in each run."""
    name = base = "call_" + re.sub(r"\W", "_", f"{function.__module__}_{function.__qualname__}")
    for again in itertools.count(2):
        if name not in _names:
            break
        name = f"{base}_{again}"
    _names.add(name)
    return name


def _call(
    to: str, function: Any, tensors: list[Tensor], needs: list[bool], records: bool, timeout: float
) -> tuple[Tensor, int]:
    """The result, and the number under which the call's graph is kept."""
    context = current_context.get() if records else None
    with torch.set_grad_enabled(context is not None):
        arguments = [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needs, strict=True)]
        value = api.rpc_sync(to, function, tuple(arguments), timeout=timeout)
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{function.__qualname__} returned a {type(value).__name__} on {to}. A function that is called as an "
            "operator returns a tensor."
        )
    number = next(_numbers)
    if context is not None:
        _contexts[number] = context
        _calls.setdefault(context, {})[number] = _Call(arguments, value)
    return value, number


# The backward pass


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, tensors, needs, _, _ = inputs
    ctx.needs = needs
    ctx.save_for_backward(output[1], *tensors)


def _backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
    number, *tensors = ctx.saved_tensors
    of_anchor, *found = torch.ops.farprop.gradients(gradient, number, tensors, ctx.needs)
    of_tensors = iter(found)
    return None, of_anchor, [next(of_tensors) if need else None for need in ctx.needs], None, None, None


def _gradients(gradient: Tensor, number: Tensor, tensors: list[Tensor], needs: list[bool]) -> list[Tensor]:
    """The gradients of the anchor and of the arguments that need one. Those of other workers' go to the context."""
    context = _contexts.get(int(number))
    if context is None:
        raise UsageError(
            "A backward pass came to a call made outside of a context, or in one that has ended. Make the call "
            "and run farprop.autograd.backward(context_id, [loss]), inside of `with farprop.autograd.context()`."
        )
    if not context.passes:
        raise UsageError(
            "This graph goes on at another worker. Run the backward pass with "
            "farprop.autograd.backward(context_id, [loss]), inside of the context that the call was made in."
        )
    arguments, result = _calls[context][int(number)]
    if result.requires_grad:
        agent = current_agent()
        edge = (result.grad_fn, result.output_nr)
        # Another pass may come through here, so the graphs are kept, as long as the context.
        agent.gradients.backward(context, (edge,), [gradient], True, False, agent.rpc_timeout)
    found = [torch.zeros(())]
    for argument in arguments:
        if argument.requires_grad:
            with context.lock:
                own = context.gradients.pop(argument, None)
            found.append(torch.zeros_like(argument) if own is None else own)
    return found


def _foresee_gradients(
    gradient: Tensor, number: Tensor, tensors: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor]:
    return [torch.empty(()), *(torch.empty_like(t) for t, need in zip(tensors, needs, strict=True) if need)]


_library.define(_GRADIENTS)
_library.impl("gradients", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("farprop::gradients", _foresee_gradients, lib=_library)
