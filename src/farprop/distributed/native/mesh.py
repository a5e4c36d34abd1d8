"""A connection to every other rank of the group, and the thread that reads from all of them.

The thread always reads: what nobody has asked for yet is kept. So a rank that sends can only be held up by one that is
stopped or slow, and never by one that sends, too. It also looks whether the other hosts still answer.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping

from farprop.distributed.native import pulse
from farprop.distributed.native.frames import BEAT, Kind, pack
from farprop.distributed.native.inbox import Inbox, Receipt
from farprop.distributed.native.pulse import Pulse
from farprop.distributed.native.reader import Reader
from farprop.distributed.native.standing import Standing
from farprop.errors import CollectiveError, CollectiveTimeoutError, ProtocolError, RankLostError, renewed
from farprop.transport.tls import Stream, TlsSocket

_log = logging.getLogger("farprop.distributed")

_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
_GOODBYE_SECONDS = 1.0
_TELL_SECONDS = 0.5
_READS_A_TURN = 64  # then it is the turn of the next rank
_LEFT = "it has left the group"


class Mesh:
    """``on_news`` is called, in any thread, when a wait for other ranks may have become vain. ``peers_limits`` has the
    largest message that a rank takes.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Stream],
        max_length: int,
        on_news: Callable[[], None],
        peers_limits: Mapping[int, int] | None = None,
    ) -> None:
        self.rank = rank
        self.standing = Standing(rank, len(peers) + 1, self._on_failure)
        self.inbox = Inbox(max_length)
        self._on_news = on_news
        self._peers_limits = peers_limits or {}
        self._locks = {peer: threading.Lock() for peer in peers}
        self._sockets = dict(peers)
        self._gone: dict[int, str] = {}
        self._readers = {peer: Reader(self, peer, sock, max_length) for peer, sock in peers.items()}
        self._selector = selectors.DefaultSelector()
        self._stop, stopped = socket.socketpair()
        self._stopped = stopped
        self._selector.register(stopped, selectors.EVENT_READ)
        for peer, sock in peers.items():
            self._selector.register(sock, selectors.EVENT_READ, peer)
        self._watched = [peer for peer, sock in peers.items() if pulse.can_watch(sock)]
        for peer in self._watched:
            pulse.watch(peers[peer])
        self._thread = threading.Thread(target=self._run, name=f"farprop-group-rank{rank}", daemon=True)
        self._thread.start()

    # Sending

    def send(self, peer: int, kind: Kind, key: int, text: str, data: memoryview, deadline: float) -> None:
        """Returns when the system has taken all of it."""
        if len(data) > self._peers_limits.get(peer, len(data)):
            raise CollectiveError(
                f"Rank {peer} takes no messages above its FARPROP_MAX_MESSAGE_BYTES={self._peers_limits[peer]}, and "
                f"rank {self.rank} was to send it {len(data)} bytes. Raise the limit on every rank, or send less."
            )
        head = memoryview(pack(kind, key, text, len(data)))
        lock = self._locks[peer]
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._slow(peer)
        try:
            if peer in self._gone:
                raise self._lost(peer)
            if (failure := self._vain(kind)) is not None:
                raise renewed(failure)
            self._write(peer, kind, [head, data] if len(data) else [head], deadline)
        except OSError as error:
            if isinstance(error, CollectiveTimeoutError | RankLostError):
                raise
            self._lose(peer, f"can't send to it: {error}")
            raise self._lost(peer) from error
        finally:
            lock.release()

    def _write(self, peer: int, kind: Kind, parts: list[memoryview], deadline: float) -> None:
        sock = self._sockets[peer]
        poll = None
        is_begun = False
        while parts or (isinstance(sock, TlsSocket) and sock.unsent):
            try:
                sent = sock.sendmsg(parts, (), _FLAGS)
            except BlockingIOError:
                if poll is None:
                    poll = selectors.PollSelector()
                    poll.register(sock, selectors.EVENT_WRITE)
                left = deadline - time.monotonic()
                if left <= 0:
                    if is_begun:
                        # What comes next would be taken for the rest of it.
                        self._lose(peer, "it did not take what was sent in time")
                    raise self._slow(peer) from None
                failure = self._vain(kind)
                if failure is not None:
                    if is_begun:
                        self._lose(peer, "it was slow to take what was sent when the group broke")
                    raise renewed(failure) from None
                poll.select(min(left, pulse.LOOK_SECONDS))
                continue
            is_begun = True
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def _vain(self, kind: Kind) -> CollectiveError | None:
        """Why nobody sends or gets this any more; None if somebody does. A lost rank ends messages, too: whoever was to
        send one may have given up.
        """
        failure = self.standing.failure
        if kind == Kind.PART or (kind == Kind.MESSAGE and isinstance(failure, RankLostError)):
            return failure
        return None

    def _slow(self, peer: int) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"Rank {peer} did not take what rank {self.rank} sent in time. It is stopped, or very busy."
        )

    def _lost(self, peer: int) -> RankLostError:
        return RankLostError(f"Rank {self.rank} can't reach rank {peer}: {self._gone[peer]}.")

    def tell(self, kind: Kind, text: str, seconds: float, key: int = 0) -> None:
        """A word to everybody who can still hear it. In all it takes no longer than that, but everybody is tried."""
        deadline = time.monotonic() + seconds
        for peer in self._sockets:
            if peer not in self._gone:
                try:
                    self.send(peer, kind, key, text, memoryview(b""), deadline)
                except CollectiveError as error:
                    _log.info("rank %d could not be told: %s", peer, error)

    # Receiving

    def expect(self, receipt: Receipt) -> None:
        """The receipt ends when what it is for has come, or can't come any more."""
        self.inbox.expect(receipt)
        gone = [peer for peer in self._gone if receipt.source in (None, peer)]
        if gone:
            self.inbox.give_up(receipt, self._lost(gone[0]))
        elif (failure := self._vain(receipt.kind)) is not None:
            self.inbox.give_up(receipt, failure)

    def _run(self) -> None:
        try:
            self._read_all()
        except BaseException as error:
            # Nobody would hear of anything any more: neither here, nor those who wait for this rank.
            for peer in self._sockets:
                self._give_up(peer, error)

    def _read_all(self) -> None:
        seconds = pulse.LOOK_SECONDS if self._watched else None
        next_look = 0.0
        while True:
            left = self._peers_with_more()
            ready = set()
            for key, _ in self._selector.select(0 if left else seconds):
                if key.fileobj is self._stopped:
                    return
                ready.add(key.data)
            for peer in left | ready:
                try:
                    for _ in range(_READS_A_TURN):
                        if not self._readers[peer].read():
                            break
                except (OSError, ProtocolError) as error:
                    self._lose(peer, str(error) or type(error).__name__)
                except Exception as error:
                    self._give_up(peer, error)
                if peer in self._gone and peer in ready:
                    self._selector.unregister(self._sockets[peer])
            if seconds is not None and time.monotonic() >= next_look:
                next_look = time.monotonic() + seconds
                self._look()

    def _peers_with_more(self) -> set[int]:
        """Those of whom something was decrypted already, which makes no socket ready."""
        return {
            peer
            for peer, sock in self._sockets.items()
            if isinstance(sock, TlsSocket) and sock.has_more and peer not in self._gone
        }

    def _give_up(self, peer: int, error: BaseException) -> None:
        """Reading from this rank failed here, by no fault of the connection."""
        if type(error) is CollectiveError:
            why = str(error)
        else:
            _log.error("rank %d can't read from rank %d", self.rank, peer, exc_info=error)
            why = f"{type(error).__name__}: {error}"
        self.standing.break_down(f"Rank {self.rank} can't read any more from rank {peer}: {why.rstrip('.')}.")
        self._lose(peer, why)

    def _look(self) -> None:
        for peer in self._watched:
            if peer in self._gone:
                continue
            state = pulse.look(self._sockets[peer])
            if state is Pulse.QUIET:
                self._beat(peer)
            elif state is Pulse.GONE:
                self._lose(peer, "its host does not answer any more")

    def _beat(self, peer: int) -> None:
        """Send something that has to be acknowledged. If there is no room, something is on its way."""
        if self._locks[peer].acquire(blocking=False):
            try:
                self._sockets[peer].send(BEAT, _FLAGS)
            except BlockingIOError:
                pass
            except OSError as error:
                self._lose(peer, f"can't send to it: {error}")
            finally:
                self._locks[peer].release()

    def handle(self, peer: int, kind: Kind, text: str) -> None:
        """A frame without data."""
        if kind == Kind.GOODBYE:
            self.standing.leave(peer)
            self._lose(peer, _LEFT)
        elif kind == Kind.BROKEN:
            name, _, why = text.partition(" ")
            self.standing.be_told(peer, name, why)

    def _lose(self, peer: int, why: str) -> None:
        if self._gone.setdefault(peer, why) is not why:
            return
        if why is not _LEFT:
            # Who waits to send to it has to know. One that has left takes this for our death, and must not.
            with contextlib.suppress(OSError):
                self._sockets[peer].shutdown(socket.SHUT_RDWR)
        self.standing.die(peer, why)
        self.inbox.fail(self._lost(peer), lambda receipt: receipt.source in (None, peer))
        self._readers[peer].abandon(self._lost(peer))
        self._on_news()

    def _on_failure(self, failure: CollectiveError, to_tell: bool) -> None:
        self.inbox.fail(failure, lambda receipt: self._vain(receipt.kind) is not None)
        self._on_news()
        if to_tell:
            self.tell(Kind.BROKEN, f"{type(failure).__name__} {failure}", _TELL_SECONDS)

    # The end

    def say_goodbye(self) -> None:
        self.tell(Kind.GOODBYE, "", _GOODBYE_SECONDS)

    def close(self) -> None:
        """Say goodbye and let go of everything."""
        self.say_goodbye()
        self._stop.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._close_descriptors()
        self.inbox.fail(
            CollectiveError(f"The group was destroyed on rank {self.rank} before this was received."), lambda _: True
        )

    def abandon(self) -> None:
        """In a forked child: nothing is said to anybody."""
        self._stop.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._selector.close()
        self._stopped.close()
        for sock in self._sockets.values():
            sock.close()
