"""Answers that can't be sent."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

from farprop.errors import ConnectionLostError
from farprop.runtime.server import PendingReply, Server
from farprop.wire.fast_codec import encode_value


class LostConnection:
    peer, rank, closed = "w3", 3, True

    def send(self, message: Any, more: bool = False) -> None:
        raise ConnectionLostError("The connection to w3 is closed.")


def test_request_that_ran_after_its_connection_was_lost_reports_it_again() -> None:
    """It may be an operation that makes this worker hold a value for its caller, which has died meanwhile."""
    reported: list[Any] = []
    server = Server.__new__(Server)
    server._label = "w2 (rank 2)"
    server._threads = SimpleNamespace(requests=(), is_polling_thread=lambda: False)  # type: ignore[assignment]
    server._connections = SimpleNamespace(report_lost=reported.append)  # type: ignore[assignment]
    server._references = SimpleNamespace(not_returned=lambda *_: None)  # type: ignore[assignment]
    server._active_lock = threading.Lock()
    server._corked, server._ended_contexts, server.active = set(), deque(), 1
    connection: Any = LostConnection()
    server._send(PendingReply(connection, 0, 7, None), encode_value(b"done"))
    assert reported == [connection]
    assert server.active == 0
