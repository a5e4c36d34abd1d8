"""The calls of this worker: encodes and sends requests, and decodes their answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from farprop._torch import dual_level, is_any_autocast_enabled, set_result
from farprop.errors import (
    CallCancelledError,
    ConnectionLostError,
    FarpropError,
    InjectedFaultError,
    OverloadedError,
    RpcTimeoutError,
    UsageError,
)
from farprop.ids import WorkerInfo
from farprop.protocol.references.records import Fork, OwnedValue
from farprop.runtime import checkpoint_regions
from farprop.runtime.autograd import transforms
from farprop.runtime.autograd.context_cleanup import EndedContexts
from farprop.runtime.autograd.contexts import Context, current_context
from farprop.runtime.autograd.lost_gradients import receive_cut
from farprop.runtime.call_modes import modes_here
from farprop.runtime.call_records import (
    METHOD_AT,
    REMOTE_CALL,
    RPC_ASYNC,
    RPC_SYNC,
    CallRecord,
    called_name,
    name_of_method,
)
from farprop.runtime.checkpoint_regions import Outcome, region_here
from farprop.runtime.client_connection import ClientConnection
from farprop.runtime.device_maps import DeviceMaps, careful_call
from farprop.runtime.future_call import AwaitedCall
from farprop.runtime.futures import Future
from farprop.runtime.peers import Peers
from farprop.runtime.profiling import CallProfile, RecordedFunction
from farprop.runtime.recorder import recorder
from farprop.runtime.references.owned_values import ValueSlot
from farprop.runtime.references.remote_call import RemoteCall
from farprop.runtime.references.rref_context import RRefContext
from farprop.runtime.references.user_references import RRefHandle
from farprop.wire import unsendable
from farprop.wire.codec import decode_with
from farprop.wire.dialect import Dialect
from farprop.wire.function_names import shown_name
from farprop.wire.message import ANSWER, CUT, MODES, SYSTEM, TRACED, Creation, Message, Method
from farprop.wire.tensors import DeviceMapRequired, Place
from farprop.wire.trace_head import TraceHead

_log = logging.getLogger(__name__)

_is_grad_enabled = torch.is_grad_enabled
_now = time.monotonic
_OPENS_STREAM = Method.STREAM_OPEN.value


class Calls:
    """Makes the three kinds of calls. Methods may be called from any thread. Timeouts are in seconds, or None."""

    def __init__(
        self,
        own: WorkerInfo,
        peers: Peers,
        references: RRefContext,
        devices: DeviceMaps,
        dialect: Dialect,
        ended: EndedContexts,
        sends_autocast: bool,
    ) -> None:
        self._own = own
        self._peers = peers
        self._connections = peers.connections
        self._references = references
        self._devices = devices
        self._dialect = dialect
        self._ended = ended
        self._sends_autocast = sends_autocast
        self._name_of = dialect.name_of
        # Explains a timeout; the agent sets it.
        self.on_timeout: Callable[[RpcTimeoutError, float], None] = lambda error, timeout: None
        self._encode_call = careful_call(dialect.encode_call) if devices.moves_cpu_in_calls else dialect.encode_call

    # The three kinds of calls

    def call_sync(
        self,
        to: Any,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        flags: int = 0,
    ) -> Any:
        """Call a function on another worker and wait; returns its result or raises its exception."""
        if checkpoint_regions.is_used and not flags & SYSTEM and (region := region_here()) is not None:
            again = partial(self.call_sync, to, function, args, kwargs, timeout, flags)
            return region.run(self._label(to, function), again)
        began = _now() if recorder.is_on else 0.0
        connection = self._connections.get(to) if type(to) is str else None
        if connection is None or connection.lost:
            connection = self._connect(to, timeout, function)
        context = None if flags & SYSTEM else current_context.get()
        message = self._request(connection.peer, connection.rank, context, function, args, kwargs, flags)
        if message.out_of_band:
            # The caller's arguments hold the references until this returns.
            self._references.attach_refs(message, connection.rank, connection, lend=True)
        record = message.record = CallRecord(RPC_SYNC, began, message, args) if began else None
        try:
            answer = connection.call_sync(message, timeout)
        except BaseException as error:
            self._after_failed_send(message, error)
            if record is not None:
                record.end(error)
            if isinstance(error, FarpropError):
                name = called_name(message)
                self._describe(error, connection.peer, name, message.flags, message.call_id, timeout)
            raise
        if context is not None and message.autograd is not None and message.autograd.ended:
            self._ended.on_answered(connection.rank, message.autograd.ended)
        if record is None:
            return self.value_of(answer, context, connection.rank, message)
        record.on_answer(answer)
        try:
            value = self.value_of(answer, context, connection.rank, message)
        except BaseException as error:
            record.end(error)
            raise
        record.end(None)
        return value

    def call_async(
        self,
        to: Any,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        future: Future,
        flags: int = 0,
        profile: CallProfile | None = None,
    ) -> None:
        """Call a function on another worker; ``future`` is completed with the outcome.

        Only errors of the call itself are raised: if the worker can't be reached, the future gets the error. With
        ``profile``, the callee's events are added to the caller's profile before the future is done.
        """
        outcome: Outcome | None = None
        if checkpoint_regions.is_used and not flags & SYSTEM and (region := region_here()) is not None:
            outcome, is_there = region.next_call(self._label(to, function))
            if is_there:
                outcome.complete(future)
                return
            outcome.pending = future
        began = _now() if recorder.is_on else 0.0
        context = None if flags & SYSTEM else current_context.get()
        name, rank = self._peers.name_and_rank(to)
        value_of = self.value_of
        if outcome is None:
            message = self._request(name, rank, context, function, args, kwargs, flags)
        else:
            with checkpoint_regions.making_a_call():
                message = self._request(name, rank, context, function, args, kwargs, flags)
            value_of = partial(outcome.kept_value, value_of)
        call = FutureResponse(timeout, future, value_of, context, rank, self._describe_async)
        if message.autograd is not None and message.autograd.ended:
            call.on_answered = partial(self._ended.on_answered, rank, message.autograd.ended)
        if profile is not None:
            self._attach_profile(message, profile)
            call.profile = profile
        try:
            connection = self._connect(to, timeout, function)
        except ConnectionLostError as error:
            call.finish(None, error)
            return
        if message.out_of_band:
            call.keep = message.out_of_band
            self._references.attach_refs(message, connection.rank, connection, lend=True)
        if began:
            message.record = CallRecord(RPC_ASYNC, began, message, args, waits=False)
        try:
            call.on_sending(connection)
            connection.call_async(message, call)
            call.call_id = message.call_id
            future.called = connection.peer, call.origin
        except (ConnectionLostError, OverloadedError, InjectedFaultError) as error:
            self._after_failed_send(message, error)
            call.finish(None, error)
        except BaseException as error:
            self._after_failed_send(message, error)
            raise

    def remote(
        self,
        to: Any,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        site: str,
        profile: CallProfile | None = None,
        keep: Any = None,
    ) -> RemoteCall:
        """Have a worker run a function and keep its result under a reference.

        Args:
            to: the worker.
            function: the function.
            args: its arguments.
            kwargs: its keyword arguments.
            timeout: seconds that the call may take; None for no timeout.
            site: the line of the program that makes the call.
            profile: the profile that the callee's events are added to.
            keep: an object to keep alive until the call has ended.

        Returns:
            The call. Its ``item`` is the reference to the value.
        """
        began = _now() if recorder.is_on else 0.0
        connection = self._connect(to, timeout, function)
        rank = connection.rank
        context = current_context.get()
        message = self._request(connection.peer, rank, context, function, args, kwargs)
        if profile is not None:
            self._attach_profile(message, profile)
        references = self._references
        item: RRefHandle | OwnedValue
        if rank == self._own.id:
            item = references.values.own(ValueSlot(shown_name(message.name, function).encode(), site.encode()))
        else:
            item = references.users.prepare(rank, site)
        call = RemoteCall(timeout, references, item, (keep, message.out_of_band), profile, self._dialect)
        subject = call.subject
        sending = False
        try:
            if isinstance(subject, OwnedValue):
                fork = references.values.own_call(subject)
            else:
                references.users.create(subject)
                fork = Fork(rank, subject.rref, subject.fork, exists=False)
            references.attach_refs(message, rank, connection, Creation(fork, site.encode()), lend=True)
            if began:
                message.record = CallRecord(REMOTE_CALL, began, message, args, decodes=False, waits=False)
            sending = True
            connection.call_async(message, call)
            call.on_sent(connection, message.call_id, context)
        except (ConnectionLostError, OverloadedError, InjectedFaultError) as error:
            self._after_failed_send(message, error)
            if not sending:  # encoding an argument failed
                references.abandon(subject, sent=False)
                raise
            call.fail(error, message.sent)  # using the reference raises the error; the program may never use it
        except BaseException as error:
            self._after_failed_send(message, error)
            references.abandon(subject, sent=message.sent)
            raise
        return call

    def _connect(self, to: Any, timeout: float | None, function: Any) -> ClientConnection:
        try:
            return self._peers.connect(to, timeout)
        except FarpropError as error:
            error.worker = to.name if isinstance(to, WorkerInfo) else str(to)
            error.function = shown_name(self._name_of(function) or b"", function)
            raise

    # Parts of a call, for calls of many workers

    def encode_for_many(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        graph: list[torch.Tensor] | None,
    ) -> Message:
        """Encode a call before it is known who gets it. ``graph`` gets the tensors that require grad.

        Raises:
            DeviceMapRequired: it depends on who gets it.
        """
        name = self._name_of(function)
        if dual_level() >= 0:
            transforms.refuse_dual(args, kwargs)
        try:
            message = self._encode_call(function if name is None else None, args, kwargs, graph)
        except DeviceMapRequired:
            raise
        except Exception as error:
            better = transforms.explanation() if isinstance(error, RuntimeError) else None
            if better is not None:
                raise better from error
            self._explain(error, "other workers", function, args, kwargs)
            raise
        if name is not None:
            message.name = name
        else:
            message.function_name = b":" + shown_name(b"", function).encode()
        return message

    def response(self, timeout: float | None, future: Future, context: Context | None, rank: int) -> FutureResponse:
        return FutureResponse(timeout, future, self.value_of, context, rank, self._describe_async)

    def send(
        self, message: Message, call: FutureResponse, connection: ClientConnection, graph: list[torch.Tensor] | None
    ) -> None:
        """Send a request that is encoded; raises like any call. ``graph`` has its tensors that require grad."""
        rank, context = connection.rank, call.context
        if context is not None:
            context.attach(message, rank, graph, ended=self._ended.for_request(rank))
            if message.autograd is not None and message.autograd.ended:
                call.on_answered = partial(self._ended.on_answered, rank, message.autograd.ended)
        if is_any_autocast_enabled():
            self._attach_modes(message, keeps_graph=False)
        if message.out_of_band:
            call.keep = message.out_of_band
            self._references.attach_refs(message, rank, connection, lend=True)
        try:
            call.on_sending(connection)
            connection.call_async(message, call)
            call.call_id = message.call_id
            call.future.called = connection.peer, call.origin
        except BaseException as error:
            self._after_failed_send(message, error)
            raise

    # Encoding

    def _request(
        self,
        to: str,
        rank: int,
        context: Context | None,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        flags: int = 0,
    ) -> Message:
        """Encode a call, in the autograd context of this thread if there is one."""
        name = self._name_of(function)
        sent = function if name is None else None
        graph: list[torch.Tensor] | None = None if context is None or not _is_grad_enabled() else []
        placed = False
        if dual_level() >= 0:
            transforms.refuse_dual(args, kwargs)
        try:
            message = self._encode_call(sent, args, kwargs, graph)
        except DeviceMapRequired:
            placed = True
            place = self._devices.towards(to)
            try:
                message = self._encode_call(sent, args, kwargs, graph, place)
            except Exception as error:
                self._explain(error, to, function, args, kwargs, place)
                raise
        except Exception as error:
            better = transforms.explanation() if isinstance(error, RuntimeError) else None
            if better is not None:
                raise better from error
            self._explain(error, to, function, args, kwargs)
            raise
        if name is not None:
            message.name = name
            if name in METHOD_AT:
                message.function_name = name_of_method(name, args)
        else:
            message.function_name = b":" + shown_name(b"", function).encode()
        message.flags |= flags
        if context is not None:
            context.attach(message, rank, graph, placed=placed, ended=self._ended.for_request(rank))
        if is_any_autocast_enabled() or checkpoint_regions.is_used:
            self._attach_modes(message, graph is not None)
        return message

    def _explain(
        self,
        error: Exception,
        to: str,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: Place | None = None,
    ) -> None:
        """Say in an error which argument can't be sent."""
        # Functions of farprop's own that pass the program's arguments on have some in front of them, or names for them.
        own = getattr(function, "own_arguments", 0)
        names = getattr(function, "argument_names", ())
        if function is Method.STREAM_OPEN:
            own, function = 3, args[2]
        parts = {f"args[{index - own}]": argument for index, argument in enumerate(args) if index >= own}
        if names:
            parts = dict(zip(names, args, strict=False))
        parts |= {f"kwargs[{name!r}]": argument for name, argument in kwargs.items()}
        if self._name_of(function) is None:
            parts["func"] = function
        encode = partial(self._dialect.encode_value, place=place)
        unsendable.explain(error, parts, encode, to)

    def _attach_modes(self, message: Message, keeps_graph: bool) -> None:
        opens_stream = message.name == _OPENS_STREAM
        if (len(message.name) == 1 and not opens_stream) or message.flags & SYSTEM:
            return  # it runs no function of the program
        # A generator is no function that could run again from its beginning, so it is not checkpointed.
        keeps_graph = keeps_graph and not opens_stream
        modes = modes_here(self._sends_autocast and is_any_autocast_enabled(), keeps_graph)
        if modes:
            message.modes = modes
            message.flags |= MODES

    def _label(self, to: Any, function: Any) -> str:
        """How a call is named that is noted in a checkpointed region."""
        worker = to.name if isinstance(to, WorkerInfo) else to
        return f"a call of {shown_name(self._name_of(function) or b'', function)} on {worker}"

    def _attach_profile(self, message: Message, profile: CallProfile) -> None:
        if isinstance(profile, RecordedFunction):
            return  # it is the caller's alone
        if self._dialect.restricted:
            raise UsageError("A restricted job records no profiles of calls. Make the call outside of the profile.")
        message.flags |= TRACED
        message.trace = TraceHead(profile.session.settings).pack()

    def _after_failed_send(self, message: Message, error: BaseException) -> None:
        """Take back references that were never sent. If they may have been sent, the protocol asks the peer."""
        if not message.refs:
            return
        if not message.sent:
            self._references.not_sent(message.refs)
        elif not isinstance(error, RpcTimeoutError):  # after a timeout the message may still arrive
            self._references.doubted(message.refs)

    # Errors

    def _describe_async(self, error: FarpropError, call: FutureResponse) -> None:
        name, flags = call.origin[:2]
        self._describe(error, self._peers.name_of(call.sender), name, flags, call.call_id, call.timeout)

    def _describe(
        self, error: FarpropError, peer: str, name: bytes, flags: int, call_id: int, timeout: float | None
    ) -> None:
        """Say in an error which call it is about and, after a timeout of the program's calls, why."""
        error.worker, error.function = peer, shown_name(name).removeprefix(":")
        error.call_id = f"{self._own.name}>{peer}#{call_id}"
        if isinstance(error, RpcTimeoutError) and error.may_have_run and timeout is not None and not flags & SYSTEM:
            try:
                self.on_timeout(error, timeout)
            except Exception:  # the caller has to get its error, explained or not
                _log.exception("%s: farprop could not find out why a call timed out", self._own.label)

    # Answers

    def value_of(self, answer: Message, context: Context | None, sender: int, call: Message | FutureResponse) -> Any:
        """Decode an answer; returns the result of the call, or raises its exception.

        Args:
            answer: the answer.
            context: the autograd context that the call was made in.
            sender: the rank of the callee.
            call: the call; for ``rpc_sync`` its request.
        """
        if answer.kind != ANSWER:
            raise self._error_of(answer)
        decode = self._dialect.decode_value
        if answer.flags & CUT and context is None:
            return self._receive_cut(answer, sender, call)
        if answer.autograd is None and answer.received_refs is None:
            return decode(answer.payload, answer.buffers, answer.flags)
        refs = () if answer.received_refs is None else answer.received_refs.items
        if answer.autograd is None or context is None:
            return decode_with(refs, None, decode, answer.payload, answer.buffers, answer.flags)
        return context.receive(sender, answer.autograd, refs, decode, answer.payload, answer.buffers, answer.flags)

    def _receive_cut(self, answer: Message, sender: int, call: Message | FutureResponse) -> Any:
        name = call.name or call.function_name if isinstance(call, Message) else call.origin[0]
        function = shown_name(name).removeprefix(":")
        refs = () if answer.received_refs is None else answer.received_refs.items
        arguments = self._dialect.decode_value, answer.payload, answer.buffers, answer.flags
        return receive_cut("the result", function, self._peers.name_of(sender), refs, *arguments)

    def _error_of(self, answer: Message) -> Exception:
        error = self._dialect.decode_failure(answer.payload)
        if isinstance(error, FarpropError):
            # The function may have raised the error of a call of its own, whose function has not run.
            error.may_have_run = not answer.flags & SYSTEM
        return error


