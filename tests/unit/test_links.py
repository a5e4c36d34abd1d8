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
from farprop.wire.frames import ANSWER, PLAIN, pack


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


def test_a_caller_that_comes_while_the_loop_follows_up_an_old_event_gets_its_answer() -> None:
    """The loop saw input; before it came to read, a caller had read it, and was gone. Then the next caller comes."""
    link, theirs, loop, connection = make_link()
    answers = []
    caller = threading.Thread(target=lambda: answers.append(link.call_sync(0, b"x", encode_value(None), 5.0)))
    receive = connection.receive

    def receive_slowly() -> Any:
        caller.start()
        theirs.recv(1000)
        return receive()

    connection.receive = receive_slowly  # type: ignore[method-assign]
    try:
        link._on_events(IN)
    finally:
        connection.receive = receive  # type: ignore[method-assign]
    if not caller.ident:
        caller.start()
        theirs.recv(1000)
    assert isinstance(link._reader, SyncCall)
    link._on_events(IN)  # and once more, while the caller reads
    theirs.sendall(pack(ANSWER, PLAIN, 1, 0.0, b"", encode_value(None).meta))
    caller.join()
    assert len(answers) == 1
    assert link._reader is None
    link.validate()
    theirs.close()
    link._on_events(HANGUP)  # here the loop does read, up to the end
    assert connection.closed
    assert not loop.events
