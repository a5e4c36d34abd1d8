"""Calls that stay inside a graph of ``torch.compile``.

The compiler breaks a graph at a call whose result it can't predict. A custom operator predicts its result with a *fake*
implementation. Each remote function needs_grad its own fake, so each has its own operator.

The autograd graph of the call is not part of the compiled graph. The operator keeps both ends of it. Its gradient is a
nested backward pass through the other workers, in the same context, inside the pass that reached the operator.
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
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.autograd.contexts import Context, current_context
from farprop.wire.function_names import name_of

_SCHEMA = (
    "(str to, Tensor anchor, Tensor[] tensors, bool[] needs_grad, bool recording, float timeout) -> (Tensor, Tensor)"
)
_GRADIENTS = "gradients(Tensor gradient, Tensor number, Tensor[] tensors, bool[] needs_grad) -> Tensor[]"

_library = torch.library.Library("farprop", "FRAGMENT")
_names: set[str] = set()
_numbers = itertools.count()


class _GradientSink(torch.autograd.Function):
    """Discards gradients."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None


# The compiler runs the backward function of an operator only if an argument requires grad. But a remote function may
# have parameters and no such argument. So all operators get this extra argument. It is not a leaf, so users do not see
# it among the gradients; and it is not empty, because gradients of empty tensors are skipped.
_anchor: Tensor = _GradientSink.apply(torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]


class _Call(NamedTuple):
    """Both ends of a call's autograd graph: copies of its arguments, and its result."""

    arguments: list[Tensor]
    result: Tensor


_calls: weakref.WeakKeyDictionary[Context, dict[int, _Call]] = weakref.WeakKeyDictionary()
_contexts: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()


def operator(function: Callable[..., Tensor], result: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a remote call that ``torch.compile`` keeps inside its graph, also with ``fullgraph=True``.

    Inside ``farprop.autograd.context()`` the call has gradients like any other, and ``farprop.autograd.backward`` runs
    its backward pass, in SMART mode. A backward pass through a call made outside a context raises ``UsageError``.

    Args:
        function: A function that takes tensors and returns one. Other workers must be able to import it.
        result: A function that takes the same tensors and returns an empty tensor with the shape and dtype of what
            ``function`` returns.

    Returns:
        A function: ``called(to, *tensors, timeout=...)`` does what ``rpc_sync(to, function, tensors)`` does.

    Raises:
        UsageError: Other workers can't look up ``function`` by its name.

    Example:
        ``scale_on = operator(scale, torch.empty_like)``, then ``scale_on("worker1", x)`` in a compiled function.
    """
    if name_of(function) is None:
        raise UsageError(
            f"Other workers can't look up {function!r} by its name. Define it at the top level of a module."
        )

    def call(
        to: str, anchor: Tensor, tensors: list[Tensor], needs_grad: list[bool], recording: bool, timeout: float
    ) -> tuple[Tensor, Tensor]:
        value, number = _call(to, function, tensors, needs_grad, recording, timeout)
        return value.detach().contiguous(), torch.tensor(number)

    def fake(
        to: str, anchor: Tensor, tensors: list[Tensor], needs_grad: list[bool], recording: bool, timeout: float
    ) -> tuple[Tensor, Tensor]:
        return result(*tensors), torch.empty((), dtype=torch.int64)

    name = _new_name(function)
    _library.define(name + _SCHEMA)
    _library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"farprop::{name}", fake, lib=_library)
    torch.library.register_autograd(f"farprop::{name}", _backward, setup_context=_keep_for_backward, lib=_library)
    operate = getattr(torch.ops.farprop, name)

    def called(to: str, *tensors: Tensor, timeout: float = UNSET_RPC_TIMEOUT) -> Tensor:
        recording = torch.is_grad_enabled()
        needs_grad = [recording and tensor.requires_grad for tensor in tensors]
        return operate(to, _anchor, list(tensors), needs_grad, recording, timeout)[0]  # type: ignore[no-any-return]

    return called


def _new_name(function: Any) -> str:
    """A new operator name. It is the same in every run, because the compiler's cache on disk contains it."""
    name = base = "call_" + re.sub(r"\W", "_", f"{function.__module__}_{function.__qualname__}")
    for again in itertools.count(2):
        if name not in _names:
            break
        name = f"{base}_{again}"
    _names.add(name)
    return name


def _call(
    to: str, function: Any, tensors: list[Tensor], needs_grad: list[bool], recording: bool, timeout: float
) -> tuple[Tensor, int]:
    """Make a call; returns its result, and the number under which the call's graph is kept."""
    context = current_context.get() if recording else None
    with torch.set_grad_enabled(context is not None):
        arguments = [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needs_grad, strict=True)]
        value = api.rpc_sync(to, function, tuple(arguments), timeout=timeout)
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{function.__qualname__} returned a {type(value).__name__} on {to}. A function that is called as an "
            "operator has to return a tensor."
        )
    number = next(_numbers)
    if context is not None:
        _contexts[number] = context
        _calls.setdefault(context, {})[number] = _Call(arguments, value)
    return value, number


# The backward pass


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, tensors, needs_grad, _, _ = inputs
    ctx.needs_grad = needs_grad
    ctx.save_for_backward(output[1], *tensors)


def _backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
    number, *tensors = ctx.saved_tensors
    of_anchor, *found = torch.ops.farprop.gradients(gradient, number, tensors, ctx.needs_grad)
    of_tensors = iter(found)
    return None, of_anchor, [next(of_tensors) if need else None for need in ctx.needs_grad], None, None, None


def _gradients(gradient: Tensor, number: Tensor, tensors: list[Tensor], needs_grad: list[bool]) -> list[Tensor]:
    """The gradients of the anchor and of the arguments that need one. Other workers' gradients go to the context."""
    context = _contexts.get(int(number))
    if context is None:
        raise UsageError(
            "A backward pass reached a call that was made outside a context, or in one that has ended. Make the call "
            "and run farprop.autograd.backward(context_id, [loss]) inside `with farprop.autograd.context()`."
        )
    if not context.passes:
        raise UsageError(
            "This graph continues on another worker. Run the backward pass with "
            "farprop.autograd.backward(context_id, [loss]), inside the context that the call was made in."
        )
    arguments, result = _calls[context][int(number)]
    if result.requires_grad:
        agent = current_agent()
        edge = (result.grad_fn, result.output_nr)
        # Another pass may reach this operator, so the graphs are kept until the context ends.
        agent.gradients.backward_from_edges(context, (edge,), [gradient], True, False, agent.rpc_timeout)
    found = [torch.zeros(())]
    for argument in arguments:
        if argument.requires_grad:
            with context.lock:
                own = context.gradients.pop(argument, None)
            found.append(torch.zeros_like(argument) if own is None else own)
    return found


def _fake_gradients(
    gradient: Tensor, number: Tensor, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
) -> list[Tensor]:
    return [torch.empty(()), *(torch.empty_like(t) for t, need in zip(tensors, needs_grad, strict=True) if need)]


_library.define(_GRADIENTS)
_library.impl("gradients", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("farprop::gradients", _fake_gradients, lib=_library)
