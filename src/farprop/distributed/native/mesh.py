"""A connection to every other rank of the group, and the thread that reads from all of them.

The thread always reads: messages that nobody has posted a receive for are kept. So a rank that sends can only be held
up by one that is stopped or slow, never by one that sends, too. The thread also probes whether the other hosts answer.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from farprop.distributed.native.framing import HEARTBEAT, FrameKind, FrameReader, pack
from farprop.distributed.native.group_state import PATIENCE, CollectiveCall, GroupState
from farprop.distributed.native.matching import IncomingMessage, MessageMatcher, PostedRecv
from farprop.errors import CollectiveError, CollectiveTimeoutError, ProtocolError, RankLostError, renewed
from farprop.locks import make_lock
from farprop.protocol.host_liveness import PROBE_SECONDS, HostLiveness, HostState
from farprop.runtime.first_failure import SECONDS, explained, told
from farprop.transport import sockets
from farprop.transport.sockets import SEND_FLAGS, unsent
from farprop.transport.tls import Stream, TlsSocket

_log = logging.getLogger(__name__)

_GOODBYE_SECONDS = 1.0
_REPORT_SECONDS = 0.5
_READS_A_TURN = 64  # then it is the turn of the next rank
_LEFT = "it has left the group"
_FAILED = "its program has ended with an exception"


class Mesh:
    """The connections of one rank.

    Args:
        rank: this rank.
        peers: a connection to every other rank.
        max_bytes: the largest message that this rank takes.
        on_state_change: called, in any thread, when a wait for other ranks may have become pointless.
        peer_limits: the largest message that each of the other ranks takes.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Stream],
        max_bytes: int,
        on_state_change: Callable[[], None],
        peer_limits: Mapping[int, int] | None = None,
    ) -> None:
        self.rank = rank
        self.state = GroupState(rank, len(peers) + 1, self._on_group_failure)
        self.matcher = MessageMatcher(max_bytes)
        self._on_state_change = on_state_change
        self._peer_limits = peer_limits or {}
        self.read_lock = make_lock("mesh_read")
        self._send_locks = {peer: make_lock("mesh_send") for peer in peers}
        self._sockets = dict(peers)
        self._gone: dict[int, str] = {}  # ranks that can't be reached any more, and why
        self._newly_lost: deque[int] = deque()  # those of them that somebody may still wait for
        self._is_closed = False
        self._has_failed = False  # the program of this rank
        self._readers = {peer: FrameReader(self, peer, max_bytes) for peer in peers}
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopped = socket.socketpair()
        self._selector.register(self._stopped, selectors.EVENT_READ)
        for peer, sock in peers.items():
            self._selector.register(sock, selectors.EVENT_READ, peer)
        self._probed = {peer: HostLiveness() for peer, sock in peers.items() if sockets.can_probe(sock)}
        for peer in self._probed:
            sockets.prepare_probes(peers[peer])
        self._thread = threading.Thread(target=self._run, name=f"farprop-group-rank{rank}", daemon=True)
        self._thread.start()

    # Sending

    def send(self, peer: int, kind: FrameKind, key: int, text: str, data: memoryview, deadline: float) -> None:
        """Send a frame; return when the system has taken all of it.

        Raises:
            CollectiveTimeoutError: the deadline is over.
            RankLostError: the rank can't be reached.
            CollectiveError: the group is broken, or the rank does not take messages of this size.
        """
        if len(data) > self._peer_limits.get(peer, len(data)):
            raise CollectiveError(
                f"Rank {peer} takes no messages above its FARPROP_MAX_MESSAGE_BYTES={self._peer_limits[peer]}, and "
                f"rank {self.rank} tried to send it {len(data)} bytes. Raise the limit on every rank, or send less."
            )
        head = memoryview(pack(kind, key, text, len(data)))
        lock = self._send_locks[peer]
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._slow(peer)
        try:
            try:
                if peer in self._gone:
                    raise self._lost(peer)
                if (failure := self._failure_of(kind)) is not None:
                    raise renewed(failure)
                self._write(peer, kind, [head, data] if len(data) else [head], deadline)
            finally:
                lock.release()
        except BaseException:
            self._end_waits()
            raise

    def _write(self, peer: int, kind: FrameKind, parts: list[memoryview], deadline: float) -> None:
        """Write a frame, under the send lock. A rank that gets only a part of it is lost.

        It would take the next frame for the rest of this one.
        """
        sock = self._sockets[peer]
        selector = None
        has_begun = False
        why_cut_off = "it was slow when the group broke"
        try:
            while parts or (isinstance(sock, TlsSocket) and sock.unsent):
                try:
                    sent = sock.sendmsg(parts, (), SEND_FLAGS)
                except BlockingIOError:
                    if selector is None:
                        selector = selectors.PollSelector()
                        selector.register(sock, selectors.EVENT_WRITE)
                    left = deadline - time.monotonic()
                    if left <= 0:
                        why_cut_off = "it did not take what was sent in time"
                        raise self._slow(peer) from None
                    if (failure := self._failure_of(kind)) is not None:
                        raise renewed(failure) from None
                    selector.select(min(left, PROBE_SECONDS))
                    continue
                has_begun = True
                parts = unsent(parts, sent)
        except CollectiveError:
            if has_begun:
                self._mark_lost(peer, why_cut_off)
            raise
        except OSError as error:
            self._mark_lost(peer, f"can't send to it: {error}")
            raise self._lost(peer) from error
        except BaseException as error:
            if has_begun:
                self._mark_lost(peer, f"a message to it was cut off by {type(error).__name__}")
            raise

    def _failure_of(self, kind: FrameKind) -> CollectiveError | None:
        """Why frames of this kind are neither sent nor received any more; None if they are.

        A lost rank ends ``send`` and ``recv``, too: the rank that was to send may have given up.
        """
        failure = self.state.failure
        if kind == FrameKind.COLLECTIVE or (kind == FrameKind.MESSAGE and isinstance(failure, RankLostError)):
            return failure
        return None

    def _slow(self, peer: int) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"Rank {peer} did not take what rank {self.rank} sent in time. It is stopped, or very busy."
        )

    def _lost(self, peer: int) -> RankLostError:
        return explained(RankLostError(f"Rank {self.rank} can't reach rank {peer}: {self._gone[peer]}."))

    def notify_all(self, kind: FrameKind, text: str, seconds: float, key: int = 0) -> None:
        """Send a frame without data to every rank that can be reached, within ``seconds`` in all."""
        deadline = time.monotonic() + seconds
        for peer in self._sockets:
            if peer not in self._gone:
                try:
                    self.send(peer, kind, key, text, memoryview(b""), deadline)
                except CollectiveError as error:
                    _log.info("rank %d could not send %s to rank %d: %s", self.rank, kind.name, peer, error)

    def announce(self, call: CollectiveCall) -> None:
        """Send the fingerprint of a collective to all ranks, once; called when this rank has waited for a while.

        A rank that it waits for may have called something else, and wait for us. And if the collective times out, the
        others have to know that this rank has called it.
        """
        if not call.is_announced:
            call.is_announced = True
            self.notify_all(FrameKind.FINGERPRINT, call.fingerprint, PATIENCE, call.number)

    # Receiving

    def post(self, recv: PostedRecv) -> None:
        """Post a receive. It ends when its message has arrived, or can't arrive any more."""
        self.matcher.post(recv)
        gone = [peer for peer in list(self._gone) if recv.source in (None, peer)]  # another thread may add one
        if gone:
            self.cancel(recv, self._lost(gone[0]))
        elif (failure := self._failure_of(recv.kind)) is not None:
            self.cancel(recv, failure)

    def cancel(self, recv: PostedRecv, error: Exception) -> bool:
        """End a receive with an error, and write to its memory no more; False if it has just got its message."""
        with self.read_lock:
            is_ended = self.matcher.cancel(recv, self._move_message)
        if is_ended:
            recv.finish(error)
        return is_ended

    def _move_message(self, message: IncomingMessage) -> None:
        self._readers[message.source].move(message)

    def _run(self) -> None:
        try:
            self._read_all()
        except BaseException as error:
            if self._is_closed:
                return  # a callback, which runs in this thread, has closed the connections
            # Without this thread, this rank would not learn of failures, and the others would wait for it.
            for peer in self._sockets:
                self._on_read_error(peer, error)

    def _read_all(self) -> None:
        seconds = PROBE_SECONDS if self._probed else None
        next_probe = 0.0
        while True:
            decrypted = self._peers_with_more()
            ready = set()
            for key, _ in self._selector.select(0 if decrypted else seconds):
                if key.fileobj is self._stopped:
                    return
                ready.add(key.data)
            for peer in decrypted | ready:
                try:
                    for _ in range(_READS_A_TURN):
                        if not self._read(peer):
                            break
                except (OSError, ProtocolError) as error:
                    self._lose(peer, str(error) or type(error).__name__)
                except Exception as error:
                    self._on_read_error(peer, error)
                if peer in self._gone and peer in ready:
                    self._selector.unregister(self._sockets[peer])
            if seconds is not None and time.monotonic() >= next_probe:
                next_probe = time.monotonic() + seconds
                self._probe_peers()

    def _read(self, peer: int) -> bool:
        """Read once from a rank; False if nothing more has arrived, or it has said goodbye."""
        reader = self._readers[peer]
        try:
            with self.read_lock:
                count = self._sockets[peer].recv_into(reader.target(), 0, socket.MSG_DONTWAIT)
                reader.filled(count)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError("its connection has closed")
        return reader.advance()

    def _peers_with_more(self) -> set[int]:
        """Ranks with bytes that TLS has received and nobody has read. Such bytes don't make the socket readable."""
        return {
            peer
            for peer, sock in self._sockets.items()
            if isinstance(sock, TlsSocket) and sock.has_more and peer not in self._gone
        }

    def _on_read_error(self, peer: int, error: BaseException) -> None:
        """Reading from a rank failed for a reason on this rank, not because of the connection."""
        if type(error) is CollectiveError:
            why = str(error)
        else:
            _log.error("rank %d can't read from rank %d", self.rank, peer, exc_info=error)
            why = f"{type(error).__name__}: {error}"
        self.state.fail_group(f"Rank {self.rank} can't read any more from rank {peer}: {why.rstrip('.')}.")
        self._lose(peer, why)

    def _probe_peers(self) -> None:
        for peer, liveness in self._probed.items():
            if peer in self._gone:
                continue
            host = liveness.on_probe(sockets.tcp_facts(self._sockets[peer]))
            if host is HostState.IDLE:
                self._send_heartbeat(peer)
            elif host is HostState.VANISHED:
                self._lose(peer, "its host does not answer any more")

    def _send_heartbeat(self, peer: int) -> None:
        """Send something that has to be acknowledged. If there is no room for it, something is in flight."""
        if self._send_locks[peer].acquire(blocking=False):
            try:
                self._sockets[peer].send(HEARTBEAT, SEND_FLAGS)
            except BlockingIOError:
                pass
            except OSError as error:
                self._mark_lost(peer, f"can't send to it: {error}")
            finally:
                self._send_locks[peer].release()
            self._end_waits()

    def handle(self, peer: int, kind: FrameKind, text: str) -> None:
        """A frame without data has arrived; called by the readers."""
        if kind == FrameKind.GOODBYE:
            name, _, why = text.partition(" ")
            self.state.on_peer_left(peer, name, why)
            self._lose(peer, _LEFT)
        elif kind == FrameKind.GROUP_FAILED:
            name, _, why = text.partition(" ")
            self.state.on_peer_failure(peer, name, why)
        elif kind == FrameKind.PROGRAM_FAILED:
            told(text)
            self._lose(peer, _FAILED)

    def _lose(self, peer: int, why: str) -> None:
        """A rank can't be reached any more, or has left: end everything that waits for it."""
        self._mark_lost(peer, why)
        self._end_waits()

    def _mark_lost(self, peer: int, why: str) -> None:
        """Send nothing more to a rank. Whoever calls this under a send lock calls ``_end_waits`` without it."""
        if self._gone.setdefault(peer, why) is why:
            self._newly_lost.append(peer)

    def _end_waits(self) -> None:
        """End everything that waits for ranks that were lost.

        Not under a send lock: this runs callbacks, and sends to the other ranks.
        """
        while self._newly_lost:
            try:
                peer = self._newly_lost.popleft()
            except IndexError:
                return  # another thread does it
            why = self._gone[peer]
            _log.debug("rank %d has lost rank %d: %s", self.rank, peer, why)
            if why not in (_LEFT, _FAILED):
                # Wake threads that wait to send to it. A rank that leaves would take the shutdown for our death.
                with contextlib.suppress(OSError):
                    self._sockets[peer].shutdown(socket.SHUT_RDWR)
            self.state.on_peer_lost(peer, why)
            self._end_receives(peer)
            self._on_state_change()

    def _end_receives(self, peer: int) -> None:
        error = self._lost(peer)
        self.matcher.fail(error, lambda recv: recv.source in (None, peer))
        self._readers[peer].abandon(error)

    def _on_group_failure(self, failure: CollectiveError, tell_others: bool) -> None:
        _log.debug("the group is broken on rank %d: %s", self.rank, failure)
        self.matcher.fail(failure, lambda recv: self._failure_of(recv.kind) is not None)
        self._on_state_change()
        if tell_others and not self._has_failed:
            self.notify_all(FrameKind.GROUP_FAILED, _told(failure), _REPORT_SECONDS)

    # The end

    def say_goodbye(self) -> None:
        """Tell the other ranks that this one leaves, and what has broken the group, if it is broken."""
        failure = self.state.failure
        self.notify_all(FrameKind.GOODBYE, "" if failure is None else _told(failure), _GOODBYE_SECONDS)

    def say_last_words(self, text: str) -> None:
        """Tell the other ranks that the program of this one fails, and who failed first."""
        self._has_failed = True  # what the others do now is because of this
        self.notify_all(FrameKind.PROGRAM_FAILED, text, SECONDS)

    def close(self) -> None:
        """Say goodbye, end the thread, close all connections. A callback may call it in the thread itself."""
        self.say_goodbye()
        self._is_closed = True
        for peer in self._sockets:
            self._gone.setdefault(peer, "the group was destroyed")
        self._stop.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._close_descriptors()
        error = CollectiveError(f"The group was destroyed on rank {self.rank} before this was received.")
        self.matcher.fail(error, lambda _: True)
        for reader in self._readers.values():
            reader.abandon(error)

    def abandon(self) -> None:
        """In a forked child: close the descriptors, send nothing."""
        self._stop.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._selector.close()
        self._stopped.close()
        for sock in self._sockets.values():
            sock.close()


def _told(failure: CollectiveError) -> str:
    """A failure as it travels to other ranks."""
    return f"{type(failure).__name__} {failure}"
