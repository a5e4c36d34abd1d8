"""Log lines about refused connections are rate-limited: an attacker can't fill the disk, and a probe writes none."""

from __future__ import annotations

import logging
import socket
import struct

import pytest

from tests.calls.test_trust import _connect
from tests.security.raw import serves
from tests.support.peers import hangs_up
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport


class _Count(logging.Handler):
    lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        _Count.lines += "refused a connection" in record.getMessage()


def _start_counting() -> None:
    logging.getLogger("farprop.runtime.acceptor").addHandler(_Count())


def _lines() -> int:
    return _Count.lines


def test_many_refusals_log_few_lines() -> None:
    with cluster(2) as c:
        c.run(0, _start_counting)
        for _ in range(200):
            with _connect(c, "tcp") as connection:
                connection.sendall(b"\xff" * 2000)
                assert hangs_up(connection)
        serves(c)
        assert 1 <= c.run(0, _lines) <= 20


def test_a_probe_of_the_port_logs_nothing() -> None:
    with cluster(2) as c:
        c.run(0, _start_counting)
        before = c.run(0, _lines)
        for linger in (0, 1):  # it closes the connection, or resets it, as Kubernetes does
            with _connect(c, "tcp") as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", linger, 0))
        with _connect(c, "tcp") as connection:  # accepted after those
            connection.sendall(b"\xff" * 2000)
            assert hangs_up(connection)
        serves(c)
        assert c.run(0, _lines) == before + 1
