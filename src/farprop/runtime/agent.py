"""The agent of a worker: makes the worker's parts, connects them, and ends them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from farprop.config import Settings
from farprop.errors import AuthenticationError, FarpropError
from farprop.ids import GlobalId, WorkerInfo
from farprop.locks import make_lock
from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import CALLS
from farprop.runtime import first_failure
from farprop.runtime.accepted_connections import AcceptedConnections
from farprop.runtime.admission import BarrierGate
from farprop.runtime.async_results import AsyncResults
from farprop.runtime.autograd.context_cleanup import ContextCleanup
from farprop.runtime.autograd.contexts import context_id_of
from farprop.runtime.autograd.driver import BackwardDriver
from farprop.runtime.calls import Calls
from farprop.runtime.client_connection import ClientConnection
from farprop.runtime.device_maps import DeviceMaps
from farprop.runtime.endpoint import Endpoint
from farprop.runtime.event_loop import EventLoop
from farprop.runtime.inspector import Inspector
from farprop.runtime.job_end import JobEnd
from farprop.runtime.liveness import FailureDetector, Verdict, look_for
from farprop.runtime.many_calls import ManyCalls
from farprop.runtime.membership import Membership
from farprop.runtime.observers import Observers
from farprop.runtime.open_calls import OpenCalls
from farprop.runtime.parameter_guard import ParameterGuard
from farprop.runtime.parcels import Parcels
from farprop.runtime.peers import Peers
from farprop.runtime.recorder import recorder
from farprop.runtime.recording import Recordings
from farprop.runtime.references.rpc_handlers import OwnerMethods, backward_from_value
from farprop.runtime.references.rref_context import RRefContext
from farprop.runtime.served_streams import ServedStreams
from farprop.runtime.server import Server
from farprop.runtime.services import WorkerServices
from farprop.runtime.snapshots import Snapshots
from farprop.runtime.spinner import CROWDED
from farprop.runtime.stream_calls import StreamCalls
from farprop.runtime.thread_pool import Blocked, ThreadPool
from farprop.runtime.watch import Watch
from farprop.transport.connection import Connection
from farprop.transport.shared_copies import SharedCopies
from farprop.transport.shared_memory import SegmentPool
from farprop.transport.tls import Stream
from farprop.wire.dialect import PICKLES, Dialect
from farprop.wire.message import Method, last_words

_log = logging.getLogger(__name__)

DEFAULT_RPC_TIMEOUT = 60.0  # seconds
_LAST_ANSWERS_SECONDS = 2.0
_CLOSE_SECONDS = 2.0
_LATE_SECONDS = 0.4  # what each of these two has if the deadline of the shutdown is over
_MIN_MEETING_SECONDS = 5.0
_ENDLESS_MEETING_SECONDS = 300.0


@dataclass(frozen=True)
class AgentOptions:
    """The backend options, in the form that the agent needs."""

    num_worker_threads: int = 16
    rpc_timeout: float | None = DEFAULT_RPC_TIMEOUT
    master_host: str = "127.0.0.1"
    device_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    dialect: Dialect = PICKLES
    secret: str | None = field(default=None, repr=False)
    """The job's secret, if it does not come from the environment."""


def meeting_seconds(rpc_timeout: float | None) -> float:
    """How long to wait for the other workers to join: the timeout of calls, but not less than workers take to start."""
    return _ENDLESS_MEETING_SECONDS if rpc_timeout is None else max(rpc_timeout, _MIN_MEETING_SECONDS)


def last_seconds(most: float, deadline: float | None, now: float) -> float:
    """How long a last step of the shutdown may take."""
    return most if deadline is None else min(most, max(deadline - now, _LATE_SECONDS))


