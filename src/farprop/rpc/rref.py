"""``RRef``: a reference to a value on some worker."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Generator
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch

from farprop._torch import ScriptModule
from farprop.errors import ConnectionLostError, ReferenceLostError, UsageError, renewed
from farprop.ids import WorkerInfo
from farprop.protocol.references.records import OwnedValue, UserReference
from farprop.protocol.waits import seconds_text
from farprop.rpc import internal
from farprop.rpc.constants import UNSET_RPC_TIMEOUT
from farprop.rpc.options import checked_timeout
from farprop.rpc.rref_proxy import RRefProxy, _rref_typeof_on_owner
from farprop.runtime.agent import Agent
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.dynamo_disable import uncompiled
from farprop.runtime.future_call import timeout_error
from farprop.runtime.futures import Future, keep_until_done
from farprop.runtime.loop_inbox import running_inbox
from farprop.runtime.references.owned_values import ValueSlot
from farprop.runtime.references.remote_call import RemoteCall
from farprop.runtime.references.rref_context import RRefContext
from farprop.runtime.references.user_references import RRefHandle, describe
from farprop.wire.codec import reference_kinds, resolve_out_of_band, send_along
from farprop.wire.function_names import shown_name
from farprop.wire.message import Method

T = TypeVar("T", covariant=True)  # where an RRef[nn.Module] is wanted, an RRef[nn.Linear] fits

_PACKAGE = __name__.partition(".")[0] + "."


def call_site() -> str:
    """The file and line of the program that called farprop."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class RRef(Generic[T]):
    """A reference to a value on some worker, its owner.

    ``RRef(value)`` makes this worker the owner. ``rpc.remote`` creates the value on another worker. An RRef can be
    part of the arguments and the result of any call, but can't be pickled otherwise. The owner keeps the value until no
    worker has an RRef to it any more.

    Args:
        value: The value, which stays on this worker.
        type_hint: The interface of a ``ScriptModule``: a class decorated with ``torch.jit.interface``.

    Raises:
        UsageError: ``value`` is a ``ScriptModule``, and there is no ``type_hint``.
    """

    __slots__ = (
        "__weakref__",
        "_handle",
        "_owned",
        "_owner_name",
        "_profiled",
        "_remote_call",
        "_rref_context",
        "_type",
    )

    _owned: OwnedValue | None
    _handle: RRefHandle | None

    @uncompiled
    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = current_agent()
        if type_hint is None and isinstance(value, ScriptModule):
            raise UsageError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint. Give the "
                "class that is decorated with @torch.jit.interface: RRef(module, type_hint=Interface)."
            )
        slot = ValueSlot(site=call_site().encode())
        slot.fill(value)
        self._rref_context = agent.references
        self._owned = self._rref_context.values.own(slot)
        self._handle = None
        self._remote_call: RemoteCall | None = None
        self._type: Any = None
        self._profiled: torch.futures.Future[Any] | None = None
        self._owner_name = agent.get_worker_info().name

    @classmethod
    def _of(
        cls, item: RRefHandle | OwnedValue, context: RRefContext, owner_name: str, remote_call: RemoteCall | None = None
    ) -> RRef[Any]:
        rref: RRef[Any] = cls.__new__(cls)
        rref._rref_context = context
        rref._owned, rref._handle = (item, None) if isinstance(item, OwnedValue) else (None, item)
        rref._remote_call = remote_call
        rref._type = rref._profiled = None
        rref._owner_name = owner_name
        return rref

    @property
    def _record(self) -> UserReference:
        assert self._handle is not None
        return self._handle.record

    # The owner

    def is_owner(self) -> bool:
        """Whether this worker owns the value.

        Returns:
            Whether it does.
        """
        return self._owned is not None

    def owner(self) -> WorkerInfo:
        """Get the owner.

        Returns:
            The ``WorkerInfo`` of the worker that has the value.
        """
        return current_agent().get_worker_info(self._owner_name)

    def owner_name(self) -> str:
        """Get the name of the owner.

        Returns:
            The name of the worker that has the value.
        """
        return self._owner_name

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has confirmed this reference. From then on it keeps the value for it.

        Returns:
            Whether it has. Always true on the owner, and in a function that got the reference as an argument: its
            caller keeps its own until the call has ended.
        """
        return self._handle is None or self._handle.is_confirmed

    # The value

    @uncompiled
    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Get a copy of the value, or on its owner the value itself. Waits until it exists.

        Args:
            timeout: The seconds to wait; 0 disables the timeout. By default the process's default.

        Returns:
            The value.

        Raises:
            ReferenceLostError: The owner died.
            RpcTimeoutError: The value was not there in time.
            Exception: What the function raised that should have created the value.
        """
        seconds = timeout if timeout == UNSET_RPC_TIMEOUT else checked_timeout(timeout)
        if self._owned is not None:
            return self._value_here(seconds)
        record = self._record
        agent = self._checked_agent("to_here() on it")
        if seconds == UNSET_RPC_TIMEOUT:
            seconds = agent.services.rpc_timeout
        rref = record.rref
        args = (rref.created_on, rref.local_id, record.exists)
        began = time.monotonic()
        try:
            return agent.call_sync(self._owner_name, Method.FETCH, args, {}, seconds)  # type: ignore[no-any-return]
        except ReferenceLostError:
            raise
        except (ConnectionLostError, UsageError):  # it is not reached, or not known any more
            self._check_owner("to_here() on it", seconds, began)
        # The owner is alive, only the connection was lost. Fetching is idempotent.
        left = self._time_left(seconds, began)
        return agent.call_sync(self._owner_name, Method.FETCH, args, {}, left)  # type: ignore[no-any-return]

    def __await__(self) -> Generator[Any, None, T]:
        """``await rref`` gives what ``rref.to_here()`` gives, and does not block the loop."""
        return self._value_awaited().__await__()

    async def _value_awaited(self) -> T:
        if self._owned is not None:
            return await self._value_awaited_here()
        seconds, began = self._checked_agent("await on it").rpc_timeout, time.monotonic()
        try:
            return await self._fetch(seconds)  # type: ignore[no-any-return]
        except ReferenceLostError:
            raise
        except (ConnectionLostError, UsageError):  # as in ``to_here``
            await asyncio.to_thread(self._check_owner, "await on it", seconds, began)
        return await self._fetch(self._time_left(seconds, began))  # type: ignore[no-any-return]

    def _fetch(self, seconds: float | None) -> Future:
        """A future of the value, for a worker that does not own it."""
        record, future = self._record, Future()
        args = (record.rref.created_on, record.rref.local_id, record.exists)
        current_agent().call_async(self._owner_name, Method.FETCH, args, {}, seconds, future)
        return future

    async def _value_awaited_here(self) -> T:
        assert self._owned is not None
        slot = self._owned.slot
        if not slot.done:
            inbox = running_inbox()
            waiter: asyncio.Future[None] = inbox.loop.create_future()
            slot.when_done(partial(inbox.put, waiter))
            seconds = current_agent().rpc_timeout
            try:
                async with asyncio.timeout(seconds):
                    await waiter
            except TimeoutError:
                raise timeout_error(self._owner_name, cast(float, seconds)) from None
        return slot.get()  # type: ignore[no-any-return]

    def _check_owner(self, use: str, timeout: float | None, began: float) -> None:
        """After a lost connection: raise ``ReferenceLostError`` if the owner is gone."""
        current_agent().look_now(self._record.owner, self._time_left(timeout, began))
        self._checked_agent(use)

    def _time_left(self, timeout: float | None, began: float) -> float | None:
        if timeout is None:
            return None
        left = began + timeout - time.monotonic()
        if left <= 0:
            raise timeout_error(self._owner_name, timeout)
        return left

    def _checked_agent(self, use: str) -> Agent:
        assert self._handle is not None
        self._handle.check(use)
        agent = current_agent()
        if agent.references is not self._rref_context:
            raise UsageError(f"{self} belongs to an earlier init_rpc. It can't be used after the shutdown.")
        return agent

    def _value_here(self, timeout: float | None) -> T:
        """The value, on its owner. With ``UNSET_RPC_TIMEOUT`` the process's default applies."""
        assert self._owned is not None
        slot = self._owned.slot
        if not slot.done:
            seconds = current_agent().rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
            if not slot.wait(seconds):
                raise timeout_error(self._owner_name, cast(float, seconds))
        return slot.get()  # type: ignore[no-any-return]

    @uncompiled
    def local_value(self) -> T:
        """Get the value itself, on its owner. Waits until it exists.

        Returns:
            The value.

        Raises:
            UsageError: This worker is not the owner.
            Exception: What the function raised that should have created the value.
        """
        if self._owned is not None:
            return self._value_here(None)
        record = self._record
        raise UsageError(
            f"For UserRRef(rref_id={record.rref}, fork_id={record.fork}), can't call localValue() on user "
            f"{current_agent().get_worker_info()}. Call it on owner {self.owner()}."
        )

    # Calls on the value

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Call a method of the value on its owner and wait for its result: ``rref.rpc_sync().method(...)``.

        Args:
            timeout: The timeout of the call in seconds; 0 disables it. By default the process's default.

        Returns:
            A proxy with the methods of the value. Type checkers take it for the value itself.
        """
        from farprop.rpc import api

        return RRefProxy(self, api.rpc_sync, timeout)  # type: ignore[return-value]

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy[Future[Any]]:
        """Call a method of the value on its owner and get a future: ``rref.rpc_async().method(...)``.

        Args:
            timeout: The timeout of the call in seconds; 0 disables it. By default the process's default.

        Returns:
            A proxy with the methods of the value.
        """
        from farprop.rpc import api

        return RRefProxy(self, api.rpc_async, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy[RRef[Any]]:
        """Call a method of the value on its owner and get an RRef to its result: ``rref.remote().method(...)``.

        Args:
            timeout: The timeout of the call in seconds; 0 disables it. By default the process's default.

        Returns:
            A proxy with the methods of the value.
        """
        from farprop.rpc import api

        return RRefProxy(self, api.remote, timeout)

    @uncompiled
    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass from the value, on its owner.

        Args:
            dist_autograd_ctx_id: The id of the context in which the value was computed. On the owner it may be left
                out: then the pass stays on the owner and accumulates into ``.grad``.
            retain_graph: Whether to keep the graph for another pass.

        Raises:
            UsageError: This worker is not the owner, and gave no context.
        """
        if self._owned is not None:
            agent = current_agent()
            value = self._value_here(UNSET_RPC_TIMEOUT)
            context_id = None if dist_autograd_ctx_id == -1 else dist_autograd_ctx_id
            agent.backward_from_value(value, context_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise UsageError("User RRefs require 'dist_autograd_ctx_id' to be specified: the id of a context.")
        agent = self._checked_agent("backward on it")
        rref = self._record.rref
        args = (rref.created_on, rref.local_id, self._record.exists, dist_autograd_ctx_id, retain_graph)
        agent.call_sync(self._owner_name, Method.REF_BACKWARD, args, {}, agent.rpc_timeout)

    # Torch's private methods

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value. With ``blocking=False`` a future of it, which is cached."""
        if self._owned is not None and blocking:
            return type(self._value_here(timeout or None))
        if self._type is None:
            self._type = self._ask_for_type(timeout)
        if not blocking:
            return self._type
        try:
            return self._type.wait()
        except Exception:
            self._type = None  # ask again next time
            raise

    def _ask_for_type(self, timeout: float) -> Future[Any]:
        from farprop.rpc import api

        if self._owned is None:
            self._checked_agent("_get_type() on it")
            rref = self._record.rref
            args = (rref.created_on, rref.local_id, self._record.exists)
            asked = api.rpc_async(self._owner_name, _rref_typeof_on_owner, args, timeout=timeout)
            keep_until_done(asked, self)  # the owner must not free the value before
            return asked
        future = Future()
        slot = self._owned.slot

        def done() -> None:
            if slot.error is None:
                future.set_result(type(slot.value))
            else:
                future.set_exception(renewed(slot.error))

        slot.when_done(done)
        return future

    def _get_future(self) -> torch.futures.Future[Any]:
        """A future that is done when the owner has created the value, or failed to."""
        if self._remote_call is None:
            raise UsageError(f"{self} does not come from rpc.remote() on this worker, so it has no future.")
        return self._remote_call.future()

    def _get_profiling_future(self) -> torch.futures.Future[Any]:
        """The future that ``_set_profiling_future`` has set, or that of ``_get_future``."""
        return self._get_future() if self._profiled is None else self._profiled

    def _set_profiling_future(self, future: torch.futures.Future[Any]) -> None:
        self._profiled = future

    def _serialize(self) -> tuple[str, int]:
        """Send this reference with the call that is being pickled. For reducers of the program's own.

        Returns:
            What ``_deserialize`` takes on the receiver.
        """
        self._source("fork an UserRRef")
        if internal.is_serializing():
            return "table", internal.send_along(self)
        place = send_along(self)
        if place is None:
            raise UsageError("An RRef travels only inside the arguments and results of calls.")
        return "call", place

    @staticmethod
    def _deserialize(data: tuple[str, int]) -> RRef[Any]:
        """Get the reference for what ``_serialize`` returned, while a call is unpickled."""
        where, place = data
        return _arrived(place) if where == "call" else internal._InternalRPCPickler._tensor_receiver(place)

    def __str__(self) -> str:
        return f"OwnerRRef({self._owned.rref})" if self._owned is not None else describe(self._record)

    def __repr__(self) -> str:
        if self._owned is not None:
            slot = self._owned.slot
            holds = "pending" if not slot.done else type(slot.value).__name__ if slot.error is None else "failed"
            made_by = f", made by {slot.maker.decode(errors='replace')}" if slot.maker else ""
            age = seconds_text(time.monotonic() - slot.created)
            return f"<{self} here on {self._owner_name}: {holds}{made_by}, {age} old>"
        origin = getattr(self._remote_call, "origin", None)  # known where remote() was called
        made = ""
        if origin is not None:
            made = (
                f", made by {shown_name(origin[0]).removeprefix(':')}, {seconds_text(time.monotonic() - origin[3])} old"
            )
        return f"<{self} to a value on {self._owner_name}: {self._record.state.name.lower()}{made}>"

    # In compiled code: see farprop.jit.script_rref

    @property
    def _box(self) -> torch.futures.Future[Any]:
        """A completed future whose value is this reference."""
        box: torch.futures.Future[Any] = torch.futures.Future()
        box.set_result(self)
        return box

    @_box.setter
    def _box(self, box: torch.futures.Future[Any]) -> None:
        """Become the reference in the box."""
        other = box.value()
        for slot in RRef.__slots__:
            if slot != "__weakref__":
                setattr(self, slot, getattr(other, slot))

    # Sending

    def _source(self, use: str) -> UserReference | OwnedValue:
        """The record that the protocol forks when this reference is sent; raises if it can't be used."""
        if self._owned is None:
            self._checked_agent(use)
            return self._record
        if self._owned.slot.broken_off:
            self._owned.slot.get()  # raises
        if current_agent().references is not self._rref_context:
            raise UsageError(f"{self} belongs to an earlier init_rpc. Make a new one: RRef(old.local_value()).")
        return self._owned

    def _reduce_for_call(self, pickler: Any) -> tuple[Any, ...]:
        return _arrived, (pickler.send_out_of_band(self),)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: it can be sent in the "
            "arguments and results of calls. To store or copy its value, call to_here()."
        )


def _arrived(place: int) -> RRef[Any]:
    """While a message is decoded: the RRef for the reference with this number in its header."""
    item = resolve_out_of_band(place)
    agent = current_agent()
    if type(item) is OwnedValue:
        return RRef._of(item, agent.references, agent.get_worker_info().name)
    try:
        name = agent.get_worker_info(item.record.owner).name
    except UsageError:
        # It has left: to use the reference raises, but not to get it.
        name = agent.membership.name_of(item.record.owner)
    return RRef._of(item, agent.references, name)


reference_kinds[RRef] = _arrived
