"""The reader of a client connection: how the loop and callers hand over to each other."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from farprop.errors import ConnectionLostError
from farprop.runtime.answer_reader import Waiter
from farprop.runtime.client_connection import ClientConnection
from farprop.runtime.event_loop import HANGUP, IN
from farprop.runtime.future_call import FutureCall
from farprop.runtime.spinner import Activity
from farprop.transport.connection import Connection
from farprop.transport.shared_memory import SegmentPool
from farprop.wire.fast_codec import encode_value
from farprop.wire.message import ANSWER, FAST, Message
from tests.support.raw_messages import pack


class StubLoop:
    """A loop that never runs, and its pool. It records the events that it should watch."""

    def __init__(self) -> None:
        self.loop = self
        self.activity = Activity()
        self.events: dict[int, int] = {}

    def add(self, fd: int, events: int, _: Any) -> None:
        self.events[fd] = events

    def change(self, fd: int, events: int) -> None:
        self.events[fd] = events

    def remove(self, fd: int) -> None:
        self.events.pop(fd, None)

    def submit(self, *_: Any) -> None:
        raise AssertionError("nothing here has callbacks")

    push_answer = submit


class StubLoopWithJobs(StubLoop):
    """A stub loop with a pool that runs its jobs on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.serving: dict[int, Any] = {}

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        self.jobs.append((function, args))

    def run_jobs(self) -> None:
        while self.jobs:
            function, args = self.jobs.pop(0)
            function(*args)


def make_client(loop: StubLoop | None = None) -> tuple[ClientConnection, socket.socket, StubLoop, Connection]:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    loop = loop or StubLoop()
    client = ClientConnection(loop, "worker0 (rank 0)", "peer", 1, lambda *_: None, lambda *_: None)  # type: ignore[arg-type]
    connection = Connection(
        ours, "peer", 1, SegmentPool(0, lambda _: None), 1 << 20, 1 << 20, client.want_output, lambda: None
    )
    client.attach(connection)
    connection.open_fd_channel()
    theirs.recv(1000)
    return client, theirs, loop, connection


def test_caller_that_arrives_while_the_loop_handles_a_stale_event_gets_its_answer() -> None:
    """The loop polls input, but a caller reads it first and returns. Then the next caller arrives."""
    client, theirs, loop, connection = make_client()
    answers = []
    caller = threading.Thread(target=lambda: answers.append(client.call_sync(encode_value(None), 5.0)))
    receive = connection.receive

    def receive_slowly() -> Any:
        caller.start()
        theirs.recv(1000)
        return receive()

    connection.receive = receive_slowly  # type: ignore[method-assign]
    try:
        client._on_events(IN)
    finally:
        connection.receive = receive  # type: ignore[method-assign]
    if not caller.ident:
        caller.start()
        theirs.recv(1000)
    assert isinstance(client._reader, Waiter)
    client._on_events(IN)  # once more, while the caller reads
    theirs.sendall(pack(ANSWER, FAST, 1, 0.0, b"", encode_value(None).payload))
    caller.join()
    assert len(answers) == 1
    assert client._reader is None
    client.validate()
    theirs.close()
    client._on_events(HANGUP)  # here the loop does read, up to the end
    assert connection.closed
    assert not loop.events


class RecordingCall(FutureCall):
    """A call that records its outcomes."""

    __slots__ = ("ends", "quick")

    def __init__(self, quick: bool) -> None:
        super().__init__(None)
        self.quick = quick
        self.ends: list[tuple[Message | None, Exception | None]] = []

    def finish(self, answer: Message | None, error: Exception | None) -> None:
        self.ends.append((answer, error))


@pytest.mark.parametrize("quick", [True, False])
def test_interrupt_while_answers_are_delivered_loses_no_other_answer(
    monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    """Ctrl-C interrupts a caller that has read several answers, after it has delivered only its own."""
    loop = StubLoopWithJobs()
    client, theirs, _, connection = make_client(loop)
    others = [RecordingCall(quick) for _ in range(3)]
    for other in others:
        client.call_async(encode_value(None), other)

    deliver_one = ClientConnection._deliver_one
    interrupts = [KeyboardInterrupt()]

    def interrupted(self: ClientConnection, pair: list[Any], run: Callable[..., None]) -> None:
        is_own = isinstance(pair[0], Waiter)
        deliver_one(self, pair, run)
        if is_own and interrupts:
            raise interrupts.pop()

    answer = encode_value(None)
    theirs.sendall(b"".join(pack(ANSWER, answer.flags, number, 0.0, b"", answer.payload) for number in (1, 4, 2)))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ClientConnection, "_deliver_one", interrupted)
        client.call_sync(encode_value(None), 5.0)
    loop.run_jobs()
    # The third call had no answer yet, so it fails with the connection.
    assert [len(other.ends) for other in others] == [1, 1, 1]
    assert [other.ends[0][0] is not None for other in others] == [True, True, False]
    assert isinstance(others[2].ends[0][1], ConnectionLostError)
    assert connection.closed
    client.validate()
    theirs.close()


