"""Parcels on a worker, without other workers: what is left of one when it does not come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from farprop.errors import ProtocolError
from farprop.protocol.parcels import ParcelId, Route, Stop
from farprop.runtime.async_results import Deferred
from farprop.runtime.chunk_sender import CHUNK_BYTES, ChunkSender
from farprop.runtime.parcels import Parcels
from farprop.transport.shared_copies import SharedCopies
from farprop.transport.shared_memory import SegmentPool
from farprop.wire.message import IN_REQUEST, Message, Method, ParcelPart

PARCEL = ParcelId(0, 7)
ROUTE: Route = ((Stop(1, 1),), (Stop(2, 1),))


class _Handle:
    def cancel(self) -> None: ...


class _Services:
    """Notes what is sent; what is submitted runs when the test says so."""

    label = "worker1"
    dialect = SimpleNamespace(restricted=False)

    def __init__(self) -> None:
        self.sent: list[tuple[int, Method]] = []
        self.tasks: list[Callable[[], Any]] = []
        self.caller_is_gone = False
        self.on_send: Callable[[Method], None] = lambda method: None

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        self.tasks.append(lambda: function(*args))

    def run_tasks(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()

    def call_at(self, when: float, callback: Callable[[], None]) -> _Handle:
        return _Handle()

    def is_connected(self, rank: int) -> bool:
        return True

    def send_method(self, rank: int, method: Method, message: Any, call: Any, system: bool) -> None:
        self.sent.append((rank, method))
        self.on_send(method)

    def is_caller_gone(self) -> bool:
        return self.caller_is_gone


@pytest.fixture
def services() -> _Services:
    return _Services()


@pytest.fixture
def parcels(services: _Services) -> Iterator[Parcels]:
    copies = SharedCopies(SegmentPool(0, lambda seconds: None))
    yield Parcels(services, copies, 100 * CHUNK_BYTES)  # type: ignore[arg-type]
    copies.close()


def test_announcement_that_runs_after_the_end_of_its_connection_keeps_nothing(
    services: _Services, parcels: Parcels
) -> None:
    parcels.on_lost(0)
    services.caller_is_gone = True
    answer = parcels.on_parcel(0, *PARCEL, 3 * CHUNK_BYTES, ROUTE)
    services.run_tasks()
    assert parcels.is_empty
    assert (2, Method.PARCEL) not in services.sent
    ended: list[bool] = []
    assert isinstance(answer, Deferred)
    answer.subscribe(lambda: ended.append(True))
    assert ended, "a request of a lost connection is never answered"


def test_parcel_that_is_dropped_before_it_is_announced_to_the_next_host_is_not_announced(
    services: _Services, parcels: Parcels
) -> None:
    parcels.on_parcel(0, *PARCEL, 3 * CHUNK_BYTES, ROUTE)
    parcels.on_drop(0, *PARCEL)
    services.run_tasks()
    assert services.sent == []
    assert parcels.is_empty


def _sender(services: _Services) -> ChunkSender:
    def unexpected(*_: Any) -> None:
        raise AssertionError("nobody is told of the end of a sender that was stopped")

    return ChunkSender(
        services,  # type: ignore[arg-type]
        PARCEL,
        3 * CHUNK_BYTES,
        ROUTE[1:],
        lambda index: [memoryview(bytes(CHUNK_BYTES))],
        unexpected,
        unexpected,
        unexpected,
    )


def test_sender_that_is_stopped_while_it_dials_tells_the_worker(services: _Services) -> None:
    sender = _sender(services)
    sender.offer(range(3))
    services.on_send = lambda method: sender.stop() if method is Method.PARCEL else None
    sender.start()
    assert services.sent == [(2, Method.PARCEL), (2, Method.PARCEL_DROP)]


def test_sender_that_is_stopped_before_it_starts_sends_nothing(services: _Services) -> None:
    sender = _sender(services)
    sender.offer(range(3))
    sender.stop()
    sender.start()
    assert services.sent == []


# Requests that bring their parcel


def _request(*buffers: Any) -> Message:
    return Message(b"payload", list(buffers))


def _hold(parcels: Parcels, request: Message) -> bool:
    connection: Any = SimpleNamespace(rank=0, peer="worker0")
    return parcels.hold(connection, request, 0.0)


def test_request_gets_the_parts_of_the_parcel_that_it_brings(parcels: Parcels) -> None:
    own, whole = memoryview(b"own"), memoryview(bytearray(range(200)))
    request = _request(ParcelPart(IN_REQUEST, 64, 3), own, ParcelPart(IN_REQUEST, 0, 2), whole)
    assert not _hold(parcels, request)
    assert [bytes(buffer) for buffer in request.buffers] == [bytes([64, 65, 66]), b"own", bytes([0, 1])]
    assert bytes(request.payload) == b"payload"


@pytest.mark.parametrize(
    "buffers",
    [
        [ParcelPart(IN_REQUEST, 0, 100)],
        [ParcelPart(IN_REQUEST, 0, 100), ParcelPart(IN_REQUEST, 0, 100)],
        [ParcelPart(IN_REQUEST, 64, 37), memoryview(bytes(100))],
        [ParcelPart(IN_REQUEST, 0, 50), ParcelPart(3, 0, 50), memoryview(bytes(100))],
    ],
)
def test_request_without_the_parcel_that_it_needs_breaks_the_protocol(parcels: Parcels, buffers: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        _hold(parcels, _request(*buffers))
