"""Connections between simulated processes: byte streams in order, which are delayed, cut, and end with a process."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from farprop.errors import ConnectionLostError, FarpropError
from farprop.protocol.handshake import RefusedError
from farprop.protocol.host_liveness import TcpFacts
from farprop.protocol.roster import Entry
from farprop.runtime.dialer import UnresponsiveError, WrongPeerError
from tests.simulation.job.scheduler import Mode, Signal, Thread, scheduler

if TYPE_CHECKING:
    from tests.simulation.job.process import Process
    from tests.simulation.job.world import World

_KEEPALIVE_SECONDS = 6.0  # 122 in reality
_descriptors = itertools.count(1_000_000)


class Stream:
    """One end of a connection. It has what ``transport.connection`` uses of a socket."""

    def __init__(self, network: Network, process: Process, family: int) -> None:
        self.network = network
        self.process = process
        self.family = family
        self.fd = next(_descriptors)
        self.other: Stream
        self.is_cut = False  # both ends learn it at different times
        self.is_closed = False
        self.has_ended = False  # the end of the stream has arrived
        self.input = bytearray()
        self.arrived_at = 0.0
        self.reader: Thread | None = None
        self._is_shut = False
        self._last_arrival = 0.0  # of what this end has sent

    def fileno(self) -> int:
        return self.fd

    def settimeout(self, _: Any) -> None:
        """There are no timeouts."""

    def setsockopt(self, *_: Any) -> None:
        """There are no options."""

    # Sending

    def send(self, data: Any, _: int = 0) -> int:
        if self.process.is_dead:
            return len(data)
        if self.is_closed or self.has_ended:
            raise BrokenPipeError("the stream has ended")
        self.network.transmit(self, bytes(data))
        return len(data)

    def sendmsg(self, parts: Any, _ancillary: Any = (), flags: int = 0) -> int:
        return self.send(b"".join(parts), flags)

    def shutdown(self, _: int) -> None:
        """Both ends read the end of the stream."""
        if not self._is_shut and not self.process.is_dead:
            self._is_shut = self.has_ended = True
            self.network.transmit(self, b"")
            if self.reader is not None:
                scheduler.wake(self.reader)

    def close(self) -> None:
        self.shutdown(socket.SHUT_RDWR)
        self.is_closed = True

    def arrival(self, delay: float) -> float:
        """When what is sent now arrives: not before what was sent earlier."""
        self._last_arrival = max(self._last_arrival, scheduler.now + delay)
        return self._last_arrival

    # Receiving

    @property
    def is_readable(self) -> bool:
        return bool(self.input) or self.has_ended

    def recv_into(self, target: Any, _size: int = 0, _flags: int = 0) -> int:
        if self.is_closed:
            raise OSError("closed")
        count = min(len(target), len(self.input))
        if count:
            target[:count] = self.input[:count]
            del self.input[:count]
            return count
        if self.has_ended:
            return 0
        raise BlockingIOError

    def arrive(self, data: bytes) -> None:
        """Bytes have arrived, or the end of the stream."""
        if self.is_closed or self.process.is_dead or self.has_ended:
            return
        if data:
            self.input += data
            self.arrived_at = scheduler.now
        else:
            self.has_ended = True
        if self.reader is not None:
            scheduler.wake(self.reader)
        self.process.loop.notice(self)

    def facts(self) -> TcpFacts:
        """What the kernel knows: whether the other host answers."""
        if self.network.is_silent(self.process, self.other.process):
            since = int(1000 * (scheduler.now - self.network.silent_since[self.other.process, self.process]))
            return TcpFacts(2 if since > 500 else 0, 0, 1, since)
        return TcpFacts(0, 0, 0, 500)


class Poller:
    """Takes the place of ``select.poll``: waits until one stream is readable."""

    POLLIN = 1

    def __init__(self) -> None:
        self._fd = 0

    def register(self, fd: int, _: int) -> None:
        self._fd = fd

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        me = scheduler.current
        assert me is not None
        assert me.process is not None
        stream = me.process.world.network.streams[self._fd]
        if not stream.is_readable and not stream.is_closed and milliseconds != 0:
            stream.reader = me
            try:
                scheduler.park(None if milliseconds is None else milliseconds / 1000)
            finally:
                stream.reader = None
        return [(self._fd, 1)] if stream.is_readable or stream.is_closed else []


class Select:
    """Takes the place of the module ``select`` where callers wait for their answers."""

    poll = Poller
    POLLIN = 1


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self.streams: dict[int, Stream] = {}
        self.silent_since: dict[tuple[Process, Process], float] = {}  # pairs, both ways round
        self._deferred: dict[tuple[Process, Process], list[Callable[[], None]]] = {}

    def delay(self) -> float:
        rng = self.world.rng
        return rng.uniform(0.05, 0.6) if rng.random() < self.world.faults.slow else rng.uniform(0.0002, 0.004)

    # Streams

    def pair(self, one: Process, other: Process) -> tuple[Stream, Stream]:
        a, b = Stream(self, one, self.world.family), Stream(self, other, self.world.family)
        a.other, b.other = b, a
        self.streams[a.fd], self.streams[b.fd] = a, b
        return a, b

    def transmit(self, stream: Stream, data: bytes) -> None:
        if not stream.is_cut:
            self.world.counts["chunks"] += 1
            scheduler.at(stream.arrival(self.delay()), None, Mode.KERNEL, self._deliver, stream, data)

    def _deliver(self, stream: Stream, data: bytes) -> None:
        """Bytes that this end has sent arrive, unless the connection was cut meanwhile."""
        pair = stream.process, stream.other.process
        if stream.is_cut:
            return
        if pair in self.silent_since:
            self._deferred.setdefault(pair, []).append(lambda: self._deliver(stream, data))
            return
        stream.other.arrive(data)

    def cut(self, stream: Stream) -> None:
        """The connection breaks: what is in flight is lost, or arrives up to some point. Both ends notice later."""
        rng = self.world.rng
        for end in (stream, stream.other):
            if rng.random() < 0.6:
                end.is_cut = True
            scheduler.at(end.arrival(self.delay()), None, Mode.KERNEL, self._end, end)

    def _end(self, stream: Stream) -> None:
        stream.is_cut = True
        stream.other.arrive(b"")

    def cut_one(self) -> None:
        whole = [s for s in self.streams.values() if not (s.is_cut or s.is_closed or s.process.is_dead)]
        if whole:
            stream = self.world.rng.choice(whole)
            self.world.trace("the connection of %s and %s breaks", stream.process, stream.other.process)
            self.world.fault("broken connections", stream.process, stream.other.process)
            self.cut(stream)

    def on_crash(self, process: Process) -> None:
        """The kernel closes the streams of a dead process."""
        for stream in self.streams.values():
            if stream.process is process and not stream.is_closed:
                self.cut(stream)

    # Silence: nothing arrives, and nobody says so

    def is_silent(self, one: Process, other: Process) -> bool:
        return (one, other) in self.silent_since

    def silence(self, one: Process, other: Process) -> None:
        for pair in ((one, other), (other, one)):
            self.silent_since.setdefault(pair, scheduler.now)
        scheduler.after(_KEEPALIVE_SECONDS, None, Mode.KERNEL, self._keep_alive, one, other, scheduler.now)

    def _keep_alive(self, one: Process, other: Process, since: float) -> None:
        """The kernels close connections on which nothing has come for long."""
        if self.silent_since.get((one, other)) == since:
            for stream in self.streams.values():
                if {stream.process, stream.other.process} == {one, other}:
                    stream.arrive(b"")

    def heal(self) -> None:
        """Hosts that were cut off reach each other again; those that have vanished stay so."""
        for pair in list(self.silent_since):
            if not any(process.has_vanished for process in pair):
                del self.silent_since[pair]
                for deliver in self._deferred.pop(pair, ()):
                    deliver()

    # Dialling

    def dial(self, dialer: Process, entry: Entry, deadline: float) -> Stream:
        """Make a connection, as ``Dialer.dial`` does: it raises the same errors."""
        target = self.world.by_instance[entry.instance]
        self.world.counts["dials"] += 1
        deadline = max(deadline, scheduler.now + 0.25)
        answered = Signal()
        outcome: list[Stream | Exception] = []
        scheduler.after(self.delay(), None, Mode.KERNEL, self._knock, dialer, target, outcome, answered)
        answered.wait(deadline - scheduler.now)
        lost = f"Can't reach {entry.name}: %s. It has shut down or died, or the network is cut."
        if not outcome:
            outcome.append(TimeoutError())  # whoever knocks too late is not let in
            if self.is_silent(dialer, target) or target.is_dead:
                raise ConnectionLostError(lost % "it did not answer in time")
            raise UnresponsiveError(lost % "it accepts connections, but does not answer")
        (result,) = outcome
        if isinstance(result, ConnectionRefusedError):
            raise ConnectionLostError(lost % result) from result
        if isinstance(result, Exception):
            raise result
        if result.has_ended:
            result.close()
            raise ConnectionLostError(lost % "it closed the connection")
        return result

    def _knock(self, dialer: Process, target: Process, outcome: list[Any], answered: Signal) -> None:
        if self.is_silent(dialer, target):
            if not target.has_vanished:
                knock = (self.delay(), None, Mode.KERNEL, self._knock, dialer, target, outcome, answered)
                self._deferred.setdefault((dialer, target), []).append(lambda: scheduler.after(*knock) and None)
            return
        if target.is_dead or not target.is_listening:
            error: Exception = ConnectionRefusedError("refused")
            if self.world.rng.random() < 0.3:
                error = WrongPeerError("Another process has its address.")
            scheduler.after(self.delay(), dialer, Mode.KERNEL, self._answer, outcome, answered, error)
            return
        scheduler.after(self.delay(), target, Mode.LOOP, self._accept, dialer, target, outcome, answered)

    def _accept(self, dialer: Process, target: Process, outcome: list[Any], answered: Signal) -> None:
        """The target's event loop has the dialer's proof."""
        if outcome or dialer.is_dead:
            return
        if not target.is_listening:
            scheduler.after(
                self.delay(), dialer, Mode.KERNEL, self._answer, outcome, answered, ConnectionRefusedError()
            )
            return
        agent = target.agent
        try:
            identity = agent._check_peer(dialer.identity.to_bytes())
        except FarpropError as error:
            refusal = RefusedError(f"The worker we dialled refuses us: {error}")
            scheduler.after(self.delay(), dialer, Mode.KERNEL, self._answer, outcome, answered, refusal)
            return
        ours, theirs = self.pair(dialer, target)
        agent._accepted._add(theirs, identity)
        scheduler.after(self.delay(), dialer, Mode.KERNEL, self._answer, outcome, answered, ours)

    def _answer(self, outcome: list[Any], answered: Signal, result: Stream | Exception) -> None:
        if not outcome:
            outcome.append(result)
            answered.set()
        elif isinstance(result, Stream):
            result.close()


UNIX, TCP = socket.AF_UNIX, socket.AF_INET
