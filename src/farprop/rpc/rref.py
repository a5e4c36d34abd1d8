"""``RRef``: a reference to a value on some worker."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import torch

from farprop._torch import ScriptModule
from farprop.errors import ConnectionLostError, ReferenceLostError, UsageError, renewed
from farprop.ids import WorkerInfo
from farprop.protocol.references.records import OwnedValue, UserReference
from farprop.protocol.references.states import User
from farprop.rpc import internal
from farprop.rpc.constants import UNSET_RPC_TIMEOUT
from farprop.rpc.options import checked_timeout
from farprop.rpc.rref_proxy import RRefProxy, let_go
from farprop.runtime import owner_calls
from farprop.runtime.agent import Agent
from farprop.runtime.cells import Cell
from farprop.runtime.creation import CreationCall
from farprop.runtime.current import current_agent
from farprop.runtime.futures import Future
from farprop.runtime.links import timeout_error
from farprop.runtime.references import Held, ReferenceSpace, describe
from farprop.runtime.uncompiled import uncompiled
from farprop.wire.codec import arrival, reference_kinds, travel_along

T = TypeVar("T")

_PACKAGE = __name__.partition(".")[0] + "."


def call_site() -> str:
    """The line of the program that called farprop."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class RRef(Generic[T]):
    """A reference to a value that lives on a worker, its owner.

    ``RRef(value)`` makes this worker the owner; ``rpc.remote`` makes a value on another one. An RRef can be in the
    arguments and the result of any call, and can't be pickled otherwise. The owner keeps the value until no RRef to
    it is left on any worker.
    """

    __slots__ = ("__weakref__", "_creation", "_held", "_own", "_owner_name", "_profiled", "_space", "_type")

    _own: OwnedValue | None
    _held: Held | None

    @uncompiled
    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = current_agent()
        if type_hint is None and isinstance(value, ScriptModule):
            raise UsageError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint. Give the "
                "class that is decorated with @torch.jit.interface: RRef(module, type_hint=Interface)."
            )
        cell = Cell(site=call_site().encode())
        cell.fill(value)
        self._space = agent.references
        self._own = self._space.own(cell)
        self._held = None
        self._creation: CreationCall | None = None
        self._type: Any = None
        self._profiled: torch.futures.Future[Any] | None = None
        self._owner_name = agent.get_worker_info().name

    @classmethod
    def _of(
        cls, item: Held | OwnedValue, space: ReferenceSpace, owner_name: str, creation: CreationCall | None = None
    ) -> RRef[Any]:
        rref: RRef[Any] = cls.__new__(cls)
        rref._space = space
        rref._own, rref._held = (item, None) if isinstance(item, OwnedValue) else (None, item)
        rref._creation = creation
        rref._type = rref._profiled = None
        rref._owner_name = owner_name
        return rref

    @property
    def _record(self) -> UserReference:
        assert self._held is not None
        return self._held.record

    # Whose it is

    def is_owner(self) -> bool:
        """Whether the value is on this worker."""
        return self._own is not None

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        return current_agent().get_worker_info(self._owner_name)

    def owner_name(self) -> str:
        """The name of the worker that has the value."""
        return self._owner_name

    def confirmed_by_owner(self) -> bool:
        """Whether the owner counts this reference: from then on it keeps the value for it."""
        return self._held is None or self._held.record.state is User.CONFIRMED

    # The value

    @uncompiled
    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """The value itself on its owner, a copy of it elsewhere. Waits until it is there.

        Raises what the function that should have made it raised; ``ReferenceLostError`` if the owner died.
        """
        if timeout != UNSET_RPC_TIMEOUT:
            timeout = checked_timeout(timeout)
        if self._own is not None:
            return self._value_here(timeout)
        record = self._record
        agent = self._checked_agent("to_here() on it")
        rref = record.rref
        args = (rref.created_on, rref.local_id, record.exists)
        began = time.monotonic()
        try:
            return agent.call_sync(self._owner_name, owner_calls.fetch, args, {}, timeout)  # type: ignore[no-any-return]
        except ReferenceLostError:
            raise
        except ConnectionLostError:
            self._look_after_owner("to_here() on it", timeout, began)
        # The owner lives and only the connection was lost. Fetching twice does no harm.
        left = self._time_left(timeout, began)
        return agent.call_sync(self._owner_name, owner_calls.fetch, args, {}, left)  # type: ignore[no-any-return]

    def _look_after_owner(self, use: str, timeout: float, began: float) -> None:
        """The connection to the owner was lost during a call: raise if the value is lost with it."""
        current_agent().look_now(self._record.owner, self._time_left(timeout, began))
        self._checked_agent(use)

    def _time_left(self, timeout: float, began: float) -> float:
        seconds = current_agent().rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
        left = began + seconds - time.monotonic()
        if seconds and left <= 0:
            raise timeout_error(self._owner_name, seconds)
        return left if seconds else 0.0

    def _checked_agent(self, use: str) -> Agent:
        assert self._held is not None
        self._held.check(use)
        agent = current_agent()
        if agent.references is not self._space:
            raise UsageError(f"{self} is of an earlier init_rpc, and can't be used after it.")
        return agent

    def _value_here(self, timeout: float) -> T:
        assert self._own is not None
        cell = self._own.cell
        if not cell.done:
            seconds = current_agent().rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
            if not cell.wait(seconds):
                raise timeout_error(self._owner_name, seconds)
        return cell.get()  # type: ignore[no-any-return]

    @uncompiled
    def local_value(self) -> T:
        """The value itself, on its owner. Waits until it is there."""
        if self._own is not None:
            return self._value_here(0.0)
        record = self._record
        raise UsageError(
            f"For UserRRef(rref_id={record.rref}, fork_id={record.fork}), can't call localValue() on user "
            f"{current_agent().get_worker_info()}. Call it on owner {self.owner()}."
        )

    # Calls on the value

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """``rref.rpc_sync().method(...)`` calls a method of the value on its owner, and returns its result."""
        from farprop.rpc import api

        return RRefProxy(self, api.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """``rref.rpc_async().method(...)`` calls a method of the value on its owner, and returns a future."""
        from farprop.rpc import api

        return RRefProxy(self, api.rpc_async, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """``rref.remote().method(...)`` calls a method of the value on its owner, and returns an RRef to its result."""
        from farprop.rpc import api

        return RRefProxy(self, api.remote, timeout)

    @uncompiled
    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass from the value, where it is.

        Args:
            dist_autograd_ctx_id: the id of the context that the value was computed in; without one, the pass stays on
                the owner and fills ``.grad`` there.
            retain_graph: keep the graph for another pass.
        """
        if self._own is not None:
            agent = current_agent()
            value = self._value_here(UNSET_RPC_TIMEOUT)
            agent.backward_on_owner(value, dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise UsageError("User RRefs require 'dist_autograd_ctx_id' to be specified: the id of a context.")
        agent = self._checked_agent("backward on it")
        rref = self._record.rref
        args = (rref.created_on, rref.local_id, self._record.exists, dist_autograd_ctx_id, retain_graph)
        agent.call_sync(self._owner_name, owner_calls.backward, args, {}, UNSET_RPC_TIMEOUT)

    # What torch's tests and tools look at

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value; with ``blocking=False`` a future of it, always the same one."""
        if self._own is not None and blocking:
            return type(self._value_here(timeout))
        if self._type is None:
            self._type = self._ask_for_type(timeout)
        if not blocking:
            return self._type
        try:
            return self._type.wait()
        except Exception:
            self._type = None  # ask again next time
            raise

    def _ask_for_type(self, timeout: float) -> torch.futures.Future[Any]:
        from farprop.rpc import api

        if self._own is None:
            self._checked_agent("_get_type() on it")
            rref = self._record.rref
            args = (rref.created_on, rref.local_id, self._record.exists)
            asked = api.rpc_async(self._owner_name, owner_calls._rref_typeof_on_owner, args, timeout=timeout)
            asked.add_done_callback(partial(let_go, self))  # the value must not be freed before
            return asked
        future = Future()
        cell = self._own.cell

        def done() -> None:
            if cell.error is None:
                future.set_result(type(cell.value))
            else:
                future.set_exception(renewed(cell.error))

        cell.when_done(done)
        return future

    def _get_future(self) -> torch.futures.Future[Any]:
        """Done when the owner has made the value, or failed to."""
        if self._creation is None:
            raise UsageError(f"{self} does not come from rpc.remote() on this worker, so there is no future for it.")
        return self._creation.future()

    def _get_profiling_future(self) -> torch.futures.Future[Any]:
        """Done when what ran at the owner is in the profile: ``_set_profiling_future`` may say when that is."""
        return self._get_future() if self._profiled is None else self._profiled

    def _set_profiling_future(self, future: torch.futures.Future[Any]) -> None:
        self._profiled = future

    def _serialize(self) -> tuple[str, int]:
        """In a reducer of the program's own: send this with the call that is being pickled.

        What it returns is for ``_deserialize``, where the call arrives.
        """
        self._source("fork an UserRRef")
        if internal.is_serializing():
            return "table", internal.send_along(self)
        place = travel_along(self)
        if place is None:
            raise UsageError("An RRef travels only inside the arguments and results of calls.")
        return "call", place

    @staticmethod
    def _deserialize(data: tuple[str, int]) -> RRef[Any]:
        """While a call is unpickled: the reference that ``_serialize`` returned this for."""
        where, place = data
        return _arrived(place) if where == "call" else internal._InternalRPCPickler._tensor_receiver(place)

    def __str__(self) -> str:
        return f"OwnerRRef({self._own.rref})" if self._own is not None else describe(self._record)

    def __repr__(self) -> str:
        if self._own is not None:
            cell = self._own.cell
            holds = "pending" if not cell.done else type(cell.value).__name__ if cell.error is None else "failed"
            return f"<{self} here on {self._owner_name}: {holds}>"
        return f"<{self} to a value on {self._owner_name}: {self._record.state.name.lower()}>"

    # In compiled code: see farprop.jit.references

    @property
    def _box(self) -> torch.futures.Future[Any]:
        """A future that is done and has this reference."""
        box: torch.futures.Future[Any] = torch.futures.Future()
        box.set_result(self)
        return box

    @_box.setter
    def _box(self, box: torch.futures.Future[Any]) -> None:
        """Become the reference that is in the box."""
        other = box.value()
        for slot in RRef.__slots__:
            if slot != "__weakref__":
                setattr(self, slot, getattr(other, slot))

    # Travelling

    def _source(self, use: str) -> UserReference | OwnedValue:
        """What the protocol forks when this travels; raises if it can't be used."""
        if self._own is None:
            self._checked_agent(use)
            return self._record
        if self._own.cell.broken_off:
            self._own.cell.get()  # raises
        if current_agent().references is not self._space:
            raise UsageError(f"{self} is of an earlier init_rpc. Make a new one: RRef(old.local_value()).")
        return self._own

    def _reduce_for_call(self, pickler: Any) -> tuple[Any, ...]:
        return _arrived, (pickler.travel(self),)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: it travels in the "
            "arguments and results of calls. To store or copy its value, call to_here()."
        )


def _arrived(place: int) -> RRef[Any]:
    """Called while a message is decoded: the reference that came at this place in front of it."""
    item = arrival(place)
    agent = current_agent()
    owner = agent.get_worker_info().id if isinstance(item, OwnedValue) else item.record.owner
    return RRef._of(item, agent.references, agent.get_worker_info(owner).name)


reference_kinds[RRef] = _arrived