@pytest.mark.parametrize("more", [True, False])
def test_nothing_can_be_sent_on_a_closed_connection(more: bool) -> None:
    """Not even a message that would be corked to wait for more: nobody would send it."""
    _, theirs, _, connection = make_client()
    connection.close()
    with pytest.raises(ConnectionLostError):
        connection.send(encode_value(None), more)
    theirs.close()


def test_failure_to_open_the_fd_channel_leaks_no_socket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    theirs.close()
    connection = Connection(
        ours, "peer", 1, SegmentPool(0, lambda _: None), 1 << 20, 1 << 20, lambda _: None, lambda: None
    )
    before = set(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        with pytest.raises(OSError) as caught:  # the traceback keeps leaked objects alive
            connection.open_fd_channel()
        assert len(set(os.listdir("/proc/self/fd")) - before) == 0
        del caught
    finally:
        gc.enable()
        connection.close()


class CountingCall(FutureCall):
    """A call that counts how often it is finished."""

    finished = 0

    def finish(self, answer: Message | None, error: Exception | None) -> None:
        assert isinstance(error, ConnectionLostError)
        CountingCall.finished += 1


def test_very_many_calls_of_a_lost_connection_are_failed_by_the_pool() -> None:
    """The thread that loses the connection has a deadline of its own: tens of thousands of calls took it seconds."""
    loop = StubLoopWithJobs()
    client, theirs, _, _ = make_client(loop)
    CountingCall.finished = 0
    for call_id in range(1, 10_001):
        client._calls.open(call_id, CountingCall(None), None, 0)
    client.lose("it closed the connection")
    assert len(loop.jobs) <= 101
    loop.run_jobs()
    assert CountingCall.finished == 10_000
    theirs.close()


class LosingSpinner:
    """While the reader spins, another thread loses the connection, and the number of its descriptor is used again."""

    def __init__(self, client: ClientConnection, number: int) -> None:
        self._client = client
        self._number = number
        self.pipe = os.pipe()
        self.is_reused = False

    def poll(self, *_: Any) -> list[tuple[int, int]]:
        if not self.is_reused:
            self._client.lose("its host has vanished")
            os.dup2(self.pipe[0], self._number)
            self.is_reused = True
        return []

    def slept(self, _: float) -> None:
        pass


@pytest.mark.timeout(30)
def test_reader_whose_descriptor_was_closed_and_used_again_does_not_hang() -> None:
    client, theirs, _, connection = make_client(StubLoopWithJobs())
    number = connection.fd
    spinner = client._spinner = LosingSpinner(client, number)  # type: ignore[assignment]
    with pytest.raises(ConnectionLostError, match="vanished"):
        client.call_sync(encode_value(None), None)
    assert spinner.is_reused
    for descriptor in (number, *spinner.pipe):
        os.close(descriptor)
    theirs.close()


def test_requests_that_are_sent_together_do_not_end_the_probing() -> None:
    """Otherwise a call after them would learn only at its deadline that the other host has vanished."""
    client, theirs, _, _ = make_client(StubLoopWithJobs())
    client._probe.is_due = False  # as on a connection to another host
    client._uncork()
    assert not client._probe.is_due
    client.lose("the test ends")
    theirs.close()


class PunctualLoop(StubLoopWithJobs):
    """Its timers are due at once, on another thread, before the thread that sets one goes on, if that is possible."""

    timers: list[threading.Thread]

    def call_at(self, _: float, callback: Callable[[], None]) -> None:
        timer = threading.Thread(target=callback)
        timer.start()
        timer.join(0.1)
        self.timers.append(timer)


class UnansweredCall(FutureCall):
    def finish(self, answer: Message | None, error: Exception | None) -> None:
        pass


def test_timer_that_is_early_keeps_no_later_request_from_being_sent() -> None:
    """A thread that was not scheduled for a millisecond noted its timer after the timer had run, so requests waited for
    one that never came.
    """
    loop = PunctualLoop()
    loop.timers = []
    client, theirs, _, connection = make_client(loop)
    for count in range(25):
        client.call_async(encode_value(count), UnansweredCall(None))
        for timer in loop.timers:
            timer.join()
        if count >= 20:
            assert not connection.has_corked
    client.lose("the test ends")
    theirs.close()
