"""Who reads a link's answers, when the loop and callers take turns."""

from __future__ import annotations

import socket
import threading
from typing import Any

from farprop.runtime.links import Link, SyncCall
from farprop.runtime.loop import HANGUP, IN
from farprop.transport.connection import Connection
from farprop.transport.segments import SegmentPool
from farprop.wire.codec import encode_value
from farprop.wire.frames import ANSWER, pack


class StillLoop:
    """A loop that never turns: it notes what it is asked to watch."""

    def __init__(self) -> None:
        self.events: dict[int, int] = {}

    def add(self, fd: int, events: int, _: Any) -> None:
        self.events[fd] = events

    def change(self, fd: int, events: int) -> None:
        self.events[fd] = events

    def remove(self, fd: int) -> None:
        self.events.pop(fd, None)

    def on_pool_thread(self) -> bool:
        return False

    def submit(self, *_: Any) -> None:
        raise AssertionError("nothing here has callbacks")

    push_answer = submit


def make_link() -> tuple[Link, socket.socket, StillLoop, Connection]:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    loop = StillLoop()
    link = Link(loop, "peer", 1, lambda *_: None, lambda *_: None)  # type: ignore[arg-type]
    connection = Connection(ours, "peer", SegmentPool(0), 1 << 20, link.want_output, lambda: None)
    link.attach(connection)
    connection.open_passage()
    theirs.recv(1000)
    return link, theirs, loop, connection


def test_an_event_that_a_caller_was_faster_than_changes_nothing() -> None:
    link, theirs, loop, connection = make_link()
    link._on_events(IN)  # the loop had seen input; a caller has read it meanwhile and is gone
    assert link._reader is None
    answered = threading.Event()

    def call() -> None:
        link.call_sync(0, b"x", encode_value(None), 20.0)
        answered.set()

    caller = threading.Thread(target=call)
    caller.start()
    theirs.recv(1000)
    assert isinstance(link._reader, SyncCall)
    link._on_events(IN)
    assert isinstance(link._reader, SyncCall)
    theirs.sendall(pack(ANSWER, 8, 1, 0.0, b"", encode_value(None).meta))
    assert answered.wait(20)
    caller.join()
    assert link._reader is None
    link.validate()
    theirs.close()
    link._on_events(HANGUP)  # here the loop does read, up to the end
    assert connection.closed
    assert not loop.events
