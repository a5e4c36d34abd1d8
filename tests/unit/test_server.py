"""Answers that can't be sent, or wait for others."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

from farprop.errors import ConnectionLostError
from farprop.protocol.served_calls import ServedCalls
from farprop.runtime.server import PendingReply, Server
from farprop.wire.fast_codec import encode_value
from farprop.wire.message import REMOTE


class LostConnection:
    peer, rank, closed = "w3", 3, True

    def __init__(self) -> None:
        self.served: ServedCalls[Any] = ServedCalls()

    def send(self, message: Any, more: bool = False) -> None:
        raise ConnectionLostError("The connection to w3 is closed.")


def make_server(threads: Any) -> Server:
    """A server with one open request."""
    server = Server.__new__(Server)
    server._label = "w2 (rank 2)"
    server._threads = threads
    server._references = SimpleNamespace(not_returned=lambda *_: None)  # type: ignore[assignment]
    server._active_lock = threading.Lock()
    server._corked, server._ended_contexts, server.active = set(), deque(), 1
    return server


def test_request_that_ran_after_its_connection_was_lost_reports_it_again() -> None:
    """It may be an operation that makes this worker hold a value for its caller, which has died meanwhile."""
    reported: list[Any] = []
    server = make_server(SimpleNamespace(requests=(), is_polling_thread=lambda: False))
    server._connections = SimpleNamespace(report_lost=reported.append)  # type: ignore[assignment]
    connection: Any = LostConnection()
    server._send(PendingReply(connection, 0, 7, None), encode_value(b"done"))
    assert reported == [connection]
    assert server.active == 0


class CorkingConnection:
    """While an answer is put with those that wait for more, another thread becomes the leader, and sees none."""

    peer, rank, closed = "w3", 3, False

    def __init__(self, server: Server, threads: Any) -> None:
        self._server, self._threads = server, threads
        self.served: ServedCalls[Any] = ServedCalls()
        self.waiting: list[Any] = []
        self.sent: list[Any] = []

    def send(self, message: Any, more: bool = False) -> None:
        self._threads.is_polling_thread = lambda: False
        self._server.uncork()
        (self.waiting if more else self.sent).append(message)

    def uncork(self) -> None:
        self.sent += self.waiting
        self.waiting.clear()


def test_answer_is_sent_although_another_thread_becomes_the_leader_meanwhile() -> None:
    """The answer to remote() waits for the next one, and the leader sends it at the latest. But this thread was not the
    leader any more, and the new one had looked already: the caller waited until its timeout.
    """
    threads = SimpleNamespace(requests=(), is_polling_thread=lambda: True)
    server = make_server(threads)
    connection: Any = CorkingConnection(server, threads)
    server._send(PendingReply(connection, REMOTE, 7, None), encode_value(None))
    assert len(connection.sent) == 1
