"""What users of references call on their owners, found there by name. They run on threads of the pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from farprop._torch import Future
from farprop.ids import GlobalId
from farprop.runtime.cells import Cell, Later, not_a_future
from farprop.runtime.loop import loop_of_this_thread
from farprop.runtime.references import ReferenceSpace


def _agent() -> Any:
    loop = loop_of_this_thread()
    assert loop is not None, "this runs on threads of the pool only"
    return loop.home


def _space() -> ReferenceSpace:
    return _agent().references  # type: ignore[no-any-return]


def _when_done(cell: Cell, then: Callable[[], Any]) -> Any:
    return then() if cell.done else Later(cell.when_done, then)


def operate(sender: int, instance: str, number: int, operations: bytes) -> bytes:
    """Do a batch of operations on references."""
    return _space().operate(sender, instance, number, operations)


def fetch(created_on: int, local_id: int, exists: bool) -> Any:
    """The value of a reference, for ``to_here``."""
    cell = _space().cell_of(GlobalId(created_on, local_id), exists)
    # Where the function that makes the value raised, that was logged; it is not logged again for every fetch.
    return cell.value if cell.done and cell.error is None else Later(cell.when_done, cell.get)


def invoke(created_on: int, local_id: int, exists: bool, method: str, args: Any, kwargs: Any) -> Any:
    """Call a method of the value, for the proxies."""
    cell = _space().cell_of(GlobalId(created_on, local_id), exists)
    return _when_done(cell, partial(invoke_on, cell, method, args, kwargs))


def invoke_on(cell: Cell, method: str, args: Any, kwargs: Any) -> Any:
    function = _agent().dialect.method_of(cell.get(), method)
    result = function(*args, **kwargs)
    if hasattr(function, "_wrapped_async_rpc_function"):
        if not isinstance(result, Future):
            raise not_a_future(function, result)
        return Later(lambda done: result.add_done_callback(lambda _: done()), result.wait)
    return result


def backward(created_on: int, local_id: int, exists: bool, context_id: int, retain_graph: bool) -> Any:
    """Run the backward pass from the value, for ``RRef.backward``."""
    agent = _agent()
    cell = agent.references.cell_of(GlobalId(created_on, local_id), exists)
    return _when_done(cell, lambda: agent.backward_on_owner(cell.get(), context_id, retain_graph))


def _rref_typeof_on_owner(created_on: int, local_id: int, exists: bool) -> Any:
    """The type of the value. Torch's profiles show the call under this name."""
    cell = _space().cell_of(GlobalId(created_on, local_id), exists)
    return _when_done(cell, lambda: type(cell.get()))
