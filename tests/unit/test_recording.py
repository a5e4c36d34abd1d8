"""Recordings: leases, clocks and buffers, without sockets."""

from __future__ import annotations

import random
from typing import Any

import pytest

from farprop.errors import ProtocolError
from farprop.protocol.recording import (
    LEASE_SECONDS,
    Begin,
    Command,
    CommonClock,
    Lease,
    Recorded,
    measure_offset,
    pack,
    unpack,
)
from farprop.runtime.recorder import Recorder
from farprop.runtime.recording import _Buffer


def test_one_recording_at_a_time_until_it_is_released_or_nobody_renews_it() -> None:
    lease = Lease()
    assert lease.begin("a", "worker0", 100.0) is None
    refusal = lease.begin("b", "worker1", 103.0)
    assert refusal is not None
    assert refusal.startswith("worker0 records the job since 3.0 s.")
    assert lease.renew("a", 109.0)
    assert not lease.renew("b", 109.0)
    assert lease.begin("b", "worker1", 109.0 + LEASE_SECONDS - 0.1) is not None
    assert lease.begin("b", "worker1", 109.0 + LEASE_SECONDS) is None
    assert not lease.renew("a", 120.0)  # whoever was away for too long finds it gone
    lease.release()
    assert lease.begin("c", "worker2", 120.0) is None


def test_lease_that_has_run_out_is_not_renewed() -> None:
    lease = Lease()
    lease.begin("a", "worker0", 0.0)
    assert lease.left(4.0) == LEASE_SECONDS - 4.0
    assert not lease.renew("a", LEASE_SECONDS)


class _Network:
    """Two clocks, and ways there and back of unequal and changing length."""

    def __init__(self, seed: int, offset: float, drift: float) -> None:
        self._random = random.Random(seed)
        self._offset, self._drift = offset, drift
        self.time = 50.0

    def now(self) -> float:
        return self.time

    def theirs(self) -> float:
        return self.time + self._offset + self._drift * self.time

    def ask(self) -> float:
        self.time += self._random.expovariate(1000)
        answer = self.theirs()
        self.time += self._random.expovariate(300)
        return answer


@pytest.mark.parametrize("seed", range(50))
def test_offset_is_right_up_to_the_error_that_is_told(seed: int) -> None:
    network = _Network(seed, offset=-12345.0, drift=0.0)
    measured = measure_offset(network.ask, network.now)
    assert abs(measured.offset + 12345.0) <= measured.error
    assert measured.error < 0.003  # the shortest of many round trips


@pytest.mark.parametrize("seed", range(50))
def test_clock_that_drifts_is_read_between_two_measurements(seed: int) -> None:
    network = _Network(seed, offset=1000.0, drift=50e-6)
    first = measure_offset(network.ask, network.now)
    times = []
    for _ in range(100):
        network.time += 0.6
        times.append((network.time, network.theirs()))
    last = measure_offset(network.ask, network.now)
    clock = CommonClock(first, last)
    assert all(abs(clock.ours(theirs) - ours) <= clock.error + 1e-6 for ours, theirs in times)


def test_garbage_is_a_protocol_error() -> None:
    assert unpack(pack(Begin("a", False, 5)), Command) == Begin("a", False, 5)
    for data in (b"", b"\xc1", b"\x81\xa4type\xa3bad", pack([1, 2]), pack({"type": "begin", "recording": 5})):
        for kind in (Command, Recorded):
            with pytest.raises(ProtocolError):
                unpack(data, kind)


def test_buffer_that_is_found_full_while_it_ends_listens_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    buffer = _Buffer(1, recorder)
    for _ in range(3):
        recorder.span("test", "event", 0.0)
    subscribe = recorder.subscribe_late

    def subscribe_slowly(listener: Any) -> Any:
        buffer.end()  # as another thread does
        return subscribe(listener)

    monkeypatch.setattr(recorder, "subscribe_late", subscribe_slowly)
    buffer.look()
    assert not recorder.is_on
