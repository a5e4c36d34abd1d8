"""The table of accepted connections, closed by two threads at once."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

from farprop.ids import WorkerInfo
from farprop.runtime.accepted_connections import AcceptedConnections
from farprop.runtime.event_loop import EventLoop


class Interleaved(dict[int, Any]):
    """Between a look-up and what follows it, another thread runs, as far as it can."""

    def __init__(self, meanwhile: Any) -> None:
        super().__init__()
        self.thread = threading.Thread(target=meanwhile)

    def get(self, key: int, default: Any = None) -> Any:
        found = super().get(key, default)
        self.thread.start()
        self.thread.join(0.2)  # a thread that waits for the lock does not end
        return found


def test_worker_that_closes_while_a_peer_hangs_up() -> None:
    loop, unused = EventLoop(), Mock()
    accepted = AcceptedConnections(loop, WorkerInfo("w0", 0), unused, unused, unused, unused, unused)
    accepted.on_closed = unused
    table = accepted._connections = Interleaved(accepted.close)
    connection = Mock(fd=1000)
    table[connection.fd] = connection
    accepted.close_one(connection)
    table.thread.join()
    assert not table
    assert connection.close.called
    loop.close()
