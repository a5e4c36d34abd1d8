"""Callers that send more requests than a worker can run, or don't read their answers."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from farprop.config import Settings
from farprop.errors import OverloadedError, UsageError
from farprop.runtime import admission as waiting
from farprop.runtime.agent_registry import current_agent
from farprop.transport.tls import Stream
from farprop.wire.fast_codec import encode_call
from farprop.wire.message import ANSWER, REQUEST, SYSTEM
from tests.calls import functions as f
from tests.security.raw import memory, proven, serves
from tests.support.raw_messages import pack
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport


def _set_limits(requests: int, size: int) -> None:
    waiting.MOST_REQUESTS = requests
    current_agent()._server._admission._most_bytes = size


def _nothing_waits() -> bool:
    state = current_agent()._server._admission
    return not state._bytes and not any(state._counts.values()) and not state._held


_futures: list[Any] = []
_references: list[Any] = []


def _send_many(count: int, argument: Any) -> None:
    _futures.append(rpc.rpc_async("worker0", f.wait_for_gate))
    _futures.extend(rpc.rpc_async("worker0", f.identity, (argument,)) for _ in range(count))


def _expect_refusals(argument: Any) -> None:
    with pytest.raises(OverloadedError):
        rpc.rpc_sync("worker0", f.identity, (argument,))
    _references.append(rpc.remote("worker0", f.identity, (argument,)))
    own = rpc.RRef(torch.ones(1))
    with pytest.raises(OverloadedError):
        rpc.rpc_sync("worker0", f.identity, ((own, argument),))
    # System calls still run.
    message = encode_call(None, (5,), {})
    message.name, message.flags = b"_operator:neg", message.flags | SYSTEM
    answer = current_agent().peers.connect(0, 10).call_sync(message, 10)
    assert answer.kind == ANSWER


def _expect_no_value() -> None:
    with pytest.raises(OverloadedError):
        _references.pop().to_here()


def _outcomes() -> tuple[int, list[str]]:
    """The number of calls that succeeded, and the texts of the errors of the others."""
    done, refused = 0, []
    _futures.reverse()
    while _futures:
        try:
            _futures.pop().wait()
            done += 1
        except OverloadedError as error:
            refused.append(str(error))
    return done, refused


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("limit", ["number", "bytes"])
def test_requests_over_the_limit_are_refused_at_once_and_the_others_run(limit: str, transport: str) -> None:
    argument = torch.zeros(1 if limit == "number" else 250_000)
    with cluster(3, {"FARPROP_TRANSPORT": transport}, options={"num_worker_threads": 1}) as c:
        c.run(0, _set_limits, 100, 1 << 40 if limit == "number" else 50_500_000)
        c.run(1, _send_many, 200, argument)
        c.run(1, _expect_refusals, argument)
        if limit == "number":
            # The limit is per caller, so another caller's request waits as usual.
            other = c.start(2, rpc.rpc_sync, "worker0", f.add, (1,))
        c.run(0, f.open_gate)
        done, refused = c.run(1, _outcomes)
        c.run(1, _expect_no_value)
        if limit == "number":
            assert other.result() == 2
            assert 100 <= done <= 102
            assert "100 requests of worker1 wait there" in refused[0]
        else:
            assert 49 <= done <= 52
            assert "and the limit is" in refused[0]
        assert "worker0 did not run tests.calls.functions:identity" in refused[0]
        assert done + len(refused) == 201
        assert c.run(0, _nothing_waits)
        assert c.run(1, rpc.rpc_sync, "worker0", f.add, (1,)) == 2


def test_worker_stops_reading_from_a_caller_that_reads_no_answers() -> None:
    # Each request has 16 kB, and its answer 1 MB.
    request = pack(REQUEST, 0, 1, 0.0, b"_operator:mul", pickle.dumps(((bytes(1 << 14), 64), {})))
    with cluster(2, {"FARPROP_TLS": "0"}) as c:
        serves(c)
        before = memory(c.pid(0))
        with proven(c, tls=False) as connection:
            connection.settimeout(2)
            sent = 0
            with pytest.raises(TimeoutError):
                while sent < 200 << 20:
                    sent += connection.send(request[sent % len(request) :])
            assert sent < 50 << 20  # the socket buffers, and the requests read before too many answers were pending
            serves(c)
            assert c.run(0, _outboxes) < Settings().outbox_bytes + (50 << 20)
            assert memory(c.pid(0)) - before < 300 << 20
            # When it reads, all answers arrive, also those of requests that were held back.
            connection.settimeout(60)
            _receive(connection, 200 << 20)
            serves(c)
        _until(c, _nothing_waits)


def _outboxes() -> int:
    return sum(connection.outbox_bytes for connection in current_agent()._accepted.all())


def _receive(connection: Stream, count: int) -> None:
    room = bytearray(1 << 20)
    while count > 0:
        got = connection.recv_into(room)
        assert got
        count -= got


def _until(c: Any, fact: Any) -> None:
    deadline = time.monotonic() + 60
    while not c.run(0, fact):
        assert time.monotonic() < deadline


def _large(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def test_error_for_an_oversized_message_names_the_worker_that_limits_it() -> None:
    limits = [{}, {"FARPROP_MAX_MESSAGE_BYTES": "1000000"}]
    with cluster(2, limits) as c:
        whose = "larger than FARPROP_MAX_MESSAGE_BYTES=1000000 of worker1, which does not take it"
        with pytest.raises(UsageError, match=whose):
            c.run(0, rpc.rpc_sync, "worker1", f.identity, (_large(2_000_000),))
        with pytest.raises(UsageError, match=whose):
            c.run(1, rpc.rpc_sync, "worker0", _large, (2_000_000,))
        with pytest.raises(UsageError, match="FARPROP_MAX_MESSAGE_BYTES=1000000 of this worker"):
            c.run(1, rpc.rpc_sync, "worker0", f.identity, (_large(2_000_000),))
        serves(c)