ValueOf = Callable[[Message, Context | None, int, "FutureResponse"], Any]


class FutureResponse(AwaitedCall):
    """A call whose outcome completes a future. The future's callbacks run on the thread that completes it."""

    __slots__ = (
        "_again",
        "_connection",
        "_context",
        "_deadline",
        "_describe",
        "_future",
        "_open",
        "_value_of",
        "call_id",
        "keep",
        "on_answered",
        "profile",
        "sender",
    )

    def __init__(
        self,
        timeout: float | None,
        future: Future,
        value_of: ValueOf,
        context: Context | None,
        sender: int,
        describe: Callable[[FarpropError, FutureResponse], None],
    ) -> None:
        super().__init__(timeout)
        self._describe = describe
        self.profile: CallProfile | None = None
        self._value_of = value_of
        self._future = future
        self._context = context
        self.sender = sender
        self._again = False
        self._open = [True]  # empty once it is finished: to delete is atomic
        self.call_id = 0
        self.on_answered: Callable[[], None] | None = None
        self.keep: Sequence[Any] = ()  # references that are lent to the callee until the call has ended

    def on_sending(self, connection: ClientConnection) -> None:
        """From now on, the thread that waits for the future may read the answer itself."""
        self._connection = connection
        self._deadline = None if self.timeout is None else _now() + self.timeout
        self._future.call = self

    @property
    def context(self) -> Context | None:
        return self._context

    @property
    def future(self) -> Future:
        return self._future

    def read(self, until: float | None = None) -> None:
        deadline = self._deadline
        if until is not None and (deadline is None or until < deadline):
            deadline = until
        self._connection.wait_for(self, self.call_id, deadline)

    def cancel(self) -> bool:
        return self._connection.cancel(self, self.call_id)

    def finish(self, answer: Message | None, error: Exception | None) -> None:
        try:
            del self._open[0]
        except IndexError:
            return
        try:
            value = None
            if answer is not None:
                if self.on_answered is not None:
                    self.on_answered()
                try:
                    value = self._value_of(answer, self._context, self.sender, self)
                except Exception as raised:
                    error = raised
            elif isinstance(error, FarpropError) and self.call_id:
                self._describe(error, self)
            if self.profile is not None:
                self.profile.add(answer)
            if self.record is not None:
                self.record.end(error)  # whoever has the result may look for the event
            future = self._future
            # First: once the result is there, nothing of the call may hold a reference any more.
            future.on_call_ended()
            self.keep = ()
            if self._again and future.done():
                pass  # the interrupt came after this
            elif error is None:
                set_result(future, value)
            elif answer is None and type(error) is CallCancelledError:
                if self._context is not None:
                    self._context.on_cancelled(self.origin[2])
                future.set_cancelled(error)
            else:
                future.set_exception(error)
        except BaseException:
            # Whoever is interrupted has another thread finish it.
            self._again, self._open = True, [True]
            raise
