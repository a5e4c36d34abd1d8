"""Connecting to other workers."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from farprop.errors import ConnectionLostError
from farprop.transport import sockets

_made: list[socket.socket] = []


class _Failing(socket.socket):
    error: BaseException

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _made.append(self)

    def connect(self, address: Any) -> None:
        raise self.error


@pytest.mark.parametrize("is_near", [False, True], ids=["TCP", "Unix"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConnectionRefusedError()], ids=["interrupted", "refused"])
def test_a_connection_that_is_not_made_is_closed(
    monkeypatch: pytest.MonkeyPatch, is_near: bool, error: BaseException
) -> None:
    _made.clear()
    monkeypatch.setattr(socket, "socket", _Failing)
    monkeypatch.setattr(_Failing, "error", error, raising=False)
    address: Any = SimpleNamespace(tcp=("127.0.0.1", 9), unix="farprop-tests")
    with pytest.raises((KeyboardInterrupt, ConnectionLostError)):
        sockets.connect(address, is_near, time.monotonic() + 1)
    assert _made
    assert [made.fileno() for made in _made] == [-1] * len(_made)
