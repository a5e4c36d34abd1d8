"""One worker: its connections, its server, and the calls it makes. The only object that knows all of the parts."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from farprop.config import Settings
from farprop.errors import (
    AuthenticationError,
    ConnectionLostError,
    InjectedFaultError,
    RpcTimeoutError,
    UsageError,
)
from farprop.ids import GlobalId, WorkerInfo
from farprop.protocol.references.messages import Fork
from farprop.protocol.references.records import OwnedValue, UserReference
from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import CALLS, Keys
from farprop.runtime import rendezvous
from farprop.runtime.cells import Cell
from farprop.runtime.creation import CreationCall, ProfiledCreation
from farprop.runtime.devices import DeviceMaps, careful
from farprop.runtime.dialling import Dialling, SomebodyElse, Unresponsive
from farprop.runtime.gate import Gate
from farprop.runtime.gradients.contexts import COUNTER_BITS, Context, current_context
from farprop.runtime.gradients.roots import backward_on_owner
from farprop.runtime.gradients.space import GradientSpace
from farprop.runtime.group import Group
from farprop.runtime.links import FutureCall, Link, timeout_error, was_sent
from farprop.runtime.loop import Blocked, Loop
from farprop.runtime.message_types import OPERATE
from farprop.runtime.outcomes import Outcomes, ProfiledCall, TorchCall
from farprop.runtime.profiling import Session
from farprop.runtime.references import ReferenceSpace
from farprop.runtime.secret import Secret, find_secret
from farprop.runtime.serving import Server
from farprop.runtime.survival import Survival
from farprop.transport import sockets
from farprop.transport.connection import Connection
from farprop.transport.faulty import FaultyConnection, Judge, Verdict
from farprop.transport.segments import SegmentPool
from farprop.transport.tls import Stream
from farprop.wire.codec import Encoded
from farprop.wire.dialect import PICKLES, Dialect
from farprop.wire.frames import PROFILED, SYSTEM, Frame
from farprop.wire.tensors import NotPlaced

_log = logging.getLogger("farprop.agent")

UNSET_TIMEOUT = -1.0
_DIAL_SECONDS = 20.0
_LAST_ANSWERS_SECONDS = 2.0
_MIN_MEETING_SECONDS = 5.0
_ENDLESS_MEETING_SECONDS = 300.0


@dataclass(frozen=True)
class AgentOptions:
    """What the backend options say, as the agent needs it."""

    num_worker_threads: int = 16
    rpc_timeout: float = 60.0
    master_host: str = "127.0.0.1"
    device_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    dialect: Dialect = PICKLES


def meeting_seconds(rpc_timeout: float) -> float:
    """How long to wait for the other workers: as long as for an answer, but workers take seconds to start."""
    return max(rpc_timeout, _MIN_MEETING_SECONDS) if rpc_timeout else _ENDLESS_MEETING_SECONDS


class Agent:
    """A worker of a job. It listens from the start; ``join_group`` finds the others."""

    def __init__(self, store: dist.Store, name: str, rank: int, world_size: int | None, options: AgentOptions) -> None:
        self.rpc_timeout = float(options.rpc_timeout)
        self._info = WorkerInfo(name, rank)
        self._group = Group(store, self._info, world_size)
        self._settings = Settings.from_env()
        self.autograd_mode = self._settings.autograd_mode
        job = rendezvous.job_of(store)
        self._secret: Secret = find_secret(self._settings, job, partial(rendezvous.agree, store))
        self._keys = Keys(self._secret.key, job, CALLS)
        self._identity = Identity(name, rank, secrets.token_hex(8), self._settings.max_message_bytes)
        unix_allowed = self._settings.transport == "auto" and sockets.HAVE_UNIX
        self._dialling = Dialling(self._identity, self._keys, unix_allowed, self._settings)
        dialect = self.dialect = options.dialect
        self._pool = SegmentPool(self._settings.shm_pool_bytes)
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}
        self._gives_due = False
        self._closed = False
        self._judge: Judge | None = None
        self._sent_before = 0  # requests sent on links that are gone
        self._loop = Loop(name, options.num_worker_threads)
        self.gradients = GradientSpace(rank, self)
        self.references = ReferenceSpace(rank, name, self, self._on_context_ended)
        self._devices = DeviceMaps(self._group, options.device_maps, self.references.instance_of)
        moves_cpu = self._devices.moves_cpu_in_calls
        self._name_of = dialect.name_of
        self._value_of = Outcomes(dialect).value_of
        self._encode_call = careful(dialect.encode_call) if moves_cpu else dialect.encode_call
        self._encode_object = careful(dialect.encode) if moves_cpu else dialect.encode
        self._loop.home = self
        self._survival = Survival(self._probe, self._on_death, self._loop.submit, self._loop.set_alarm)
        self.gate = Gate(self._loop.submit_request)
        self._server = Server(
            self._loop,
            name,
            self._dialling.accepted,
            self._new_connection,
            self._check_peer,
            self._group.check,
            self._on_peer_lost,
            self.references,
            self.gradients.contexts,
            self._devices,
            self.gate,
            self._settings.max_message_bytes,
            dialect,
        )
        try:
            self._own_entry = self._listen(options, world_size)
            self._loop.start(self._on_alarm, self._on_pause)
        except BaseException:
            self.close()
            raise

    # Joining

    def _listen(self, options: AgentOptions, world_size: int | None) -> Entry:
        interface = self._settings.interface
        host = (
            sockets.interface_address(interface)
            if interface is not None
            else sockets.address_towards(options.master_host)
        )
        tcp = sockets.listen_tcp(host, self._settings.port_range)
        self._server.listen(tcp)
        unix = ""
        if self._dialling.unix_allowed:
            unix = f"farprop-{self._identity.instance}"
            self._server.listen(sockets.listen_unix(unix))
        return Entry(
            name=self._info.name,
            rank=self._info.id,
            world_size=world_size or 0,
            instance=self._identity.instance,
            tcp=tcp.getsockname()[:2],
            unix=unix,
            net=self._dialling.net,
            host=socket.gethostname(),
            pid=os.getpid(),
            own_secret=self._secret.was_found,
            tls=self._settings.tls,
            max_message_bytes=self._settings.max_message_bytes,
            device_maps=options.device_maps,
            devices=options.devices,
            cuda_devices=torch.cuda.device_count(),
            restricted=self.dialect.restricted,
        )

    def join_group(self) -> None:
        """Meet the other workers. Returns when all are there, in a static group; raises if they can't be a group."""
        self._group.join(self._keys, self._own_entry, meeting_seconds(self.rpc_timeout))
        if self._group.is_static:
            if self._info.id == 0:
                self._secret.remove_file()  # all have read it
            self._secret.let_go()
        self._server.close_strangers()
        self._dialling.prepare(self._group.entries.values())
        try:
            self._devices.check()
        except ValueError:
            self.leave()
            raise
        self._server.know_device_maps()

    # Who is who

    @property
    def is_static_group(self) -> bool:
        return self._group.is_static

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """This worker's info, or that of the worker with this name or id."""
        if worker is None:
            return self._info
        return worker if isinstance(worker, WorkerInfo) else self._group.info(worker)

    def instance_of(self, worker: str) -> str | None:
        """What tells the process that has this name now from others that had it; None if there is none."""
        entry = self._group.find(worker)
        if entry is None:
            self._group.refresh()
            entry = self._group.find(worker)
        return None if entry is None else entry.instance

    def get_worker_infos(self) -> list[WorkerInfo]:
        return self._group.infos()

    def name_of_rank(self, rank: int) -> str:
        entry = self._group.find(rank)
        return f"worker {rank}" if entry is None else entry.name

    def _check_peer(self, identity: bytes) -> Identity:
        """Who a peer is that has proved itself; refuses one that is not of this group, or was taken for dead."""
        peer = Identity.from_bytes(identity)
        self._group.check(peer)
        if self.references.is_dead(peer.rank, peer.instance):
            raise AuthenticationError(f"{peer.name} was taken for dead")
        self.references.meet(peer.rank, peer.instance)
        return peer

    # Connections

    def _new_connection(self, stream: Stream, peer: Identity, on_blocked: Callable[[Connection], None]) -> Connection:
        return Connection(
            stream,
            peer.name,
            self._pool,
            self._settings.max_message_bytes,
            peer.max_message_bytes,
            on_blocked,
            self._on_returned,
            shares_memory=not self.dialect.restricted,  # who shares memory can change it at any time
        )

    def _on_returned(self) -> None:
        # Called by the garbage collector: nothing but a note and a wake-up is safe here.
        self._gives_due = True
        self._loop.wake()

    def _on_pause(self) -> None:
        """The loop is about to sleep: send what waits."""
        self._server.uncork()
        if self._gives_due:
            self._gives_due = False
            for link in list(self._links.values()):
                link.give_back()
            self._server.give_back()

    def link(self, to: Any, timeout: float = 0.0) -> Link:
        """The connection to a worker, dialled if there is none, within ``timeout`` (0: as long as dialling may
        take).
        """
        link = self._links.get(to) if type(to) is str else None
        if link is None or link.lost:
            name = self.get_worker_info(to).name
            link = self._links.get(name)
            if link is not None and link.lost:
                self._on_lost(link, "losing it was interrupted")  # between two of its lines
                link = None
            link = link or self._dial(name, timeout)
        return link

    def _dial(self, name: str, timeout: float) -> Link:
        # Threads that dial at once each make a connection, and the first one is kept: nobody waits for another's.
        began = time.monotonic()
        seconds = min(_DIAL_SECONDS, timeout or _DIAL_SECONDS)
        with self._loop.blocked():
            try:
                return self._dial_now(name, began + seconds)
            except ConnectionLostError as error:
                if timeout and time.monotonic() - began >= timeout:
                    raise timeout_error(name, timeout) from error
                raise

    def _dial_now(self, name: str, deadline: float) -> Link:
        if self._closed:
            raise UsageError("RPC has been shut down on this worker.")
        entry = self._group.find(name)
        if entry is not None and self.references.instance_of(entry.rank) not in (None, entry.instance):
            self._group.refresh()  # another has taken its place, and we have met it already
            entry = self._group.find(name)
        if entry is None:
            raise UsageError(f"{self._info.name} could not find destination {name!r}.")
        if self.references.is_dead(entry.rank, entry.instance):
            raise ConnectionLostError(f"{name} ({entry.host}, pid {entry.pid}) has died.")
        link = Link(self._loop, name, entry.rank, self._on_lost, self.references.arrive)
        stream = self._dialling.dial(entry, deadline)
        self.references.meet(entry.rank, entry.instance)
        connection = self._new_connection(stream, entry.identity, link.want_output)
        try:
            connection.open_passage()
        except OSError as error:
            connection.close()
            raise ConnectionLostError(f"Can't talk to {name} ({entry.host}, pid {entry.pid}): {error}.") from error
        link.attach(connection)
        if self._judge is not None:
            link.wrap(self._make_faulty)
        kept = self._keep(link)
        if kept is not link:
            link.lose("another connection was faster")
        if kept is None:
            raise UsageError("RPC has been shut down on this worker.")
        return kept

    def _keep(self, link: Link) -> Link | None:
        """The link to use from now on: this one, or one that another thread has dialled meanwhile; None when closed."""
        with self._lock:
            return None if self._closed else self._links.setdefault(link.peer, link)

    def _on_lost(self, link: Link, reason: str) -> None:
        _log.info("%s: lost the connection to %s: %s", self._info.name, link.peer, reason)
        with self._lock:
            was_used = self._links.get(link.peer) is link
            if was_used:
                del self._links[link.peer]
                self._sent_before += link.sent
        self.references.route_lost(link, link.rank)
        if was_used and not self._closed:
            self.gradients.lost(link.rank)
            self._look_after_contexts(link.rank)

    def _on_peer_lost(self, connection: Connection) -> None:
        _log.info("%s: %s closed its connection", self._info.name, connection.peer)
        self.references.route_lost(connection, connection.rank)
        self._look_after_contexts(connection.rank)

    def _look_after_contexts(self, rank: int) -> None:
        if not self._closed and self.gradients.concerned_with(rank):
            self._survival.suspect(rank)

    def _on_death(self, rank: int) -> None:
        """A worker is dead: nothing that it sent may come after this."""
        name = self.name_of_rank(rank)
        _log.warning("%s: %s has died", self._info.name, name)
        link = self._links.get(name)
        if link is not None:
            link.lose("it has died")
        self._server.close_connections_of(rank)
        self.references.died(rank)
        self.gradients.died(rank)

    # Calls

    def call_sync(
        self, to: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float, flags: int = 0
    ) -> Any:
        if timeout == UNSET_TIMEOUT:
            timeout = self.rpc_timeout
        link = self.link(to, timeout)
        name = self._name_of(function)
        plain = None if name is not None else function
        context = current_context.get()
        meanwhile = None
        try:
            if context is None or flags:
                context = None
                encoded = self._encode_call(plain, args, kwargs)
            else:
                encoded = context.send(link.rank, lambda graph: self._encode_call(plain, args, kwargs, graph))
                meanwhile = context.look_at_leaves
        except NotPlaced:
            encoded = self._encode_placed(link.peer, link.rank, context, self._encode_call, plain, args, kwargs)
        if not encoded.travellers:
            return self._value_of(link.call_sync(flags, name or b"", encoded, timeout, meanwhile), context, link.rank)
        encoded, forks = self.references.depart(encoded, link.rank, link)
        try:
            frame = link.call_sync(flags, name or b"", encoded, timeout, meanwhile)
        except BaseException as error:
            self._after_failed_send(link, forks, error)
            raise
        return self._value_of(frame, context, link.rank)

    def call_async(
        self,
        to: Any,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        future: torch.futures.Future[Any],
        flags: int = 0,
    ) -> None:
        """Raises only what is wrong with the call itself; a worker that can't be reached is the future's error."""
        if timeout == UNSET_TIMEOUT:
            timeout = self.rpc_timeout
        name = self._name_of(function)
        plain = None if name is not None else function
        call = TorchCall(timeout, future, self._value_of)
        encoded = self._encode(to, flags, call, self._encode_call, plain, args, kwargs)
        self._send_async(to, flags, name or b"", encoded, call)

    def _encode(self, to: Any, flags: int, call: TorchCall, encoder: Callable[..., Encoded], *whole: Any) -> Encoded:
        """Encode a call, in the autograd context of this thread if there is one."""
        context = current_context.get()
        try:
            if context is None or flags & SYSTEM:
                context = None
                return encoder(*whole)
            call.context, call.sender = context, self.get_worker_info(to).id
            return context.send(call.sender, lambda graph: encoder(*whole, graph))
        except NotPlaced:
            callee = self.get_worker_info(to)
            return self._encode_placed(callee.name, callee.id, context, encoder, *whole)

    def _encode_placed(
        self, to: str, rank: int, context: Context | None, encoder: Callable[..., Encoded], *whole: Any
    ) -> Encoded:
        """Encode a call with tensors that go to other devices than the CPU."""
        place = self._devices.towards(to)
        if context is None:
            return encoder(*whole, None, place=place)
        return context.send(rank, lambda graph: encoder(*whole, graph, place=place), placed=True)

    def _send_async(self, to: Any, flags: int, name: bytes, encoded: Encoded, call: FutureCall) -> None:
        try:
            link = self.link(to, call.timeout)
        except ConnectionLostError as error:
            call.finish(None, error)
            return
        forks: list[Fork] = []
        if encoded.travellers:
            encoded, forks = self.references.depart(encoded, link.rank, link)
        try:
            link.call_async(flags, name, encoded, call)
        except (ConnectionLostError, InjectedFaultError) as error:
            self._after_failed_send(link, forks, error)
            call.finish(None, error)
        except BaseException as error:
            self._after_failed_send(link, forks, error)
            raise

    def _after_failed_send(self, link: Link, forks: list[Fork], error: BaseException) -> None:
        """Those references that were never sent come back. If they may have been, the protocol asks after them."""
        if not was_sent(error):
            self.references.not_sent(forks)
        elif not isinstance(error, RpcTimeoutError):  # after a timeout it is on its way, if late
            self.references.doubted(forks)

    def call_profiled(
        self,
        to: Any,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        future: torch.futures.Future[Any],
        session: Session,
        key: str,
    ) -> None:
        """As ``call_async``, and what ran on the callee goes into the caller's profile before the future is done."""
        self._check_profile()
        if timeout == UNSET_TIMEOUT:
            timeout = self.rpc_timeout
        name = self._name_of(function)
        whole = (None if name is not None else function, args, kwargs, session.settings)
        call = ProfiledCall(timeout, future, self._value_of, session, key, self._info.id)
        encoded = self._encode(to, 0, call, self._encode_object, whole)
        self._send_async(to, PROFILED, name or b"", encoded, call)

    def _check_profile(self) -> None:
        if self.dialect.restricted:
            raise UsageError("A restricted job records no profiles of calls. Make the call outside of the profile.")

    def create(
        self,
        to: Any,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        site: str,
        profile: tuple[Session, str] | None = None,
        keep: Any = None,
    ) -> CreationCall:
        """Have a worker run a function and keep what it returns. Its ``subject`` is what refers to that."""
        if timeout == UNSET_TIMEOUT:
            timeout = self.rpc_timeout
        link = self.link(to, timeout)
        name = self._name_of(function)
        flags = 0
        plain = None if name is not None else function
        if profile is not None:
            self._check_profile()
            flags = PROFILED

        whole: tuple[Any, ...] = (plain, args, kwargs)
        encoder = self._encode_call
        if profile is not None:
            encoder, whole = self._encode_object, ((*whole, profile[0].settings),)
        context = current_context.get()
        try:
            if context is None:
                encoded = encoder(*whole)
            else:
                encoded = context.send(link.rank, lambda graph: encoder(*whole, graph))
        except NotPlaced:
            encoded = self._encode_placed(link.peer, link.rank, context, encoder, *whole)
        space = self.references
        subject: UserReference | OwnedValue
        if link.rank == self._info.id:
            subject = space.own(Cell(_shown(name, function).encode(), site.encode()))
            creation = space.own_call(subject)
        else:
            subject = space.create(link.rank, site)
            creation = Fork(link.rank, subject.rref, subject.fork, exists=False)
        forks: list[Fork] = []
        sending = False
        try:
            noted = None if profile is None else ProfiledCreation(*profile, self._info.id)
            call = CreationCall(timeout, space, subject, keep, noted, self.dialect)
            encoded, forks = space.depart(encoded, link.rank, link, creation, site)
            sending = True
            link.call_async(flags, name or b"", encoded, call)
        except (ConnectionLostError, InjectedFaultError) as error:
            self._after_failed_send(link, forks, error)
            if not sending:  # it is the error of one of the arguments
                space.abandon(subject, sent=False)
                raise
            call.fail(error)  # the reference exists and says so; the program may never use it
        except BaseException as error:
            self._after_failed_send(link, forks, error)
            space.abandon(subject, sent=sending and was_sent(error))
            raise
        return call

    # Faults, for tests

    def set_judge(self, judge: Judge | None) -> Judge | None:
        """Have ``judge`` look at every message before it is sent to another worker; returns the one before."""
        with self._lock:
            before, self._judge = self._judge, judge
            links = list(self._links.values()) if before is None else []
        for link in links:
            link.wrap(self._make_faulty)
        return before

    def _make_faulty(self, connection: Any) -> Any:
        return connection if isinstance(connection, FaultyConnection) else FaultyConnection(connection, self._ask_judge)

    def _ask_judge(self, *message: Any) -> Verdict | None:
        judge = self._judge
        return None if judge is None else judge(*message)

    # What the references need

    def is_ready(self, rank: int) -> bool:
        return any(link.rank == rank and link.has_room for link in list(self._links.values()))

    def send_batch(self, rank: int, number: int, operations: bytes, call: FutureCall) -> None:
        encoded = self.dialect.encode_call(None, (self._info.id, self._identity.instance, number, operations), {})
        self.link(rank, call.timeout).call_async(SYSTEM, OPERATE, encoded, call)

    # What backward passes need

    def send_own(self, rank: int, name: bytes, encoded: Encoded, call: FutureCall, system: bool) -> None:
        self.link(rank, call.timeout).call_async(SYSTEM if system else 0, name, encoded, call)

    def call_own(self, rank: int, name: bytes, encoded: Encoded, timeout: float, system: bool) -> Frame:
        return self.link(rank, timeout).call_sync(SYSTEM if system else 0, name, encoded, timeout)

    def ranks(self) -> list[int]:
        return [info.id for info in self.get_worker_infos()]

    def clean_up(self, rank: int, context_id: int) -> None:
        counter = context_id & (1 << COUNTER_BITS) - 1
        self.references.clean_up(rank, GlobalId(context_id >> COUNTER_BITS, counter))

    def _on_context_ended(self, context: GlobalId, told_by: int) -> None:
        self.gradients.release((context.created_on << COUNTER_BITS) + context.local_id, told_by)

    def backward_on_owner(self, value: Any, context_id: int, retain_graph: bool) -> None:
        """Run a backward pass from a value that others refer to."""
        fast = self.autograd_mode == "fast"
        backward_on_owner(self.gradients, value, context_id, retain_graph, fast, self.rpc_timeout)

    # What both need

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        self._loop.submit(function, *args)

    def set_alarm(self, when: float) -> None:
        self._loop.set_alarm(when)

    def nudge(self, when: float) -> None:
        self._loop.nudge(when)

    def look_after(self, rank: int) -> None:
        concerned = self.references.concerned_with(rank) or self.gradients.concerned_with(rank)
        if not self._closed and rank != self._info.id and concerned:
            self._survival.suspect(rank)

    def look_now(self, rank: int, seconds: float) -> None:
        """Find out now whether a worker lives, on this thread, within ``seconds`` (0: as long as dialling may take)."""
        self._survival.look_now(rank, seconds)

    def _probe(self, rank: int, timeout: float = 0.0) -> None:
        """Dial a worker, unless there is a connection. Raises if it can't be, and says so if it is surely gone."""
        if self._closed:
            raise UsageError("RPC has been shut down on this worker.")
        if not self._group.joined.is_set():
            raise Unresponsive("this worker is still joining the group, and does not know its address")
        self._group.refresh()
        entry = self._group.find(rank)
        known = self.references.instance_of(rank)
        if entry is None or (known is not None and entry.instance != known):
            raise SomebodyElse(f"{self.name_of_rank(rank)} has left the group")
        self.link(entry.name, timeout)

    def blocked(self) -> Blocked:
        """``with agent.blocked():`` around a wait in a called function, so that its thread counts as free."""
        return self._loop.blocked()

    # Time

    def _on_alarm(self, now: float) -> float:
        times = [link.expire(now) for link in list(self._links.values())]
        times += self._server.expire(now), self.references.expire(now), self._survival.expire(now)
        return min((t for t in times if t), default=0.0)

    # State

    @property
    def idle(self) -> bool:
        """No call of ours is open or being delivered, and no request of others is unanswered."""
        if self._server.active or self._loop.delivers or not self.references.settled:
            return False
        return not any(link.open_calls for link in list(self._links.values()))

    @property
    def requests_sent(self) -> int:
        with self._lock:
            return self._sent_before + sum(link.sent for link in self._links.values())

    def profile_gil(self, flag: bool) -> None:
        """Measure how long pool threads wait for the interpreter's lock."""
        self._server.gil_waits = [] if flag else None

    def get_debug_info(self) -> dict[str, str]:
        facts = self._loop.facts()
        info = {
            "agent.thread_pool_size": facts["limit"],
            "agent.num_idle_threads": facts["idle"],
            "agent.num_pending_requests": facts["queued"],
            "agent.client_active_calls": sum(link.open_calls for link in list(self._links.values())),
            "agent.server_active_calls": self._server.active,
            "agent.server_active_async_calls": self._server.active_async,
            "agent.shm_free_bytes": self._pool.free_bytes,
        }
        waits = self._server.gil_waits
        if waits is not None:
            info["agent.gil_average_wait_time_us"] = round(sum(waits) / max(len(waits), 1))
        return {key: str(value) for key, value in info.items()}

    # Ending

    def leave(self) -> None:
        """A group that comes and goes: tell the store that this worker is gone."""
        try:
            self._group.leave()
        except RuntimeError as error:
            _log.info("%s: the store is gone already: %s", self._info.name, error)

    def shutdown(self) -> None:
        """Stop, once the answers that farprop's own gatherings owe to others are sent."""
        end = time.monotonic() + _LAST_ANSWERS_SECONDS
        while self._server.owes_system_answers and time.monotonic() < end:
            time.sleep(0.0005)
        self.close()

    def abandon(self) -> None:
        """In a forked child: close the descriptors, touch nothing else. The threads are the parent's."""
        self._closed = True
        for link in self._links.values():
            link.abandon()
        self._server.abandon()
        self._loop.abandon()

    def close(self, timeout: float = 2.0) -> None:
        """Stop now: open calls fail, connections close, threads end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = list(self._links.values())
        if self._group.is_static and not self._group.joined.is_set():
            self._secret.remove_file()  # nobody will come any more
        self._secret.let_go()
        self._survival.close()
        self.references.close()
        for link in links:
            link.lose("this worker shut down")
        self._server.close()
        self._loop.close(timeout)
        self._group.forget_store()


def _shown(name: bytes | None, function: Any) -> str:
    return name.decode() if name else getattr(function, "__qualname__", type(function).__name__)