class Agent:
    """One worker of a job.

    The agent listens as soon as it is made. ``join_group`` finds the other workers.

    Args:
        store: the job's store.
        name: the name of this worker.
        rank: the rank of this worker.
        world_size: the number of workers; None in a group that workers join and leave.
        options: the backend options.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, world_size: int | None, options: AgentOptions) -> None:
        self._info = WorkerInfo(name, rank)
        self.membership = Membership(store, self._info, world_size)
        self._settings = Settings.from_env()
        if options.secret is not None:
            self._settings = replace(self._settings, secret=options.secret)
        self.autograd_mode = self._settings.autograd_mode
        self._endpoint = Endpoint(store, name, rank, CALLS, self._settings)
        self._identity, self._dialer = self._endpoint.identity, self._endpoint.dialer
        dialect = self.dialect = options.dialect
        self._pool = SegmentPool(self._settings.shm_pool_bytes, self._halve_pool_in)
        self._copies = SharedCopies(self._pool)
        self._lock = make_lock("agent")
        self._returns_due = False
        self._closed = False
        self._expects_end = False
        self._loop = EventLoop()
        self._loop.on_pause = self._on_pause
        self._loop.activity.set_limit(self._settings.spin_microseconds / 1e6, CROWDED)
        self._threads = ThreadPool(name, options.num_worker_threads, self._loop)
        self.services = WorkerServices(
            self._threads,
            self.membership,
            self._identity.instance,
            dialect,
            options.rpc_timeout,
            self._suspect,
        )
        self.gradients = BackwardDriver(rank, self.services)
        self.context_cleanup = ContextCleanup(rank, self.services, self.gradients.contexts, self.gradients.aborter)
        self.references = RRefContext(rank, name, self.services, self._on_context_ended)
        self.references.on_replaced = self._on_replaced
        self.peers = Peers(
            self._threads,
            self._info,
            self.membership,
            self._dialer,
            self.references,
            self._new_connection,
            self._on_connection_lost,
            self._settings,
        )
        self.services.bind(self.peers, self.references)
        self._devices = DeviceMaps(self.membership, options.device_maps, self.references.instances.get)
        calls = Calls(
            self._info,
            self.peers,
            self.references,
            self._devices,
            dialect,
            self.context_cleanup.ended,
            self._settings.send_autocast,
        )
        self.call_sync, self.call_async, self.remote = calls.call_sync, calls.call_async, calls.remote
        self.streams = StreamCalls(calls.call_async, self.peers, self.services)
        most_bytes = self._settings.max_message_bytes
        self.parcels = Parcels(self.services, self._copies, most_bytes)
        self.call_many = ManyCalls(
            self._info,
            calls,
            self.peers,
            self.membership,
            self.services,
            self._copies,
            self._dialer.is_near,
            most_bytes,
        ).call
        self.snapshots = Snapshots(
            self._endpoint.job, self.membership, self.peers, self._threads, self.gradients, dialect.restricted
        )
        self.inspector = Inspector(
            self.snapshots, self.membership, self.peers, self._threads, self.gradients.contexts, dialect
        )
        self.recordings = Recordings(recorder, self.membership, self.peers, dialect, self._loop.call_at)
        calls.on_timeout = self.inspector.on_timeout
        self.gradients.on_timeout = self.inspector.on_pass_timeout
        self._failure_detector = FailureDetector(
            name, self._probe, self._on_death, self._threads.submit, self._loop.call_at
        )
        self.watch = Watch(
            self.membership,
            self.references.instances.is_dead,
            self._threads.submit,
            self._loop.call_at,
            self._failure_detector.suspect,
        )
        self.gate = BarrierGate(self._threads.submit_request)
        self.owner_methods = OwnerMethods(self.references, dialect, self.backward_from_value)
        self._accepted = AcceptedConnections(
            self._loop,
            self._info,
            self._dialer.accepted,
            self._new_connection,
            self._check_peer,
            self.membership.check,
            self._on_peer_lost,
        )
        async_results = AsyncResults(self._threads, name)
        self.served_streams = ServedStreams(self._threads, async_results, self._info, dialect)
        self.parameter_guard = ParameterGuard(self.gradients.contexts, self.membership.name_of)
        self._server = Server(
            self._threads,
            self._info,
            self._accepted,
            self.references,
            self.gradients.contexts,
            self._devices,
            self.gate,
            self._settings,
            dialect,
            self.context_cleanup.release,
            self.context_cleanup.on_orphaned,
            async_results,
            {
                **self.owner_methods.table(),
                **self.gradients.methods(),
                **self.served_streams.methods(),
                **self.parcels.methods(),
                Method.CONTEXT_EXISTS: self.context_cleanup.on_context_exists,
                Method.RECORD: self.recordings.on_command,
                Method.INSPECT: self.snapshots.on_question,
            },
            self.parameter_guard,
        )
        self.served_streams.bind(self._server.uncork, self._server.encode_item)
        self.recordings.look_for_calls = lambda: OpenCalls(self.peers, self._threads, self._server)
        self.snapshots.bind(self._server, self._accepted, self._pool, lambda: self.idle)
        self._observers = Observers(
            self.inspector, self.recordings, self._identity, self._endpoint.inspection_key, self._settings.job_name
        )
        self.peers.accept_own = self._server.accept_own
        self.parcels.accept = self._server.accept
        self._server.parcels = self.parcels
        try:
            self._own_entry = self._listen(options, world_size)
            self._threads.start()
            self._threads.submit(_fill_caches_of_loggers)
        except BaseException:
            self.close()
            raise

    # Joining

    def _listen(self, options: AgentOptions, world_size: int | None) -> Entry:
        for listener in self._endpoint.listen(options.master_host):
            self._accepted.listen(listener)
        return self._endpoint.entry(
            world_size or 0,
            device_maps=options.device_maps,
            devices=options.devices,
            cuda_devices=torch.cuda.device_count(),
            restricted=self.dialect.restricted,
        )

    def join_group(self) -> None:
        """Join the other workers. In a static group this returns when all have joined.

        Raises:
            RendezvousError: the workers can't form a group, or not all of them have joined in time.
        """
        seconds = meeting_seconds(self.rpc_timeout)
        predecessors = self.membership.join(self._endpoint.keys, self._own_entry, seconds, self._look_for)
        if self.membership.is_static:
            self._endpoint.on_all_joined()
            neighbours = sum(entry.host == self._own_entry.host for entry in self.membership.entries.values())
            self._loop.activity.set_limit(self._settings.spin_microseconds / 1e6, neighbours)
        self._accepted.close_strangers()
        self._dialer.prepare(self.membership.entries.values())
        try:
            self._devices.check()
        except ValueError:
            self.leave()
            raise
        self._server.know_device_maps()
        self._observers.start()
        if predecessors:
            # Others may still wait for the dead: a connection of this worker tells them.
            for name in self.membership.entries.keys() - {self._info.name}:
                self._threads.submit(self._greet, name)
        if self._settings.on_failure == "end":
            job_end = JobEnd(self._info, self.peers.fail_all, lambda: self.watch.has_told, self._remove_files)
            self.watch.end_job_on_failure(job_end.begin)

    def _remove_files(self) -> None:
        self._endpoint.secret.let_go()
        self._observers.remove_file()

    def _look_for(self, worker: Entry, deadline: float) -> Verdict:
        return look_for(lambda entry, until: self._dialer.dial(entry, until).close(), worker, deadline)

    def _greet(self, name: str) -> None:
        try:
            self.peers.connect(name)
        except FarpropError as error:
            _log.info("%s could not tell %s that it has joined: %s", self._info.label, name, error)

    # The workers of the job

    @property
    def rpc_timeout(self) -> float | None:
        """The default timeout of calls, in seconds; None for no timeout."""
        return self.services.rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float | None) -> None:
        self.services.rpc_timeout = seconds

    @property
    def is_static_group(self) -> bool:
        return self.membership.is_static

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """Return this worker's info, or that of the worker with this name or id."""
        if worker is None:
            return self._info
        return worker if isinstance(worker, WorkerInfo) else self.membership.info(worker)

    def get_worker_infos(self) -> list[WorkerInfo]:
        return self.membership.infos()

    def living_workers(self) -> list[WorkerInfo]:
        """The workers that are not known to be dead, by rank."""
        self.membership.refresh()
        is_dead = self.references.instances.is_dead
        living = [entry for entry in self.membership.entries.values() if not is_dead(entry.rank, entry.instance)]
        return [WorkerInfo(entry.name, entry.rank) for entry in sorted(living, key=lambda entry: entry.rank)]

    def _check_peer(self, identity: bytes) -> Identity:
        """Parse the identity of an authenticated peer; raises if it is not in this group or was declared dead."""
        peer = Identity.from_bytes(identity)
        self.membership.check(peer)
        own = self._identity
        if peer.instance != own.instance and (peer.name == own.name or peer.rank == own.rank):
            raise AuthenticationError(f"{own.name}, rank {own.rank}, is alive, and has its name or its rank")
        if self.references.instances.is_dead(peer.rank, peer.instance):
            raise AuthenticationError(f"{peer.name} was declared dead")
        self.references.instances.meet(peer.rank, peer.instance)
        before = self.membership.find(peer.name)
        if before is not None and before.instance != peer.instance and before.rank != peer.rank:
            # It has the name of a dead worker, but another rank.
            reason = "Another process has taken its name: it is dead."
            self._threads.submit(self._declare_dead, before.rank, before.instance, reason)
        self.watch.met(peer.instance)
        return peer

    # Connections

    def _new_connection(self, stream: Stream, peer: Identity, on_blocked: Callable[[Connection], None]) -> Connection:
        return Connection(
            stream,
            peer.name,
            peer.rank,
            self._pool,
            self._settings.max_message_bytes,
            peer.max_message_bytes,
            on_blocked,
            self._on_returned,
            shares_memory=not self.dialect.restricted,  # a peer could change shared memory at any time
        )

    def _on_returned(self) -> None:
        # Called by the garbage collector: only a flag and a wake-up are safe here.
        self._returns_due = True
        self._loop.wake()

    def _halve_pool_in(self, seconds: float) -> None:
        # Not in the loop: to free much memory takes long.
        self._loop.call_at(time.monotonic() + seconds, lambda: self._threads.submit(self._halve_pool))

    def _halve_pool(self) -> None:
        if not self._closed and self._pool.halve():
            self.peers.give_back()
            self._accepted.give_back()

    def _on_pause(self) -> None:
        """The loop is about to sleep: send the messages that wait for more."""
        self._server.uncork()
        self._server.end_contexts()
        if self._returns_due:
            self._returns_due = False
            self.peers.give_back()
            self._accepted.give_back()

    def _on_connection_lost(self, connection: ClientConnection) -> None:
        self.context_cleanup.on_connection_lost(connection.rank)
        self._suspect(connection.rank)

    def _on_peer_lost(self, connection: Connection) -> None:
        _log.info("%s: %s closed its connection", self._info.label, connection.peer)
        self.references.route_lost(connection, connection.rank)
        self.served_streams.on_connection_lost(connection)
        self.parcels.on_lost(connection.rank)
        self._suspect(connection.rank)

    def _probe(self, rank: int, timeout: float | None = None) -> None:
        """Dial a worker, unless there is a connection; raises what dialling raises."""
        self.peers.probe(rank, timeout)
        connection = self.peers.by_rank.get(rank)
        if connection is not None and self.watch.concerned_with(rank):
            connection.keep_probing()

    def _on_death(self, rank: int, reason: str) -> bool:
        """A worker is dead: accept nothing from it any more, and fail what depends on it."""
        return self._declare_dead(rank, self.peers.probed.get(rank), reason)

    def _declare_dead(self, rank: int, instance: str | None, reason: str) -> bool:
        """As ``_on_death``; False if another process has its rank by now."""
        if instance is not None and self.references.instances.get(rank, instance) != instance:
            return False
        if who := first_failure.known():
            reason = f"{reason.rstrip()} {who}."
        if instance is not None and self.membership.has_left(instance):
            _log.info("%s: rank %d has left", self._info.label, rank)
        else:
            _log.warning("%s: %s has died", self._info.label, self.membership.name_of(rank))
        self.peers.lose(rank, "it has died")
        self._accepted.close_those_of(rank)
        if self.references.died(rank, instance):
            self.context_cleanup.on_death(rank)
            self.watch.died(rank, instance, reason)
        return True

    def _on_replaced(self, rank: int, instance: str) -> None:
        """Another process has the rank of a dead worker: accept nothing from the dead one any more."""
        _log.warning("%s: another process has taken rank %d: the one before it is dead", self._info.label, rank)
        self.watch.died(rank, None, "Another process has taken its rank: it is dead.", unless=instance)
        self.peers.lose(rank, "it has died, and another process has taken its place", unless=instance)
        self._accepted.close_those_of(rank, unless=instance)
        self.context_cleanup.on_death(rank)

    # Between references and backward passes

    def _on_context_ended(self, context: GlobalId, told_by: int) -> None:
        self.context_cleanup.release(context_id_of(context), told_by)

    def backward_from_value(self, value: Any, context_id: int | None, retain_graph: bool) -> None:
        """Run a backward pass from a value that remote references refer to."""
        fast = self.autograd_mode == "fast"
        backward_from_value(self.gradients, value, context_id, retain_graph, fast, self.rpc_timeout)

    # Liveness

    def _suspect(self, rank: int) -> None:
        """Check whether a worker is alive, if its death would change anything here."""
        concerned = (
            self.references.concerned_with(rank)
            or self.context_cleanup.concerned_with(rank)
            or self.watch.concerned_with(rank)
        )
        if not self._closed and not self._expects_end and rank != self._info.id and concerned:
            self._failure_detector.suspect(rank)

    def look_now(self, rank: int, timeout: float | None) -> None:
        """Check now, on this thread, whether a worker is alive. Without a timeout, that of dialling applies."""
        self._failure_detector.look_now(rank, timeout)

    def blocked(self) -> Blocked:
        """``with agent.blocked():`` around a wait in a called function, so that the pool replaces its thread."""
        return self._threads.blocked()

    # State

    @property
    def idle(self) -> bool:
        """Whether no call or backward pass of this worker is open, and no request to it is unanswered.

        Farprop's own calls don't count. A round of the shutdown ends with calls of the leader's; if they counted, and
        took longer than it waits before the next round, it would never be idle. ``settled`` waits for references.
        """
        sent = self.peers.requests_sent
        # In this order: a call is open, then its answer is delivered. And what runs meanwhile may send others.
        if self.peers.open_work or self._server.active or self._threads.delivers or not self.references.settled:
            return False
        if not self.context_cleanup.ended.is_empty or self._server.has_ended_contexts or self.gradients.is_waiting:
            return False
        return self.peers.requests_sent == sent

    def profile_gil(self, flag: bool) -> None:
        """Turn on or off measuring how long pool threads wait for the interpreter's lock."""
        self._server.gil_waits = [] if flag else None

    def get_debug_info(self) -> dict[str, str]:
        facts = self._threads.facts()
        info = {
            "agent.thread_pool_size": facts["limit"],
            "agent.num_idle_threads": facts["idle"],
            "agent.num_pending_requests": facts["queued"],
            "agent.client_active_calls": self.peers.open_calls,
            "agent.server_active_calls": self._server.active,
            "agent.server_active_async_calls": self._server.async_results.futures,
            "agent.shm_free_bytes": self._pool.free_bytes,
        }
        waits = self._server.gil_waits
        if waits is not None:
            info["agent.gil_average_wait_time_us"] = round(sum(waits) / max(len(waits), 1))
        return {key: str(value) for key, value in info.items()}

    # Ending

    def tell_failure(self, error: BaseException) -> None:
        """The program of this worker fails: tell the others who failed first, and with what."""
        text = first_failure.last_words(error, self._info.name, self.dialect.restricted)
        if not text or self._closed:
            return
        end = time.monotonic() + first_failure.SECONDS
        told = {self._info.name}
        connections: list[Connection | ClientConnection] = [*self._accepted.all(), *self.peers.connections.values()]
        for connection in connections:
            with suppress(FarpropError):
                if connection.rank != self._info.id:
                    connection.send(last_words(text))
                    told.add(connection.peer)
        for name in self.membership.entries.keys() - told:
            # Those that are not connected may want to be soon, and would find nobody.
            left = end - time.monotonic()
            if left > 0:
                with suppress(FarpropError):
                    self.peers.connect(name, left).send(last_words(text))
        while (self._accepted.have_output or self.peers.have_output) and time.monotonic() < end:
            time.sleep(0.001)

    def leave(self) -> None:
        """Remove this worker from the store's list, in a dynamic group."""
        try:
            self.membership.leave()
        except RuntimeError as error:
            _log.info("%s: the store is gone already: %s", self._info.label, error)

    def expect_end(self) -> None:
        """All workers end now: whoever is lost has not died, and nobody is told."""
        self.watch.close()
        self._expects_end = True

    def shutdown(self, deadline: float | None = None) -> None:
        """Stop, once the answers to the gathers of other workers are sent. Takes less than a second if the deadline is
        over.
        """
        end = time.monotonic() + last_seconds(_LAST_ANSWERS_SECONDS, deadline, time.monotonic())
        self.served_streams.close()
        while (self._server.owes_system_answers or self.served_streams.are_closing) and time.monotonic() < end:
            time.sleep(0.0005)
        self.close(last_seconds(_CLOSE_SECONDS, deadline, time.monotonic()))

    def abandon(self) -> None:
        """In a forked child, close the descriptors and touch nothing else. The threads belong to the parent."""
        self._closed = True
        self._endpoint.secret.abandon()
        self._observers.abandon()
        self.peers.abandon()
        self._accepted.abandon()
        self._threads.abandon()

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Stop now: open calls fail, connections close, threads end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.watch.close()
        self.inspector.is_closed = True
        self.snapshots.close()
        self.recordings.close()
        self._observers.close()
        self._endpoint.secret.let_go()
        self._failure_detector.close()
        self.references.close()
        self.peers.close()
        self.gradients.close()
        self.served_streams.close()
        self._accepted.close()
        self._server.close()
        self._copies.close()
        self._threads.close(timeout)
        self.membership.forget_store()


def _fill_caches_of_loggers() -> None:
    """Ask each of farprop's loggers once which levels it takes: it remembers the answers.

    To find an answer takes a lock of ``logging``, and an interrupt between ``acquire`` and the ``try`` behind it would
    keep that for ever. No interrupts come to the thread that this runs on.
    """
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.startswith("farprop") and isinstance(logger, logging.Logger):
            for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
                logger.isEnabledFor(level)
