"""Gradients of chosen tensors, wherever they are, and products with derivatives of second order.

Nothing here adds to the gradients of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farprop.errors import UsageError
from farprop.protocol.backward import PassId
from farprop.rpc.api import remote, rpc_async
from farprop.rpc.options import checked_timeout
from farprop.rpc.rref import RRef
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.autograd.contexts import Context, current_context
from farprop.runtime.autograd.grad import Wanted
from farprop.runtime.autograd.nodes import edge_of
from farprop.runtime.dynamo_disable import uncompiled
from farprop.wire.message import Gradient

Tensor = torch.Tensor
Input = Tensor | RRef[Tensor]
Result = Tensor | RRef[Tensor] | None


@uncompiled
def grad(
    context_id: int,
    outputs: Tensor | Sequence[Tensor],
    inputs: Input | Sequence[Input],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
    *,
    retain_graph: bool | None = None,
    timeout: float | None = None,
) -> tuple[Result, ...]:
    """Compute the gradients of ``inputs``, and return them. Those in the context stay as they are.

    Only the nodes between the outputs and the inputs run, on every worker. After an error nothing has changed.

    Args:
        context_id: The id that ``context()`` returned.
        outputs: Tensors here, each computed from tensors that require grad.
        inputs: Tensors here, or references (``RRef``) to tensors on any worker. They need not be leaves.
        grad_outputs: The gradients of the outputs. An output with one element may have None, for 1.
        create_graph: Whether to record the pass, so that the results can be differentiated. It keeps the graphs, too.
        allow_unused: Whether the result of an input that the outputs don't depend on is None; else it is an error.
        retain_graph: Whether to keep the graphs for another pass. By default, as ``create_graph``.
        timeout: The seconds that the pass may take; 0 disables the timeout. By default the timeout of calls.

    Returns:
        A gradient for each input: a tensor for a tensor. For an ``RRef`` an ``RRef`` to the gradient, which stays with
        the input's owner; its ``to_here()`` brings it here, with its graph.

    Raises:
        TypeError: An argument has the wrong type.
        UsageError: There is no such context, a tensor does not require grad, or an input is not used.
        BackwardError: A backward function or hook raised on another worker.
        ConnectionLostError: A worker is gone.
        RpcTimeoutError: The pass took longer than its timeout.
        Exception: What a backward function or hook raised in this worker's own graph.

    Example:
        ``(gradient,) = dist_autograd.grad(context_id, [loss], [x], create_graph=True)``
    """
    if type(context_id) is not int:
        raise TypeError(f"grad() takes a context id, which is an int, but got {type(context_id).__name__}.")
    agent = current_agent()
    context = agent.gradients.contexts.find(context_id)
    roots = _listed(outputs, "outputs")
    gradients = _gradients_of(roots, grad_outputs)
    held: list[Tensor] = []
    edges = tuple([edge_of(root, held) for root in roots])
    request = _Request(context, _listed(inputs, "inputs"), allow_unused)
    seconds = agent.services.rpc_timeout if timeout is None else checked_timeout(timeout)
    keep_graph = create_graph or bool(retain_graph)
    agent.gradients.backward_from_edges(context, edges, gradients, keep_graph, False, seconds, create_graph, request)
    return tuple(request.results)


@uncompiled
def hvp(
    context_id: int,
    output: Tensor,
    inputs: Input | Sequence[Input],
    vectors: Input | Sequence[Input],
    create_graph: bool = False,
    *,
    timeout: float | None = None,
) -> tuple[Tensor | RRef[Tensor], ...]:
    """Multiply the Hessian of a scalar with vectors. It takes two passes: one through the other, which is recorded.

    Args:
        context_id: The id that ``context()`` returned.
        output: The scalar.
        inputs: Tensors here, or references (``RRef``) to tensors on any worker.
        vectors: For each input a tensor of its shape. For an ``RRef`` it may be an ``RRef`` of the same owner.
        create_graph: Whether to record the second pass, too.
        timeout: The seconds that each pass may take; 0 disables the timeout. By default the timeout of calls.

    Returns:
        A product for each input, where the input is: for an ``RRef`` an ``RRef``. Zeros where the gradient is constant.

    Raises:
        TypeError: An argument has the wrong type.
        UsageError: As :func:`grad`; or the output does not depend on an input, or a vector has another shape than its
            input.
        BackwardError: A backward function or hook raised on another worker, or can't be differentiated twice.
        ConnectionLostError: A worker is gone.
        RpcTimeoutError: A pass took longer than its timeout.
        Exception: What a backward function or hook raised in this worker's own graph.

    Example:
        ``(product,) = dist_autograd.hvp(context_id, loss, [x], [v])``
    """
    listed, along = _listed(inputs, "inputs"), _vectors(inputs, vectors)
    first = grad(context_id, output, listed, None, create_graph=True, timeout=timeout)
    sums = _products(context_id, first, along)
    results: tuple[Result, ...] = (None,) * len(listed)
    if sums:
        results = grad(
            context_id, sums, listed, None, create_graph, allow_unused=True, retain_graph=True, timeout=timeout
        )
    return tuple([_zeros(item) if made is None else made for item, made in zip(listed, results, strict=True)])


@uncompiled
def jvp(
    context_id: int,
    outputs: Tensor | Sequence[Tensor],
    inputs: Input | Sequence[Input],
    vectors: Input | Sequence[Input],
    create_graph: bool = False,
    *,
    timeout: float | None = None,
) -> tuple[Tensor, ...]:
    """Multiply the Jacobian of the outputs with vectors: how fast they change if the inputs change along the vectors.

    It takes two backward passes: torch's forward mode can't cross workers. The first one is of a gradient that stands
    for any, and the second one differentiates it by that.

    Args:
        context_id: The id that ``context()`` returned.
        outputs: Tensors here.
        inputs: Tensors here, or references (``RRef``) to tensors on any worker.
        vectors: For each input a tensor of its shape. For an ``RRef`` it may be an ``RRef`` of the same owner.
        create_graph: Whether to record the second pass, too.
        timeout: The seconds that each pass may take; 0 disables the timeout. By default the timeout of calls.

    Returns:
        A product for each output.

    Raises:
        TypeError: An argument has the wrong type.
        UsageError: As :func:`grad`; or no output depends on an input, or a vector has another shape than its input.
        BackwardError: A backward function or hook raised on another worker, or can't be differentiated twice.
        ConnectionLostError: A worker is gone.
        RpcTimeoutError: A pass took longer than its timeout.
        Exception: What a backward function or hook raised in this worker's own graph.

    Example:
        ``(change,) = dist_autograd.jvp(context_id, [y], [x], [v])``
    """
    listed, along = _listed(inputs, "inputs"), _vectors(inputs, vectors)
    roots = _listed(outputs, "outputs")
    any_gradients = [torch.zeros_like(root, requires_grad=True) for root in roots]
    first = grad(context_id, roots, listed, any_gradients, create_graph=True, timeout=timeout)
    sums = _products(context_id, first, along)
    made = grad(
        context_id, sums, any_gradients, None, create_graph, allow_unused=True, retain_graph=True, timeout=timeout
    )
    pairs = zip(made, roots, strict=True)
    return tuple([torch.zeros_like(root) if one is None else one for one, root in pairs])  # type: ignore[misc]


def _vectors(inputs: Any, vectors: Any) -> list[Input]:
    """The vectors, one for each input."""
    given = [vectors] if isinstance(vectors, Tensor | RRef) else vectors
    count = 1 if isinstance(inputs, Tensor | RRef) else len(inputs)
    if not isinstance(given, list | tuple) or len(given) != count:
        raise TypeError(f"There must be a vector for each of the {count} inputs, in a list.")
    for item, vector in zip([inputs] if isinstance(inputs, Tensor | RRef) else inputs, given, strict=True):
        if not isinstance(vector, Tensor | RRef):
            raise TypeError(f"A vector is a tensor of its input's shape, or an RRef, and not {type(vector).__name__}.")
        if isinstance(item, Tensor) and isinstance(vector, Tensor):  # the others are compared where they meet
            _check_shape(vector, item)
    return list(given)


def _check_shape(vector: Tensor, item: Tensor) -> None:
    """Of another shape it may be broadcast, and the product would be that with other numbers."""
    if vector.shape != item.shape:
        raise UsageError(f"A vector has the shape {tuple(vector.shape)}, and its input has {tuple(item.shape)}.")


def _product(gradient: Tensor, vector: Tensor) -> Tensor:
    _check_shape(vector, gradient)
    return (gradient * vector).sum()


def _products(context_id: int, gradients: Sequence[Result], vectors: Sequence[Input]) -> list[Tensor]:
    """The scalar products of gradients and vectors, made where the gradients are; those that can be differentiated."""
    context = current_agent().gradients.contexts.find(context_id)
    outer = current_context.set(context)
    try:
        made: list[Any] = []
        with torch.enable_grad():
            for gradient, vector in zip(gradients, vectors, strict=True):
                if isinstance(gradient, RRef):
                    made.append(rpc_async(gradient.owner_name(), _dot, args=(gradient, vector)))
                else:
                    assert gradient is not None
                    made.append(_product(gradient, vector.to_here() if isinstance(vector, RRef) else vector))
            products = [product if isinstance(product, Tensor) else product.wait() for product in made]
    finally:
        current_context.reset(outer)
    return [product for product in products if product.requires_grad]


def _zeros(item: Input) -> Tensor | RRef[Tensor]:
    return remote(item.owner_name(), _zeros_like, args=(item,)) if isinstance(item, RRef) else torch.zeros_like(item)


def _listed(given: Any, what: str) -> list[Any]:
    listed = [given] if isinstance(given, Tensor | RRef) else given
    if not isinstance(listed, list | tuple) or not listed:
        raise TypeError(f"grad() takes a list of {what}, with one at least, but got {type(given).__name__}.")
    kinds = (Tensor,) if what == "outputs" else (Tensor, RRef)
    for number, item in enumerate(listed):
        if not isinstance(item, kinds):
            hint = " Compute what depends on it in a call, whose result is a tensor here." if kinds == (Tensor,) else ""
            raise TypeError(f"grad() takes tensors as {what}, but number {number} is {type(item).__name__}.{hint}")
        if isinstance(item, Tensor) and not item.requires_grad:
            raise UsageError(f"Number {number} of the {what} does not require grad, so it has no gradient.")
    return list(listed)


def _gradients_of(roots: list[Tensor], grad_outputs: Any) -> list[Gradient]:
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
    if given is None:
        given = [None] * len(roots)
    if not isinstance(given, list | tuple) or len(given) != len(roots):
        raise TypeError(f"grad() takes one of the grad_outputs for each of the {len(roots)} outputs.")
    gradients: list[Gradient] = []
    for number, (root, gradient) in enumerate(zip(roots, given, strict=True)):
        if gradient is None:
            if root.numel() != 1:
                raise UsageError(
                    f"Output {number} of shape {tuple(root.shape)} is not a scalar. Give its gradient in grad_outputs."
                )
            gradient = torch.ones_like(root, requires_grad=False)
        elif not isinstance(gradient, Tensor) or gradient.shape != root.shape:
            shape = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            raise UsageError(f"Output {number} has the shape {tuple(root.shape)}, and its gradient has {shape}.")
        gradients.append(gradient)
    return gradients


class _Request:
    """The inputs of a pass, here and on other workers, and their gradients."""

    def __init__(self, context: Context, inputs: list[Input], allow_unused: bool) -> None:
        self.results: list[Result] = [None] * len(inputs)
        self._context = context
        self._allow_unused = allow_unused
        self._here: dict[int, Tensor] = {}
        self._kept_here: set[int] = set()  # numbers of inputs given by an RRef of this worker
        self._away: dict[str, dict[int, RRef[Tensor]]] = {}  # by owner, then by number
        for number, item in enumerate(inputs):
            if isinstance(item, Tensor):
                self._here[number] = item
            elif item.is_owner():
                self._here[number] = _tensor_of(item)
                self._kept_here.add(number)
            else:
                self._away.setdefault(item.owner_name(), {})[number] = item
        self.wanted = Wanted.of(list(self._here.values()))

    def register(self, pass_id: PassId, seconds: float | None) -> None:
        self._call_owners(
            _want, {owner: (list(some.values()),) for owner, some in self._away.items()}, pass_id, seconds
        )

    def collect(self, pass_id: PassId, gradients: Sequence[Gradient], seconds: float | None) -> None:
        for number, gradient in zip(self._here, gradients, strict=True):
            if gradient is not None:
                self.results[number] = RRef(gradient) if number in self._kept_here else gradient
        taken = self._call_owners(_take, dict.fromkeys(self._away, ()), pass_id, seconds)
        for owner, results in taken.items():
            for number, result in zip(self._away[owner], results, strict=True):
                self.results[number] = result
        unused = [str(number) for number, result in enumerate(self.results) if result is None]
        if unused and not self._allow_unused:
            raise UsageError(
                f"The outputs of grad() don't depend on input {', '.join(unused)}. Pass allow_unused=True to get None "
                "for such inputs."
            )

    def _call_owners(
        self, function: Any, args: dict[str, tuple[Any, ...]], pass_id: PassId, seconds: float | None
    ) -> dict[str, Any]:
        """Call a function on the owners at the same time, in the context: they have to learn when it ends."""
        outer = current_context.set(self._context)
        try:
            timeout = 0 if seconds is None else seconds
            calls = {
                owner: rpc_async(owner, function, args=(self._context.id, *pass_id, *more), timeout=timeout)
                for owner, more in args.items()
            }
            return {owner: call.wait() for owner, call in calls.items()}
        finally:
            current_context.reset(outer)


# These run on the owners of inputs.


def _tensor_of(rref: RRef[Tensor]) -> Tensor:
    value = rref.local_value()
    if not isinstance(value, Tensor) or not value.requires_grad:
        what = "does not require grad" if isinstance(value, Tensor) else f"is of type {type(value).__name__}"
        raise UsageError(f"An input of grad() on {rref.owner_name()} {what}. Give RRefs to tensors that require grad.")
    return value


def _want(context_id: int, origin: int, number: int, rrefs: list[RRef[Tensor]]) -> None:
    """A pass is about to begin that computes the gradients of these tensors."""
    context = current_agent().gradients.contexts.find(context_id)
    context.wanted[PassId(origin, number)] = Wanted.of([_tensor_of(rref) for rref in rrefs])


def _take(context_id: int, origin: int, number: int) -> list[RRef[Tensor] | None]:
    """The gradients that the pass has computed for them."""
    gradients = current_agent().gradients.take_gradients(context_id, PassId(origin, number))
    return [None if gradient is None else RRef(gradient) for gradient in gradients]


def _dot(gradient: RRef[Tensor], vector: Input) -> Tensor:
    return _product(gradient.local_value(), vector.local_value() if isinstance(vector, RRef) else vector)


def _zeros_like(rref: RRef[Tensor]) -> Tensor:
    return torch.zeros_like(rref.local_value())
