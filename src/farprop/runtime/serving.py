"""The other workers' side: connections that they dialled, and the requests that come on them."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from types import CoroutineType
from typing import Any
from weakref import WeakKeyDictionary

from farprop._torch import Future, find_builtin, get_operation
from farprop.errors import AuthenticationError, ConnectionLostError, FarpropError, NotExposedError, RpcTimeoutError
from farprop.protocol.handshake import Listener
from farprop.protocol.references.messages import Fork
from farprop.protocol.references.records import OwnedValue
from farprop.protocol.roster import Identity
from farprop.runtime import profiling
from farprop.runtime.cells import Later, not_a_future
from farprop.runtime.coroutines import CoroutineThread
from farprop.runtime.devices import DeviceMaps, careful
from farprop.runtime.door import Door
from farprop.runtime.gate import Gate
from farprop.runtime.gradients import anomaly
from farprop.runtime.gradients.contexts import Context, Contexts, current_context, take_head
from farprop.runtime.loop import HANGUP, IN, OUT, STALL, Loop
from farprop.runtime.references import ReferenceSpace
from farprop.runtime.waiting import MOST_UNREAD, Waiting
from farprop.transport.connection import Connection
from farprop.transport.sockets import make_ready
from farprop.transport.tls import Stream, TlsSocket
from farprop.wire.codec import Encoded, decode_with
from farprop.wire.dialect import Dialect
from farprop.wire.frames import ANSWER, CONTEXT, FAILURE, FORKS, NOTICE, PROFILED, REMOTE, REQUEST, SYSTEM, Frame
from farprop.wire.functions import FunctionNotFound
from farprop.wire.tensors import NotPlaced

_log = logging.getLogger("farprop.serving")

_LARGEST_FAILURE = 1 << 20
_QUICK = 100e-6
_now = time.monotonic

Record = Callable[[], list[dict[str, Any]]]


class Reply:
    """Where the answer to a request goes. ``creation`` is what keeps the value, if the caller only wants to refer to
    it; ``record`` gives what a profile recorded; ``context`` is the autograd context of the request.
    """

    __slots__ = ("call_id", "connection", "context", "creation", "flags", "record", "trail")

    def __init__(self, connection: Connection, flags: int, call_id: int, creation: OwnedValue | None) -> None:
        self.connection = connection
        self.flags = flags
        self.call_id = call_id
        self.creation = creation
        self.record: Record | None = None
        self.context: Context | None = None
        self.trail = ""  # in anomaly mode: where the call comes from


class Server:
    """Accepts connections, lets peers prove themselves, and runs their requests."""

    def __init__(
        self,
        loop: Loop,
        worker: str,
        accepted: Callable[[socket.socket], tuple[Listener, TlsSocket | None]],
        new_connection: Callable[[Stream, Identity, Callable[[Connection], None]], Connection],
        on_peer: Callable[[bytes], Identity],
        check_membership: Callable[[Identity], None],
        on_peer_lost: Callable[[Connection], None],
        references: ReferenceSpace,
        contexts: Contexts,
        devices: DeviceMaps,
        gate: Gate,
        max_message_bytes: int,
        dialect: Dialect,
    ) -> None:
        self.active = 0  # requests that came and are not answered yet
        self.active_async = 0  # those of them whose function has returned a future
        self._system_active = 0  # the same for farprop's own
        self._active_lock = threading.Lock()
        self._loop = loop
        self._worker = worker
        self._door = Door(loop, worker, accepted, on_peer, self._accept)
        self._check_membership = check_membership
        self._new_connection = new_connection
        self._on_peer_lost = on_peer_lost
        self._references = references
        self._contexts = contexts
        self._devices = devices
        self._gate = gate
        self._waiting = Waiting(worker, max_message_bytes)
        self._dialect = dialect
        self._resolve = dialect.resolve
        self._may_be_system = dialect.may_be_system
        self._vet = dialect.vet
        self._decode_call = dialect.decode_call
        # Requests can come before the callers' maps are known.
        self._encode_value = careful(dialect.encode_value)
        self._encode_object = careful(dialect.encode)
        self.gil_waits: list[float] | None = None  # microseconds, while they are measured
        self._connections: dict[int, Connection] = {}
        self._identities: WeakKeyDictionary[Connection, Identity] = WeakKeyDictionary()
        # Functions by how long they took when they last ran: answers wait for more only in front of quick ones.
        self._quick: set[bytes] = set()
        self._slow: set[bytes] = set()
        self._corked: set[Connection] = set()
        self._coroutines = CoroutineThread(worker)

    def know_device_maps(self) -> None:
        """The workers have met. Unless one of them has CPU tensors moved, answers take the short way from now on."""
        if not self._devices.moves_cpu_in_answers:
            self._encode_value, self._encode_object = self._dialect.encode_value, self._dialect.encode

    def listen(self, listener: socket.socket) -> None:
        self._door.listen(listener)

    def expire(self, now: float) -> float:
        """Called on the loop's alarm; when to look again (0: not)."""
        return self._door.expire(now)

    def _accept(self, sock: Stream, peer: Identity) -> None:
        try:
            make_ready(sock)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            _log.warning("refused a connection to %s: %s", self._worker, error)
            sock.close()
            return
        connection = self._new_connection(sock, peer, self._want_output)
        connection.rank = peer.rank
        self._connections[connection.fd] = connection
        self._identities[connection] = peer
        self._loop.add(connection.fd, IN | HANGUP, lambda mask: self._on_events(connection, mask))
        self._close_if_stranger(connection)  # we may have learned meanwhile who the workers are

    def close_strangers(self) -> None:
        """It is known now who the workers are: some may have come before that who are none."""
        for connection in list(self._connections.values()):
            self._close_if_stranger(connection)

    def _close_if_stranger(self, connection: Connection) -> None:
        identity = self._identities.get(connection)
        try:
            if identity is not None:
                self._check_membership(identity)
        except AuthenticationError as error:
            _log.warning("closed a connection to %s: %s", self._worker, error)
            self._close(connection)

    def _want_output(self, connection: Connection) -> None:
        self._loop.change(connection.fd, IN | HANGUP | OUT)

    def _on_events(self, connection: Connection, mask: int) -> None:
        try:
            if mask & OUT:
                if connection.flush():
                    self._loop.change(connection.fd, IN | HANGUP)
                    if connection.outbox_bytes:
                        self._want_output(connection)  # filled again before the change took effect
                if self._run_held(connection):
                    self._want_output(connection)  # and input
            if mask & ~OUT == 0:
                return
            if connection.outbox_bytes > MOST_UNREAD and mask & ~(IN | OUT) == 0:
                self._waiting.pause(connection)
                self._loop.change(connection.fd, HANGUP | OUT)
                return
            frames = connection.receive()
        except BlockingIOError:
            return
        except Exception as error:  # whatever it was, frames may be lost: the connection can't go on
            _log.error("closed the connection from %s to %s: %s", connection.peer, self._worker, error)
            self._close(connection)
            return
        if frames is None:
            self._close(connection)
            return
        now = _now()
        for frame in frames:
            if frame.kind == REQUEST:
                may_be_system = self._may_be_system
                if (
                    may_be_system is not None
                    and frame.flags & SYSTEM
                    and (frame.flags & FORKS or not may_be_system(frame.name))
                ):
                    frame.flags &= ~SYSTEM
                self._count(frame.flags, 1)
                late = now + frame.seconds if frame.seconds else 0.0
                if frame.flags & FORKS:
                    self._take_references(connection, frame, late)
                elif frame.flags & SYSTEM:
                    self._loop.push_answer(
                        self._run, connection, frame, late
                    )  # short, and never held up by users' calls
                elif self._admit(connection, frame):
                    self._loop.push_request(self._run, connection, frame, late)
            elif frame.kind != NOTICE:
                _log.error("closed the connection from %s: frame kind %d", connection.peer, frame.kind)
                self._close(connection)
                return

    def _take_references(self, connection: Connection, frame: Frame, late: float) -> None:
        """A request with references runs when their owners count them."""
        try:
            unconfirmed = self._references.arrive(connection.rank, frame)
        except Exception as error:
            _log.error("closed the connection from %s to %s: %s", connection.peer, self._worker, error)
            self._count(frame.flags, -1)
            self._close(connection)
            return
        if not frame.flags & SYSTEM and not self._admit(connection, frame):
            return
        if unconfirmed:
            self._references.when_confirmed(
                unconfirmed, lambda: self._loop.submit_request(self._run, connection, frame, late)
            )
        else:
            self._loop.push_request(self._run, connection, frame, late)

    def _admit(self, connection: Connection, frame: Frame) -> bool:
        error = self._waiting.admit(connection, frame)
        if error is None:
            return True
        reply = Reply(connection, frame.flags, frame.call_id, None)
        if frame.arrivals is not None:
            reply.creation = frame.arrivals.creation
        self._loop.push_answer(self._fail, reply, error)
        return False

    def _run_held(self, connection: Connection) -> bool:
        """Run what was held back, if the caller has taken its answers or is gone; whether it was waited for."""
        held = self._waiting.resume(connection)
        for run in held or ():
            self._loop.submit_request(run)
        return held is not None

    def close_connections_of(self, rank: int) -> None:
        for connection in [c for c in list(self._connections.values()) if c.rank == rank]:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        with self._active_lock:
            # By identity: another thread may have closed it, and its number may be somebody else's by now.
            if self._connections.get(connection.fd) is not connection:
                return
            del self._connections[connection.fd]
        self._loop.remove(connection.fd)
        if connection.close():
            self._on_peer_lost(connection)
        self._run_held(connection)

    # Running requests

    def _run(self, connection: Connection, frame: Frame, late: float) -> None:
        started = _now()
        name, flags = frame.name, frame.flags
        if (
            self._gate.is_shut
            and not flags & SYSTEM
            and self._gate.hold(connection.peer, name, partial(self._run, connection, frame, late))
        ):
            return
        if not flags & SYSTEM:
            if connection.outbox_bytes > MOST_UNREAD and self._waiting.hold(
                connection, partial(self._run, connection, frame, late)
            ):
                return
            self._waiting.begin(connection, frame)
        reply = Reply(connection, flags, frame.call_id, None)
        if frame.arrivals is not None:
            reply.creation = frame.arrivals.creation
            if flags & REMOTE and reply.creation is None:
                self._send_failure(reply, ConnectionLostError("its caller has given this call up as lost"))
                return
        if late and started > late:
            self._fail(reply, _too_late(frame.seconds))
            return
        if name not in self._quick:
            self.uncork()
            if name in self._slow:
                self._loop.step_aside()
        if self.gil_waits is not None:
            self._measure_gil(self.gil_waits)
        settings = None
        try:
            if self._vet is not None:
                exposed = self._resolve(name)  # first: arguments of what is not exposed are not worth reading
            if flags & CONTEXT:
                function, args, kwargs, settings = self._decode_in_context(reply, frame)
            elif frame.arrivals is not None:
                function, args, kwargs, settings = decode_with(frame.arrivals.items, self._decode, frame)
            elif name and not flags & PROFILED:
                args, kwargs = self._decode_call(frame.meta, frame.buffers, flags)
            else:
                function, args, kwargs, settings = self._decode(frame)
            if self._vet is not None:
                function = exposed
                self._vet(name, connection.rank, connection.peer, args, kwargs)
            elif name:
                function = self._resolve(name)
        except (FunctionNotFound, NotExposedError) as error:
            self._fail(reply, error)
            return
        except BaseException as error:
            error.add_note(f"{self._worker} could not decode the call's arguments.")
            self._fail(reply, error)
            return
        del frame  # with it the arguments' buffers, as soon as the function lets go of them
        outer = None if reply.context is None else current_context.set(reply.context)
        try:
            if settings is not None:
                value, reply.record = profiling.run_profiled(settings, function, args, kwargs)
            elif profiling.served_calls:
                value = profiling.run_served(function, args, kwargs)
            elif reply.trail:
                value = anomaly.run_with_trail(reply.trail, function, args, kwargs)
            else:
                value = function(*args, **kwargs)
        except BaseException as error:
            if name.startswith(b"torch:") and isinstance(error, TypeError):
                error = _operator_error(function, args, kwargs) or error
            _log.warning("%s: %s raised %r", self._worker, _show(function, name), error, exc_info=error)
            self._fail(reply, error)
            return
        finally:
            args, kwargs = (), {}
            if outer is not None:
                current_context.reset(outer)
            if name:
                self._remember(name, _now() - started)
        if hasattr(function, "_wrapped_async_rpc_function"):
            self._answer_later(reply, function, value)
        else:
            self._answer_with(reply, value)

    def _decode(self, frame: Frame) -> tuple[Any, Any, Any, Any]:
        """The function (None if it goes by its name), its arguments, and the settings of a profile."""
        if frame.flags & PROFILED:
            return self._dialect.decode(frame.meta, frame.buffers)  # type: ignore[no-any-return]
        if frame.name:
            return None, *self._decode_call(frame.meta, frame.buffers, frame.flags), None
        return *self._dialect.decode(frame.meta, frame.buffers), None

    def _decode_in_context(self, reply: Reply, frame: Frame) -> tuple[Any, Any, Any, Any]:
        """A call of an autograd context: it runs in it here too, unless it has ended meanwhile."""
        head = take_head(frame)
        context = self._contexts.meet(head.context_id)
        items = () if frame.arrivals is None else frame.arrivals.items
        if context is None:
            return decode_with(items, self._decode, frame)  # type: ignore[no-any-return]
        reply.context = context
        reply.trail = head.trail
        return context.receive(reply.connection.rank, head, decode_with, items, self._decode, frame)  # type: ignore[no-any-return]

    def _answer_with(self, reply: Reply, value: Any) -> None:
        """Answer with a value, or once there is one."""
        kind = type(value)
        if kind is CoroutineType:
            outer = current_context.set(reply.context)  # a task has the contexts of whoever starts it
            self._coroutines.run(
                value, lambda result: self._answer(reply, result), lambda error: self._fail(reply, error)
            )
            current_context.reset(outer)
        elif kind is Later:
            value.subscribe(lambda: self._loop.submit_request(self._resume, reply, value))
        else:
            self._answer(reply, value)

    def _resume(self, reply: Reply, later: Later) -> None:
        outer = current_context.set(reply.context)
        try:
            value = later.resume()
        except BaseException as error:
            self._fail(reply, error)
            error.__traceback__ = None  # as in _answer_later
        else:
            self._answer_with(reply, value)
        finally:
            current_context.reset(outer)

    def _answer_later(self, reply: Reply, function: Any, value: Any) -> None:
        """A function decorated with ``async_execution``: its thread is free until its future is done."""
        if not isinstance(value, Future):
            self._fail(reply, not_a_future(function, value))
            return

        with self._active_lock:
            self.active_async += 1

        def done(future: Any) -> None:
            with self._active_lock:
                self.active_async -= 1
            try:
                result = future.wait()
            except BaseException as error:
                self._fail(reply, error)
                error.__traceback__ = None  # its frames have the future, which has the error, unseen by the collector
            else:
                self._answer(reply, result)

        value.add_done_callback(done)

    def _answer(self, reply: Reply, value: Any) -> None:
        if reply.creation is not None:
            reply.creation.cell.fill(value)
            value = None
        forks: list[Fork] = []
        connection, record = reply.connection, reply.record
        try:
            try:
                if reply.context is not None:
                    encoded = self._encode_in_context(reply.context, connection.rank, value, record, reply.trail)
                elif record is None:
                    encoded = self._encode_value(value)
                else:
                    encoded = self._encode_object((value, record()))
            except NotPlaced:
                encoded = self._encode_placed(reply, value)
            if encoded.travellers:
                encoded, forks = self._references.depart(encoded, connection.rank, connection)
        except BaseException as error:
            error.add_note(f"{self._worker} could not encode the function's result, a {type(value).__name__}.")
            self._fail(reply, error)
            return
        del value
        self._send(reply, ANSWER, encoded, forks)

    def _encode_in_context(self, context: Context, to: int, value: Any, record: Record | None, trail: str) -> Encoded:
        if value is None or context.is_released:
            return self._encode_value(value) if record is None else self._encode_object((value, record()))
        if record is None:
            return context.send(to, lambda graph: self._encode_value(value, graph), trail)
        whole = (value, record())
        return context.send(to, lambda graph: self._encode_object(whole, graph), trail)

    def _encode_placed(self, reply: Reply, value: Any) -> Encoded:
        """Encode an answer with tensors that go to other devices than the CPU."""
        context, record = reply.context, reply.record
        place = self._devices.back_to(reply.connection.peer)
        whole = value if record is None else (value, record())
        if context is None or value is None or context.is_released:
            return self._dialect.encode_value(whole, None, place)
        to = reply.connection.rank
        return context.send(to, lambda graph: self._dialect.encode_value(whole, graph, place), reply.trail, placed=True)

    def _fail(self, reply: Reply, error: BaseException) -> None:
        if reply.creation is None:
            self._send_failure(reply, error)
        else:
            # The reference is there; whoever uses it gets the error.
            creation, reply.creation = reply.creation, None
            creation.cell.fail(error)
            self._answer(reply, None)

    def _send_failure(self, reply: Reply, error: BaseException) -> None:
        encode_failure = self._dialect.encode_failure
        encoded = encode_failure(error, self._worker)
        if len(encoded.meta) > _LARGEST_FAILURE:
            short = RuntimeError(f"{type(error).__qualname__} was raised, and is too large to be sent")
            encoded = encode_failure(short, self._worker)
        self._send(reply, FAILURE, encoded, [])

    def _send(self, reply: Reply, kind: int, encoded: Encoded, forks: list[Fork]) -> None:
        connection, flags = reply.connection, reply.flags
        # Only the holder of the baton lets answers wait: if what it runs next is slow after all, the watcher sees it.
        # That a value was made is seldom waited for, so it goes with the next answer: most often to a fetch.
        unhurried = bool(flags & REMOTE)
        more = (unhurried or self._loop.requests_wait) and self._loop.holds_baton()
        try:
            connection.send(kind, flags & PROFILED, reply.call_id, 0.0, b"", encoded, more)
            if more:
                self._corked.add(connection)
                more = unhurried or self._loop.requests_wait
        except ConnectionLostError as error:
            _log.info("the answer to %s is lost: %s", connection.peer, error)
            if forks:
                self._references.route_lost(connection, connection.rank)
        except FarpropError as error:
            self._references.not_sent(forks)
            if kind == FAILURE:
                raise
            connection.send(FAILURE, 0, reply.call_id, 0.0, b"", self._dialect.encode_failure(error, self._worker))
        finally:
            self._count(flags, -1)
            if not more:
                self.uncork()

    def uncork(self) -> None:
        """Send the answers that wait for more."""
        while self._corked:
            try:
                self._corked.pop().uncork()
            except (KeyError, ConnectionLostError):
                pass  # another thread was faster, or the loop will see the end of it

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
        time.sleep(0)  # lets go of the interpreter's lock and takes it again
        waits.append((time.perf_counter() - began) * 1e6)
        del waits[:-1000]

    def _count(self, flags: int, step: int) -> None:
        with self._active_lock:
            if flags & SYSTEM:
                self._system_active += step
            else:
                self.active += step

    @property
    def owes_system_answers(self) -> bool:
        return self._system_active > 0 or any(c.outbox_bytes for c in list(self._connections.values()))

    def close(self) -> None:
        self._door.close()
        for connection in list(self._connections.values()):
            self._loop.remove(connection.fd)
            connection.close()
        self._connections.clear()
        self._coroutines.close()

    def abandon(self) -> None:
        self._door.abandon()
        for connection in self._connections.values():
            connection.abandon()

    def give_back(self) -> None:
        for connection in list(self._connections.values()):
            try:
                connection.give_back()
            except ConnectionLostError:
                pass  # the loop sees the end of it


def _too_late(seconds: float) -> RpcTimeoutError:
    return RpcTimeoutError(
        f"RPC ran for more than set timeout ({seconds * 1000:.0f} ms): its time was over before it could start, so it "
        "was not run."
    )


def _show(function: Any, name: bytes) -> str:
    return name.decode() if name else getattr(function, "__qualname__", type(function).__name__)


def _operator_error(function: Any, args: Any, kwargs: Any) -> Exception | None:
    """torch's operators called from Python say 'TypeError'; torch's RPC reports what their schemas say."""
    qualified = find_builtin(function)
    if qualified is None:
        return None
    try:
        get_operation(qualified)[0](*args, **kwargs)
    except Exception as error:
        return error
    return None
