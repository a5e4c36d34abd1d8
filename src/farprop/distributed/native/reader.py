"""Frames out of the bytes that come from one rank."""

from __future__ import annotations

import socket
from typing import Protocol

from farprop.distributed.native.frames import BEAT, HEADER, Kind, unpack
from farprop.distributed.native.inbox import Inbox, Letter
from farprop.distributed.native.standing import Standing
from farprop.transport.tls import Stream

_FLAGS = socket.MSG_DONTWAIT


class Listening(Protocol):
    """Whom a reader tells what has come."""

    standing: Standing
    inbox: Inbox

    def handle(self, peer: int, kind: Kind, text: str) -> None: ...


class Reader:
    """Puts together what comes from one rank."""

    def __init__(self, mesh: Listening, peer: int, sock: Stream, max_length: int) -> None:
        self._mesh, self._peer, self._sock = mesh, peer, sock
        self._max_length = max_length
        self._begin()

    def _begin(self) -> None:
        self._head = bytearray(HEADER.size)
        self._room = memoryview(self._head)
        self._letter: Letter | None = None
        self._fields: tuple[Kind, int, int, int] | None = None

    def read(self) -> bool:
        """Read what is there; False if that was all."""
        if len(self._room):
            try:
                count = self._sock.recv_into(self._room, 0, _FLAGS)
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionResetError("its connection has closed")
            self._room = self._room[count:]
        while not len(self._room):
            if not self._advance():
                return False
        return True

    def abandon(self, error: Exception) -> None:
        """Nothing more comes: whoever waits for what has begun to come waits in vain."""
        if self._letter is not None and self._letter.receipt is not None:
            self._letter.receipt.end(error)

    def _advance(self) -> bool:
        """A header, a text or the bytes are complete. False if nothing comes after it."""
        if self._letter is not None:
            self._mesh.inbox.close(self._letter)
            self._begin()
        elif self._fields is None and not self._head[0]:
            begun = self._head.lstrip(BEAT)
            self._head[: len(begun)] = begun
            self._room = memoryview(self._head)[len(begun) :]
        elif self._fields is None:
            self._fields = unpack(self._head, self._max_length)
            self._text = bytearray(self._fields[1])
            self._room = memoryview(self._text)
        else:
            kind, _, key, length = self._fields
            text = self._text.decode(errors="replace")
            if kind in (Kind.PART, Kind.STATED):
                self._mesh.standing.hear(self._peer, key, text)
            if kind not in (Kind.PART, Kind.MESSAGE):
                self._mesh.handle(self._peer, kind, text)
                self._begin()
                return kind != Kind.GOODBYE
            self._letter = Letter(kind, self._peer, key, text, length)
            self._mesh.inbox.open(self._letter)
            assert self._letter.room is not None
            self._room = self._letter.room
        return True
