"""What users of references call on their owners. Methods get the rank of who calls as ``caller``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from farprop._torch import Future
from farprop.errors import UsageError
from farprop.ids import GlobalId
from farprop.protocol.references.records import ValueData
from farprop.runtime.async_results import Deferred, not_a_future, stop_of
from farprop.runtime.autograd.driver import BackwardDriver
from farprop.runtime.references.owned_values import ValueSlot
from farprop.runtime.references.rref_context import RRefContext
from farprop.wire.dialect import Dialect
from farprop.wire.message import Method


class OwnerMethods:
    """Runs on threads of the owner's pool. A method that has to wait for the value first returns a ``Deferred``."""

    def __init__(
        self,
        references: RRefContext,
        dialect: Dialect,
        backward: Callable[[Any, int | None, bool], None],
    ) -> None:
        self._references = references
        self._dialect = dialect
        self._backward = backward

    def table(self) -> dict[Method, Callable[..., Any]]:
        return {
            Method.CONTROL: self._references.operate,
            Method.FETCH: self.fetch,
            Method.REF_BACKWARD: self.backward,
        }

    def _slot(self, created_on: int, local_id: int, exists: bool) -> ValueSlot:
        return self._references.values.slot_of(GlobalId(created_on, local_id), exists)

    def fetch(self, caller: int, created_on: int, local_id: int, exists: bool) -> Any:
        """The value of a reference, for ``to_here``."""
        slot = self._slot(created_on, local_id, exists)
        # Where the function that makes the value raised, that was logged; it is not logged again for every fetch.
        return slot.value if slot.done and slot.error is None else Deferred(slot.when_done, slot.get)

    def type_of(self, created_on: int, local_id: int, exists: bool) -> Any:
        """The type of the value."""
        slot = self._slot(created_on, local_id, exists)
        return when_done(slot, lambda: type(slot.get()))

    def invoke(self, created_on: int, local_id: int, exists: bool, method: str, args: Any, kwargs: Any) -> Any:
        """Call a method of the value, for the proxies."""
        slot = self._slot(created_on, local_id, exists)
        return when_done(slot, partial(self.invoke_on, slot, method, args, kwargs))

    def invoke_on(self, slot: ValueData, method: str, args: Any, kwargs: Any) -> Any:
        function = self._dialect.method_of(slot.get(), method)
        try:
            result = function(*args, **kwargs)
        except TypeError:
            if callable(function):
                raise
            raise _no_method(slot.get(), method, function) from None
        if hasattr(function, "_wrapped_async_rpc_function"):
            if not isinstance(result, Future):
                raise not_a_future(function, result)
            return Deferred(lambda done: result.add_done_callback(lambda _: done()), result.wait, stop_of(result))
        return result

    def backward(
        self, caller: int, created_on: int, local_id: int, exists: bool, context_id: int | None, retain_graph: bool
    ) -> Any:
        """Run the backward pass from the value, for ``RRef.backward``."""
        slot = self._slot(created_on, local_id, exists)
        return when_done(slot, lambda: self._backward(slot.get(), context_id, retain_graph))


def _no_method(value: Any, name: str, found: Any) -> TypeError:
    kind = type(value).__qualname__
    return TypeError(
        f"{name!r} of a {kind} is a {type(found).__qualname__}, and not callable. A proxy of a reference has methods "
        f"only. To read an attribute, call a function on the owner: lambda rref: rref.local_value().{name}."
    )


def when_done(slot: ValueData, then: Callable[[], Any]) -> Any:
    """What ``then`` returns, now or once the slot is filled."""
    return then() if slot.done else Deferred(slot.when_done, then)


def backward_from_value(
    driver: BackwardDriver, value: Any, context_id: int | None, retain_graph: bool, fast: bool, timeout: float | None
) -> None:
    """``RRef.backward`` where the value is. Without a context it is a pass of torch's own."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"RRef should contain a tensor for .backward(), but it contains {type(value).__name__}.")
    if context_id is not None:
        driver.backward(context_id, [value], retain_graph, fast, timeout)
        return
    if not value.requires_grad:
        raise UsageError("The RRef's tensors does not require grad and does not have a grad_fn: there is no graph.")
    torch.autograd.backward([value], retain_graph=retain_graph)
