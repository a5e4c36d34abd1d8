"""The server: runs the requests of other workers, and answers them.

Rules that hold here:

- A request that was read counts as active until its answer is sent, whatever becomes of it.
- A small request is read, run and answered by this class alone: each further object on the way would cost every call.
  ``accepted_connections`` has the connections, ``async_results`` results that are not there when a function returns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CoroutineType
from typing import Any, cast

import torch

from farprop._torch import is_profiled_process
from farprop.config import Settings
from farprop.errors import (
    CallCancelledError,
    ConnectionLostError,
    FarpropError,
    NotExposedError,
    OverloadedError,
    ProtocolError,
    RpcTimeoutError,
)
from farprop.ids import WorkerInfo
from farprop.locks import make_lock
from farprop.protocol.events import call_name
from farprop.protocol.host_liveness import HEARTBEAT_SECONDS
from farprop.protocol.references.records import OwnedValue, User, UserReference
from farprop.runtime import first_failure, profiling
from farprop.runtime.accepted_connections import AcceptedConnections
from farprop.runtime.admission import AdmissionControl, BarrierGate
from farprop.runtime.async_results import AsyncResults, Deferred
from farprop.runtime.autograd import anomaly
from farprop.runtime.autograd.contexts import Context, ContextContainer, current_context
from farprop.runtime.autograd.lost_gradients import receive_cut
from farprop.runtime.call_modes import CallModes
from farprop.runtime.call_records import METHOD_AT, ServedRecord, name_of_method
from farprop.runtime.device_maps import DeviceMaps, careful_value
from farprop.runtime.event_loop import HANGUP, IN, OUT
from farprop.runtime.parameter_guard import ParameterGuard
from farprop.runtime.parcels import Parcels
from farprop.runtime.recorder import recorder
from farprop.runtime.references.rref_context import RRefContext
from farprop.runtime.request_queue import Request
from farprop.runtime.self_connection import Loopback
from farprop.runtime.thread_pool import STALL, ThreadPool
from farprop.transport.connection import Connection
from farprop.wire import unsendable
from farprop.wire.codec import decode_with
from farprop.wire.dialect import Dialect, EncodeValue
from farprop.wire.function_names import FunctionNotFound, shown_name
from farprop.wire.message import (
    ANSWER,
    CANCEL,
    CUT,
    FAILURE,
    MODES,
    NOTICE,
    REFS,
    REMOTE,
    REQUEST,
    RETURNS,
    SYSTEM,
    TRACED,
    Message,
    Method,
    ReceivedRefs,
)
from farprop.wire.remote_exceptions import operator_error
from farprop.wire.tensors import DeviceMapRequired
from farprop.wire.trace_head import TraceHead

_log = logging.getLogger(__name__)

_LARGEST_FAILURE = 1 << 20
_QUICK = 100e-6
_PAUSE = 0.25  # seconds without input after which the server asks how long the next bytes have waited
_now = time.monotonic
_get_ident = threading.get_ident
_is_grad_enabled = torch.is_grad_enabled

Record = Callable[[], list[dict[str, Any]]]


class PendingReply:
    """The state of a request until it is answered.

    For ``remote()``, ``creation`` is the slot that keeps the value. ``borrowed`` are references that came with the
    request. ``record`` returns the events of a legacy profile. ``served`` is there while somebody listens to events.
    ``context`` is the autograd context of the request, and ``call_trace`` its call trace in anomaly mode. ``run`` is
    for inspection: the function's name, the function, when it was started, its seconds and since when they count.
    """

    __slots__ = (
        "borrowed",
        "call_id",
        "call_trace",
        "connection",
        "context",
        "creation",
        "flags",
        "record",
        "run",
        "served",
    )

    run: tuple[bytes, Any, float, float | None, float]

    def __init__(self, connection: Connection, flags: int, call_id: int, refs: ReceivedRefs | None) -> None:
        self.connection = connection
        self.flags = flags
        self.call_id = call_id
        self.creation: OwnedValue | None = None
        self.borrowed: Sequence[UserReference] = ()
        if refs is not None:
            self.creation = refs.creation
            self.borrowed = refs.borrowed
        self.record: Record | None = None
        self.served: ServedRecord | None = None
        self.context: Context | None = None
        self.call_trace = ""

    @property
    def is_cancelled(self) -> bool:
        """Whether its caller does not want the answer any more."""
        return self.call_id in self.connection.served.cancelled

    def stop_with(self, stop: Callable[[], object]) -> bool:
        """Its function has returned something that ``stop`` stops; returns whether to do that now."""
        return self.connection.served.wait(self.call_id, stop)


def _as_connection(loopback: Loopback) -> Connection:
    """It has everything that the server uses of a connection."""
    return cast(Connection, loopback)


class Server:
    """See the module's rules."""

    def __init__(
        self,
        threads: ThreadPool,
        own: WorkerInfo,
        connections: AcceptedConnections,
        references: RRefContext,
        contexts: ContextContainer,
        devices: DeviceMaps,
        gate: BarrierGate,
        settings: Settings,
        dialect: Dialect,
        on_context_ended: Callable[[int, int], None],
        on_context_orphaned: Callable[[int], None],
        async_results: AsyncResults,
        methods: Mapping[Method, Callable[..., Any]],
        guard: ParameterGuard,
    ) -> None:
        self.parcels: Parcels  # set by the agent
        self.active = 0  # unanswered requests
        self._system_active = 0  # unanswered requests of farprop's own
        self._active_lock = make_lock("server")
        self._threads = threads
        self._loop = threads.loop
        worker = self._worker = own.name
        self._label = own.label
        self._connections = connections
        connections.on_events = self._on_events
        connections.on_closed = self._run_held
        self._references = references
        self._contexts = contexts
        self._guard = guard
        self._devices = devices
        self._gate = gate
        self._admission = AdmissionControl(worker, settings.queue_bytes, settings.outbox_bytes)
        self._most_unread = settings.outbox_bytes
        self._dialect = dialect
        self._resolve = dialect.resolve
        self._may_be_system = dialect.may_be_system
        self._vet = dialect.vet
        self._decode_call = dialect.decode_call
        self._methods = {method.value: handler for method, handler in methods.items()}
        # Requests can arrive before the callers' device maps are known.
        self._encode_value: EncodeValue = careful_value(dialect.encode_value)
        self.gil_waits: list[float] | None = None  # in microseconds; None while they are not measured
        # Functions whose last run was short. An answer waits for more only if a short function runs next.
        self._quick: set[bytes] = set()
        self._slow: set[bytes] = set()
        self._corked: set[Connection] = set()
        # Contexts that requests said have ended, with the callers' ranks. They end when the requests are answered: to
        # free a graph takes longer than a short call.
        self._ended_contexts: deque[tuple[int, int]] = deque()
        self._on_context_ended = on_context_ended
        self._on_context_orphaned = on_context_orphaned
        self.async_results = async_results
        self._serving = threads.serving
        # Requests whose functions have returned something that is not done, with how they learn that it is.
        self.unfinished: dict[PendingReply, Any] = {}

    def know_device_maps(self) -> None:
        """All workers have joined. Unless a device map moves CPU tensors, answers need no ``Place`` from now on."""
        if not self._devices.moves_cpu_in_answers:
            self._encode_value = self._dialect.encode_value

    # Reading requests

    def _on_events(self, connection: Connection, mask: int) -> None:
        try:
            if mask & OUT:
                if connection.flush():
                    self._loop.change(connection.fd, IN | HANGUP)
                    if connection.outbox_bytes:
                        self._connections.want_output(connection)  # filled again before the change took effect
                if self._run_held(connection):
                    self._connections.want_output(connection)  # and input
            if mask & ~OUT == 0:
                return
            if connection.outbox_bytes > self._most_unread and mask & ~(IN | OUT) == 0:
                self._admission.pause(connection)
                self._loop.change(connection.fd, HANGUP | OUT)
                return
            messages = connection.receive()
        except BlockingIOError:
            return
        except Exception as error:  # messages may be lost: the connection can't go on
            self._break(connection, error)
            return
        if messages is None:
            self._connections.close_one(connection)
            return
        self._loop.may_spin = True  # the next request may come soon
        # From when the seconds of a request count. On a shared clock they are its deadline.
        counted_from = 0.0 if connection.shares_clock else _arrival(connection, messages)
        for message in messages:
            if message.kind == REQUEST:
                self._accept_request(connection, message, counted_from)
            elif message.kind == CANCEL:
                self._cancel(connection, message.call_id)
            elif message.kind != NOTICE:
                self._break(connection, f"message kind {message.kind}")
                return
            elif message.payload:
                first_failure.told(bytes(message.payload).decode(errors="replace"))
            elif counted_from and message.is_heartbeat:
                counted_from = min(counted_from + HEARTBEAT_SECONDS, connection.last_input)

    def _break(self, connection: Connection, why: object) -> None:
        _log.error("%s: closed the connection from %s: %s", self._label, connection.peer, why)
        self._connections.close_one(connection)

    def _accept_request(self, connection: Connection, message: Message, counted_from: float) -> None:
        """Queue a request, unless it is refused. It counts as active until it is answered.

        Args:
            connection: the caller's.
            message: the request.
            counted_from: the time from which its seconds count.
        """
        connection.served.open[message.call_id] = None
        if message.buffers and self._awaits_parcel(connection, message, counted_from):
            return
        flags = message.flags
        if recorder.is_on:
            message.arrived = _now()
        _log.debug("%s: has call %d of %s (rank %d)", self._label, message.call_id, connection.peer, connection.rank)
        may_be_system = self._may_be_system
        if (
            may_be_system is not None
            and flags & SYSTEM
            and (flags & (REFS | REMOTE) or not may_be_system(message.name))
        ):
            flags = message.flags = flags & ~SYSTEM
        if message.autograd is not None and message.autograd.ended:
            self._ended_contexts.extend([(context_id, connection.rank) for context_id in message.autograd.ended])
        if flags & (REFS | REMOTE):
            self._take_references(connection, message, counted_from)
        elif flags & SYSTEM:
            self._count(flags)
            # Farprop's own requests are short, and never wait for the program's calls.
            self._threads.push_answer(self._run, connection, message, counted_from)
        else:
            with self._active_lock:
                self.active += 1
            error = self._admission.admit(connection, message)
            if error is None:
                self._threads.push_request((connection.rank, self._run, (connection, message, counted_from)))
            else:
                self._refuse(connection, message, error)

    def _cancel(self, connection: Connection, call_id: int) -> None:
        """The caller has cancelled a call. What waits for its turn finds that out when it is run, what waits for its
        parcel at once.
        """
        stop = connection.served.cancel(call_id)
        if stop is not None:
            self._threads.submit(stop)  # it may run callbacks of the program
        if self.parcels.holds_requests:
            self._threads.submit(self.parcels.cancel, connection, call_id)
        try:
            connection.send(Message(b"", [], kind=NOTICE))  # wakes a thread of the caller's that waits in the kernel
        except ConnectionLostError:
            pass  # the loop sees the end of it

    def accept(self, connection: Connection, message: Message, counted_from: float) -> None:
        """Queue a request that has waited for a parcel. Called on threads of the pool."""
        self._accept_request(connection, message, counted_from)

    def _awaits_parcel(self, connection: Connection, message: Message, counted_from: float) -> bool:
        try:
            return self.parcels.hold(connection, message, counted_from)
        except ProtocolError as error:
            self._break(connection, error)
            return True

    def accept_own(self, connection: Loopback, message: Message) -> None:
        """Queue a request of this worker to itself, or cancel one.

        A thread of the pool counts it and admits it: an interrupt of the caller could leave it half admitted.
        """
        if message.kind == CANCEL:
            self._cancel(_as_connection(connection), message.call_id)
        else:
            connection.arrivals.append((message, _now()))
            self._threads.submit(self._accept_arrivals, connection)

    def _accept_arrivals(self, connection: Loopback) -> None:
        """Accept the requests of this worker to itself, in their order, unless another thread is at it."""
        arrivals, token = connection.arrivals, connection.token
        while arrivals:
            try:
                token.pop()
            except IndexError:
                return  # whoever has it looks again after giving it back
            try:
                while arrivals:
                    self._accept_request(_as_connection(connection), *arrivals.popleft())
            finally:
                token.append(True)

    def _take_references(self, connection: Connection, message: Message, counted_from: float) -> None:
        """Take the references of a request."""
        try:
            self._references.borrow_refs(connection.rank, message)
        except Exception as error:
            self._break(connection, error)
            return
        self._count(message.flags)
        if not message.flags & SYSTEM:
            overload = self._admission.admit(connection, message)
            if overload is not None:
                self._refuse(connection, message, overload)
                return
        self._threads.push_request(self._request(connection, message, counted_from))

    def _refuse(self, connection: Connection, message: Message, error: OverloadedError) -> None:
        reply = PendingReply(connection, message.flags, message.call_id, message.received_refs)
        message.received_refs = None
        self._threads.push_answer(self._reject, reply, error)

    def _run_held(self, connection: Connection) -> bool:
        """Run the held requests if the caller has read its answers or is gone; returns whether it was paused."""
        held = self._admission.resume(connection)
        for request in held or ():
            self._threads.submit_request(request)
        return held is not None

    def _request(self, connection: Connection, message: Message, counted_from: float) -> Request:
        return connection.rank, self._run, (connection, message, counted_from)

    # Running them

    def _run(self, connection: Connection, message: Message, counted_from: float) -> None:
        """Run a request whose seconds count from ``counted_from``, and answer it."""
        started = _now()
        name, flags = message.name, message.flags
        if (
            self._gate.is_shut
            and not flags & SYSTEM
            and self._gate.hold(connection.peer, name, self._request(connection, message, counted_from))
        ):
            return
        if not flags & SYSTEM:
            if connection.outbox_bytes > self._most_unread and self._admission.hold(
                connection, self._request(connection, message, counted_from)
            ):
                return
            self._admission.begin(connection, message)
        reply = PendingReply(connection, flags, message.call_id, message.received_refs)
        if recorder.is_on:
            reply.served = ServedRecord(connection.peer, message, started)
        if flags & REMOTE and reply.creation is None:
            message.received_refs = None
            self._send_failure(reply, ConnectionLostError("its caller has given this call up as lost"), SYSTEM)
            return
        if connection.served.cancelled and reply.is_cancelled:
            message.received_refs = None
            self._reject(reply, _cancelled())
            return
        seconds = message.seconds
        # Farprop's own requests run nevertheless: a worker that was stopped still has to undo a failed pass.
        if seconds is not None and started > counted_from + seconds and not flags & SYSTEM:
            message.received_refs = None
            self._reject(reply, _too_late())
            return
        if name not in self._quick:
            if self._corked:
                self.uncork()
            if name in self._slow:
                self._threads.yield_polling()
        if self.gil_waits is not None:
            self._measure_gil(self.gil_waits)
        try:
            function, args, kwargs = self._decode(reply, message)
            settings = self._profile_settings(message) if flags & TRACED else None
            run = partial(CallModes(message.modes).run, function) if flags & MODES else function
        except (FunctionNotFound, NotExposedError) as error:
            self._reject(reply, error)
            return
        except BaseException as error:
            error.add_note(f"{self._worker} could not decode the call's arguments.")
            self._reject(reply, error)
            return
        if _log.isEnabledFor(logging.DEBUG):
            text = "%s: runs call %d of %s (rank %d): %s"
            shown = shown_name(name, function)
            _log.debug(text, self._label, reply.call_id, connection.peer, connection.rank, shown)
        if connection.served.cancelled and reply.is_cancelled:  # while it was decoded
            message.received_refs = None
            del args, kwargs
            self._reject(reply, _cancelled())
            return
        called = name_of_method(name, args) if name in METHOD_AT else name
        # With them the arguments' buffers, as soon as the function lets go of them; and an error's traceback would keep
        # the value that this call makes. Whoever called this has the message, too.
        message.received_refs = None
        del message
        outer = None if reply.context is None else current_context.set(reply.context)
        reply.run = called, function, started, seconds, counted_from
        if self._guard.is_used and reply.context is not None:
            run = partial(self._guard.run, reply.context, run)
        me = _get_ident()
        self._serving[me] = reply
        if reply.served is not None:
            reply.served.on_decoded(function, args)
        try:
            if settings is not None:
                value, reply.record = profiling.run_profiled(settings, run, args, kwargs)
            elif profiling.served_calls:
                value = profiling.run_served(run, args, kwargs)
            elif reply.call_trace:
                value = anomaly.run_with_call_trace(reply.call_trace, run, args, kwargs)
            elif is_profiled_process() and not profiling.is_farprops_own:
                shown = call_name("rpc_run", recorder.name_of(name, function), connection.peer, self._worker)
                value = profiling.run_recorded(shown, run, args, kwargs)
            else:
                value = run(*args, **kwargs)
        except BaseException as error:
            if name.startswith(b"torch:") and isinstance(error, TypeError):
                error = operator_error(function, args, kwargs) or error
            # The caller gets it, and decides what it means. So here it is a line, and the traceback is for who debugs.
            exc_info = error if _log.isEnabledFor(logging.DEBUG) else None
            shown = shown_name(called, function).removeprefix(":")
            _log.warning(
                "%s: %s, called by %s, raised %r", self._label, shown, connection.peer, error, exc_info=exc_info
            )
            self._fail(reply, error)
            return
        finally:
            self._serving.pop(me, None)
            if reply.served is not None:
                reply.served.on_returned()
            args, kwargs = (), {}
            if outer is not None:
                current_context.reset(outer)
            if name:
                seconds = _now() - started
                if (seconds < _QUICK) != (name in self._quick) or (seconds > STALL) != (name in self._slow):
                    self._remember(name, seconds)
        if hasattr(function, "_wrapped_async_rpc_function"):
            self.async_results.on_future(function, value, *self._answer_later(reply, value), reply)
        elif type(value) is CoroutineType or type(value) is Deferred:
            self.async_results.on_unfinished(value, reply.context, *self._answer_later(reply, value), reply)
        else:
            self._answer(reply, value)

    def _decode(self, reply: PendingReply, message: Message) -> tuple[Any, Sequence[Any], dict[str, Any]]:
        """Decode a request: the function, which may be one of farprop's methods, and its arguments."""
        name = message.name
        method = self._methods.get(name)
        vet = self._vet
        if method is None and vet is not None:
            function = self._resolve(name)  # before the arguments: those of a function that is not exposed are not read
        if message.autograd is None and message.received_refs is None and name and not message.flags & CUT:
            args, kwargs = self._decode_call(message.payload, message.buffers, message.flags)
        else:
            travelled, args, kwargs = self._decode_with_heads(reply, message)
            if not name:
                function = travelled
        if vet is not None:
            vet(name, reply.connection.rank, reply.connection.peer, args, kwargs)
        elif method is None and name:
            function = self._resolve(name)
        if method is not None:
            return method, (reply.connection.rank, *args), kwargs
        return function, args, kwargs

    def _decode_with_heads(self, reply: PendingReply, message: Message) -> tuple[Any, Sequence[Any], dict[str, Any]]:
        """Decode a request with heads or ``CUT``: the function if it is pickled, else None, and its arguments.

        A request of an autograd context runs in this context here, too, unless the context has ended meanwhile.
        """
        refs = () if message.received_refs is None else message.received_refs.items
        head = message.autograd
        context = None if head is None else self._contexts.meet(head.context_id)
        if head is None or context is None:
            if message.flags & CUT:
                function = shown_name(message.name)
                return receive_cut(
                    "an argument", function, reply.connection.peer, refs, self._decode_arguments, message
                )
            return decode_with(refs, None, self._decode_arguments, message)
        if reply.connection.closed:
            # In this order: the caller may have died while its request waited here. Whoever ends the contexts of a dead
            # worker closes its connections first, so either it finds this context, or it is noticed here.
            self._on_context_orphaned(head.context_id)
        reply.context = context
        reply.call_trace = head.call_trace
        return context.receive(reply.connection.rank, head, refs, self._decode_arguments, message)

    def _decode_arguments(self, message: Message) -> tuple[Any, Sequence[Any], dict[str, Any]]:
        if message.name:
            return None, *self._decode_call(message.payload, message.buffers, message.flags)
        return self._dialect.decode_function_call(message.payload, message.buffers)

    def _profile_settings(self, message: Message) -> dict[str, bool] | None:
        settings = TraceHead.parse(message.trace).profile
        if settings is not None and self._dialect.restricted:
            raise ProtocolError("A restricted job records no profiles of calls.")
        return settings

    # Answering them

    def _answer_later(
        self, reply: PendingReply, value: Any
    ) -> tuple[Callable[[Any], None], Callable[[BaseException], None]]:
        """Note that a request waits for what its function has returned; returns how it is answered then."""
        name, function, *times = reply.run
        reply.run = shown_name(name, function).encode(), None, *times  # type: ignore[assignment]
        self.unfinished[reply] = value.subscribe if type(value) is Deferred else None
        if reply.served is not None:
            reply.served.is_answered_later = True
        return partial(self._end_later, self._answer, reply), partial(self._end_later, self._fail, reply)

    def _end_later(self, end: Callable[[PendingReply, Any], None], reply: PendingReply, outcome: Any) -> None:
        self.unfinished.pop(reply, None)
        reply.connection.served.waited(reply.call_id)
        end(reply, outcome)

    def _answer(self, reply: PendingReply, value: Any) -> None:
        if reply.creation is not None:
            reply.creation.slot.fill(value)
            value = None
        elif reply.connection.served.cancelled and reply.is_cancelled:
            value = None
        try:
            if reply.context is None and reply.record is None:
                try:
                    message = self._encode_value(value)
                except DeviceMapRequired:
                    message = self._encode(reply, value, placed=True)
            else:
                message = self._encode(reply, value)
            if message.out_of_band:
                self._references.attach_refs(message, reply.connection.rank, reply.connection)
        except BaseException as error:
            error.add_note(f"{self._worker} could not encode the function's result, a {type(value).__name__}.")
            if isinstance(error, Exception):
                self._explain(error, reply.connection.peer, "result", value)
            self._fail(reply, error)
            return
        del value
        message.kind = ANSWER
        self._send(reply, message)

    def encode_item(self, reply: PendingReply, item: Any) -> Message:
        """Encode an item of a stream for its caller, to be sent later: what becomes of the item then is not seen."""
        value = (False, item)  # it is not the end
        try:
            try:
                message = self._encode_value(value) if reply.context is None else self._encode(reply, value)
            except DeviceMapRequired:
                message = self._encode(reply, value, placed=True)
        except Exception as error:
            self._explain(error, reply.connection.peer, "item", item)
            raise
        message.buffers = [memoryview(bytearray(buffer)) for buffer in message.buffers]
        message.keep = None
        return message

    def _encode(self, reply: PendingReply, value: Any, placed: bool = False) -> Message:
        """Encode the answer: in the request's autograd context, with its profile's events, on the caller's devices.
        ``placed``: it is known that it needs the device map.
        """
        context = reply.context
        if value is None or (context is not None and context.is_released):
            context = None
        graph: list[Any] | None = None if context is None or not _is_grad_enabled() else []
        if not placed:
            try:
                message = self._encode_value(value, graph)
            except DeviceMapRequired:
                placed = True
        if placed:
            place = self._devices.back_to(reply.connection.peer)
            message = self._dialect.encode_value(value, graph, place)
        if context is not None and message.autograd is None:  # a recorded pass has attached its own
            context.attach(message, reply.connection.rank, graph, reply.call_trace, placed)
        if reply.record is not None:
            message.flags |= TRACED
            message.trace = profiling.pack_record(reply.record())
        return message

    def _explain(self, error: Exception, caller: str, name: str, value: Any) -> None:
        """Say in an error which part of a result can't be sent. ``name``: how the error should call the result."""

        def encode(part: Any) -> Message:
            try:
                return self._dialect.encode_value(part)
            except DeviceMapRequired:
                return self._dialect.encode_value(part, None, self._devices.back_to(caller))

        unsendable.explain(error, {name: value}, encode, caller)

    def _reject(self, reply: PendingReply, error: BaseException) -> None:
        """Answer a request that was not run."""
        self._fail(reply, error, SYSTEM)

    def _fail(self, reply: PendingReply, error: BaseException, flags: int = 0) -> None:
        if reply.served is not None:
            reply.served.on_error(error)
        if reply.creation is None:
            self._send_failure(reply, error, flags)
        else:
            # The reference exists, and using it raises the error.
            creation, reply.creation = reply.creation, None
            creation.slot.fail(error)
            self._answer(reply, None)

    def _send_failure(self, reply: PendingReply, error: BaseException, flags: int = 0) -> None:
        message = self._dialect.encode_failure(error, self._worker)
        if len(message.payload) > _LARGEST_FAILURE:
            short = RuntimeError(f"{type(error).__qualname__} was raised, and is too large to be sent")
            message = self._dialect.encode_failure(short, self._worker)
        message.kind = FAILURE
        message.flags |= flags
        self._send(reply, message)

    def _send(self, reply: PendingReply, message: Message) -> None:
        if reply.borrowed and not self._end_borrowing(reply, message):
            return
        connection, threads = reply.connection, self._threads
        served = connection.served
        served.open.pop(reply.call_id, None)
        if served.cancelled:
            served.answered(reply.call_id)
        message.call_id = reply.call_id
        _log.debug("%s: answers call %d of %s (rank %d)", self._label, reply.call_id, connection.peer, connection.rank)
        # Only the leader lets answers wait: if the function that it runs next is slow after all, the watcher notices.
        # Few callers wait for the answer to remote(), so it is sent with the next answer, most often that of a fetch.
        unhurried = bool(reply.flags & REMOTE)
        more = bool(unhurried or threads.requests) and threads.is_polling_thread()
        try:
            connection.send(message, more)
            if more:
                self._corked.add(connection)
                # Again: whoever has become the leader meanwhile may have looked for such connections before this one.
                more = bool(unhurried or threads.requests) and threads.is_polling_thread()
        except ConnectionLostError as error:
            _log.info("%s: the answer to %s is lost: %s", self._label, connection.peer, error)
            self._references.not_returned(connection.rank, message.returned)
            # Again: only what ran after the connection was lost may have made this worker concerned with the caller.
            self._connections.report_lost(connection)
        except FarpropError as error:
            self._references.not_sent(message.refs)
            self._references.not_returned(connection.rank, message.returned)
            if message.kind == FAILURE:
                raise
            failure = self._dialect.encode_failure(error, self._worker)
            failure.kind, failure.call_id = FAILURE, reply.call_id
            connection.send(failure)
        except BaseException:
            self._references.not_returned(connection.rank, message.returned)
            raise
        finally:
            with self._active_lock:
                if reply.flags & SYSTEM:
                    self._system_active -= 1
                else:
                    self.active -= 1
            if not more and self._corked:
                self.uncork()
        if reply.served is not None:
            reply.served.end(message)
        if self._ended_contexts:
            self.end_contexts()

    def _end_borrowing(self, reply: PendingReply, message: Message) -> bool:
        """Let the answer give back the references that the function has borrowed and dropped.

        Returns:
            False if the function has kept others: the answer is sent when their owners list them.
        """
        borrowed, reply.borrowed = reply.borrowed, ()
        users = self._references.users
        returned = users.end_borrowing(borrowed)
        if returned:
            if message.kind == ANSWER:
                message.returned = returned
                message.flags |= RETURNS
            else:
                self._references.not_returned(reply.connection.rank, returned)
        kept = [record for record in borrowed if record.state is User.ARRIVED]
        if kept:
            users.when_confirmed(kept, partial(self._threads.submit, self._send, reply, message))
        return not kept

    def end_contexts(self) -> None:
        """End the contexts that requests said have ended."""
        while self._ended_contexts:
            try:
                context_id, told_by = self._ended_contexts.popleft()
            except IndexError:
                return  # another thread was faster
            self._on_context_ended(context_id, told_by)

    @property
    def has_ended_contexts(self) -> bool:
        return bool(self._ended_contexts)

    def uncork(self) -> None:
        """Send the answers that wait for more."""
        while self._corked:
            try:
                self._corked.pop().uncork()
            except (KeyError, ConnectionLostError):
                pass  # another thread was faster, or the loop will see the end of it

    # State

    def _remember(self, name: bytes, seconds: float) -> None:
        if seconds < _QUICK:
            self._quick.add(name)
            self._slow.discard(name)
        else:
            self._quick.discard(name)
            if seconds > STALL:
                self._slow.add(name)
            else:
                self._slow.discard(name)

    def _measure_gil(self, waits: list[float]) -> None:
        began = time.perf_counter()
        time.sleep(0)  # releases the interpreter's lock and takes it again
        waits.append((time.perf_counter() - began) * 1e6)
        del waits[:-1000]

    def _count(self, flags: int) -> None:
        with self._active_lock:
            if flags & SYSTEM:
                self._system_active += 1
            else:
                self.active += 1

    def held(self) -> list[Request]:
        """The requests that barriers and callers who don't read hold back, and those that wait for a parcel."""
        waiting = [self._request(*held) for held in self.parcels.held()]
        return [*self._gate.held(), *self._admission.held(), *waiting]

    @property
    def owes_system_answers(self) -> bool:
        return self._system_active > 0 or self._connections.have_output

    def close(self) -> None:
        self.async_results.close()


def _arrival(connection: Connection, messages: Sequence[Message]) -> float:
    """When the first of these messages arrived, which were just read. If this worker was stopped, that is long ago: the
    kernel knows when the last bytes came, and heartbeats among them have some time between each other.
    """
    arrived = _now()
    if arrived - connection.last_input <= _PAUSE:
        connection.last_input = arrived
        return arrived
    arrived -= connection.input_age()
    connection.last_input = arrived  # if that is long ago, bytes that follow may be as old
    return arrived - HEARTBEAT_SECONDS * sum(message.is_heartbeat for message in messages)


def _cancelled() -> CallCancelledError:
    return CallCancelledError("Its caller has cancelled this call before it could start, so it was not run.")


def _too_late() -> RpcTimeoutError:
    return RpcTimeoutError(
        "RPC ran for more than set timeout: its time was over before it could start, so it was not run."
    )
