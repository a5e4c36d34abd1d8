"""An attacker between two hosts can cut connections, but can neither read, change nor relay their content."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import farprop.distributed  # noqa: F401 - it has the backend
import farprop.rpc as rpc
from farprop.protocol.handshake import VERSION
from farprop.protocol.roster import Identity
from farprop.runtime import endpoint
from farprop.runtime.dialer import Dialer
from farprop.wire.message import REQUEST
from tests.calls import functions as f
from tests.security.attackers import (
    Proxy,
    Store,
    TlsRelay,
    call_or_say,
    closing_all,
    join_group_or_say,
    redirect,
    start_or_say,
)
from tests.support.certificate_authority import CertificateAuthority
from tests.support.peers import own_entry
from tests.support.raw_messages import pack
from tests.support.workers import Cluster, cluster, processes

MARKER = "a text that nobody else should read"
_count = itertools.count(1)


def count() -> int:
    """The number of times that the function ran on this worker."""
    return next(_count)


def _route_through(job: Cluster, proxy: Proxy) -> None:
    """From now on worker 0 reaches worker 1 through the proxy."""
    job.run(0, redirect, {job.run(1, own_entry).tcp: proxy.address})


@pytest.fixture(params=["1", "0"], ids=["tls", "plain"])
def tcp(request: pytest.FixtureRequest) -> dict[str, str]:
    return {"FARPROP_TRANSPORT": "tcp", "FARPROP_TLS": request.param}


def test_eavesdropper_reads_nothing_with_tls(tcp: dict[str, str]) -> None:
    """Without TLS the attacker reads everything, which shows that the test listens at the right place."""
    with cluster(2, tcp) as job:
        proxy = Proxy(job.run(1, own_entry).tcp)
        with closing_all(proxy):
            _route_through(job, proxy)
            assert job.run(0, rpc.rpc_sync, "worker1", f.identity, (MARKER,)) == MARKER
            job.shutdown()
        for direction in ("there", "back"):
            assert len(proxy.recorded[direction]) > len(MARKER)
            assert (MARKER.encode() in proxy.recorded[direction]) == (tcp["FARPROP_TLS"] == "0")


@pytest.mark.parametrize("direction", ["there", "back"])
def test_altered_bit_breaks_the_connection(direction: str) -> None:
    with cluster(2, {"FARPROP_TRANSPORT": "tcp"}) as job:
        is_on = [False]

        def flip(where: str, _: int, data: bytes) -> bytes:
            if where != direction or not is_on[0]:
                return data
            return data[:-1] + bytes([data[-1] ^ 1])

        proxy = Proxy(job.run(1, own_entry).tcp, flip)
        with closing_all(proxy):
            said = _call_while_attacked(job, proxy, is_on)
            assert re.search("ConnectionLostError: Lost the connection to worker1", said), said
            job.shutdown()


def _call_while_attacked(job: Cluster, proxy: Proxy, is_on: list[bool]) -> Any:
    """The outcome of a call while the proxy interferes. Calls before and after it succeed."""
    _route_through(job, proxy)
    assert job.run(0, call_or_say, "worker1") == 2
    is_on[0] = True
    said = job.run(0, call_or_say, "worker1")
    is_on[0] = False
    assert job.run(0, call_or_say, "worker1") == 2
    return said


def test_injected_request_runs_only_without_tls(tcp: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "ran"
    meta = pickle.dumps(((str(path),), {}), 5)
    request = pack(REQUEST, 0, 1 << 40, 0.0, b"tests.security.attackers:touch", meta)
    with cluster(2, tcp) as job:
        is_on = [False]

        def inject(where: str, _: int, data: bytes) -> bytes:
            return request + data if where == "there" and is_on[0] else data

        proxy = Proxy(job.run(1, own_entry).tcp, inject)
        with closing_all(proxy):
            said = _call_while_attacked(job, proxy, is_on)
            if tcp["FARPROP_TLS"] == "1":
                assert "ConnectionLostError: Lost the connection to worker1" in said
            job.shutdown()
    assert path.exists() == (tcp["FARPROP_TLS"] == "0")


def test_replayed_connection_runs_nothing(tcp: dict[str, str]) -> None:
    with cluster(2, tcp) as job:
        address = job.run(1, own_entry).tcp
        proxy = Proxy(address)
        with closing_all(proxy):
            _route_through(job, proxy)
            assert job.run(0, rpc.rpc_sync, "worker1", count) == 1
            recorded = bytes(proxy.recorded["there"])
            with socket.create_connection(address) as again:
                again.settimeout(20)
                with pytest.raises((ConnectionError, StopIteration)):
                    again.sendall(recorded)
                    next(iter(_read_to_end(again)))
                    raise ConnectionResetError
            assert job.run(0, rpc.rpc_sync, "worker1", count) == 2
            job.shutdown()


def _read_to_end(sock: socket.socket) -> Iterator[bytes]:
    received = b""
    while data := sock.recv(4096):
        received += data
    yield received


def test_relay_that_terminates_tls_is_detected() -> None:
    with cluster(2, {"FARPROP_TRANSPORT": "tcp"}) as job:
        relay = TlsRelay(job.run(1, own_entry).tcp)
        with closing_all(relay):
            _route_through(job, relay)
            said = job.run(0, call_or_say, "worker1")
            assert re.search("AuthenticationError: worker1 closed the connection.*changed or relayed", said), said
            assert relay.connections
            assert b"FARPROP" in relay.recorded["there"]  # the relay saw the handshake, but could not use it
            job.run(0, redirect, {})
            assert job.run(0, call_or_say, "worker1") == 2
            job.shutdown()


def test_dial_redirected_to_another_worker_is_refused(tcp: dict[str, str]) -> None:
    """Also a dial redirected to the dialing worker itself, which then talks to itself."""
    with cluster(3, tcp) as job:
        addresses = [job.run(rank, own_entry).tcp for rank in range(3)]
        for rank in (0, 2):
            job.run(0, redirect, {addresses[1]: addresses[rank]})
            said = job.run(0, call_or_say, "worker1")
            assert re.match(rf'WrongPeerError: .*its address belongs to \["worker{rank}"', said), said
        job.run(0, redirect, {})
        assert job.run(0, call_or_say, "worker1") == 2


def _answer_without_tls(where: str, _: int, data: bytes) -> bytes:
    return b"FARPROP\n" + VERSION.to_bytes(2, "little") + os.urandom(32) if where == "back" else data


def test_dialer_with_tls_refuses_an_answer_without_tls() -> None:
    with cluster(2, {"FARPROP_TRANSPORT": "tcp"}) as job:
        proxy = Proxy(job.run(1, own_entry).tcp, _answer_without_tls)
        with closing_all(proxy):
            _route_through(job, proxy)
            assert "ProtocolError: no TLS connection could be made" in job.run(0, call_or_say, "worker1")
            job.run(0, redirect, {})
            assert job.run(0, call_or_say, "worker1") == 2
            job.shutdown()


@pytest.mark.parametrize(
    ("one", "says"),
    [
        ({"FARPROP_TLS": "0"}, "FARPROP_TLS=0 is set on worker1 and not on the other workers"),
        ({"FARPROP_INSECURE": "1", "FARPROP_SECRET": None}, "different secrets|worker0 has no FARPROP_SECRET"),
    ],
)
def test_weaker_security_on_one_worker_is_refused_by_both(one: dict[str, str | None], says: str) -> None:
    attacked = Store()
    shared = {**attacked.environment, "FARPROP_TRANSPORT": "tcp", "FARPROP_SECRET": "8f14e45fceea167a5a36dedd4bea2543"}
    with processes(2, [shared, {**shared, **one}], check=False) as job:
        second = job.start(1, start_or_say, 1)
        for said in (job.run(0, start_or_say, 0), second.result()):
            assert re.search(f"RendezvousError.*({says})", said), said


def _with_certificates(authority: CertificateAuthority, name: str) -> dict[str, str]:
    certificate, key, ca = authority.issue(name)
    files = {"FARPROP_TLS_CERT": certificate, "FARPROP_TLS_KEY": key, "FARPROP_TLS_CA": ca}
    return {"FARPROP_TRANSPORT": "tcp", **files}


def test_own_certificates_are_required_in_addition_to_the_secret(tmp_path: Path) -> None:
    ours, other = CertificateAuthority(tmp_path, "ours"), CertificateAuthority(tmp_path, "other")
    with cluster(2, [_with_certificates(ours, f"worker{rank}") for rank in range(2)]) as job:
        assert job.run(0, call_or_say, "worker1") == job.run(1, call_or_say, "worker0") == 2
    environments = [_with_certificates(ours, "worker0"), _with_certificates(other, "worker1")]
    store = Store()
    with processes(2, [{**store.environment, **environment} for environment in environments], check=False) as job:
        second = job.start(1, start_or_say, 1)
        assert (job.run(0, start_or_say, 0), second.result()) == ("", "")
        for rank in range(2):
            assert "certificate verify failed" in job.run(rank, call_or_say, f"worker{1 - rank}")
        for rank in range(2):
            job.run(rank, _shut_down)


def _shut_down() -> None:
    rpc.shutdown(graceful=False)


# Process groups


def _reduce_or_say(rank: int) -> Any:
    given: list[Any] = [MARKER if rank == 0 else None]
    try:
        dist.broadcast_object_list(given)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return given[0], tensor.tolist()


def _destroy() -> None:
    dist.destroy_process_group()


def _route_group_through(job: Cluster, store: Store, proxy_type: type[Proxy], change: Any = None) -> Proxy:
    """Start rank 0, find its address, and have rank 1 dial it through a proxy."""
    first = job.start(0, join_group_or_say, 0)
    value = store.get("worker/0").decode()
    address = re.search(r'"tcp":\s*\["([^"]+)",\s*(\d+)\]', value)
    assert address is not None
    target = address[1], int(address[2])
    proxy = proxy_type(target, change)
    job.run(1, redirect, {target: proxy.address})
    job.first = first  # type: ignore[attr-defined]
    return proxy


def test_eavesdropper_on_a_group_reads_nothing_with_tls(tcp: dict[str, str]) -> None:
    store = Store()
    with processes(2, {**store.environment, **tcp}) as job:
        proxy = _route_group_through(job, store, Proxy)
        with closing_all(proxy):
            assert (job.run(1, join_group_or_say, 1), job.first.result()) == ("", "")  # type: ignore[attr-defined]
            other = job.start(0, _reduce_or_say, 0)
            assert job.run(1, _reduce_or_say, 1) == (MARKER, [2.0] * 3)
            assert other.result() == (MARKER, [2.0] * 3)
            ends = [job.start(rank, _destroy) for rank in range(2)]
            for end in ends:
                end.result()
        assert (MARKER.encode() in proxy.recorded["back"]) == (tcp["FARPROP_TLS"] == "0")


class Slicer(Proxy):
    """Passes everything on, slowly and in small pieces."""

    def carry(self, dialer: Any, listener: Any) -> None:
        for sock in (dialer, listener):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().carry(_Sliced(dialer), _Sliced(listener))


class _Sliced:
    def __init__(self, sock: socket.socket) -> None:
        self.fileno, self.recv, self._sock = sock.fileno, sock.recv, sock

    def sendall(self, data: bytes) -> None:
        for at in range(0, len(data), 7):
            self._sock.sendall(data[at : at + 7])
            time.sleep(0.005)  # so that each piece arrives by itself


def test_group_forms_over_a_slow_path() -> None:
    store = Store()
    with processes(2, {**store.environment, "FARPROP_TRANSPORT": "tcp"}) as job:
        proxy = _route_group_through(job, store, Slicer)
        with closing_all(proxy):
            assert (job.run(1, join_group_or_say, 1), job.first.result()) == ("", "")  # type: ignore[attr-defined]
            ends = [job.start(rank, _destroy) for rank in range(2)]
            for end in ends:
                end.result()


def test_altered_group_traffic_breaks_the_group() -> None:
    """In an earlier version, the pickle of ``broadcast_object_list`` could be replaced in transit."""
    store = Store()
    is_on = [False]

    def swap(where: str, _: int, data: bytes) -> bytes:
        return data[:-8] + bytes(8) if where == "back" and is_on[0] and len(data) > 8 else data

    with processes(2, {**store.environment, "FARPROP_TRANSPORT": "tcp"}, check=False) as job:
        proxy = _route_group_through(job, store, Proxy, swap)
        with closing_all(proxy):
            assert (job.run(1, join_group_or_say, 1), job.first.result()) == ("", "")  # type: ignore[attr-defined]
            is_on[0] = True
            other = job.start(0, _reduce_or_say, 0)
            said = [job.run(1, _reduce_or_say, 1), other.result()]
            assert all(re.match("RankLostError|CollectiveError", text) for text in said), said
            assert "altered on its way" in said[0]


def _join_with_another_rank(rank: int) -> str:
    """Its entry in the store is valid, but the identity that it sends when it dials is not."""

    def dialer_with_wrong_rank(identity: Identity, *args: Any) -> Dialer:
        return Dialer(identity._replace(rank=5), *args)

    endpoint.Dialer = dialer_with_wrong_rank  # type: ignore[misc, assignment]
    return join_group_or_say(rank)


def test_group_refuses_a_wrong_rank_with_the_right_key(tcp: dict[str, str]) -> None:
    store = Store()
    with processes(2, {**store.environment, **tcp}, check=False) as job:
        first = job.start(0, join_group_or_say, 0)
        said = job.run(1, _join_with_another_rank, 1)
        assert "RefusedError: The worker we dialled refuses us: rank1 is not a rank that dials rank 0" in said
        job.signal(0, 9)
        with pytest.raises(Exception, match="SIGKILL"):
            first.result()


def test_relay_in_the_path_of_a_group_is_detected() -> None:
    store = Store()
    with processes(2, {**store.environment, "FARPROP_TRANSPORT": "tcp"}, check=False) as job:
        relay = _route_group_through(job, store, TlsRelay)
        with closing_all(relay):
            said = job.run(1, join_group_or_say, 1)
            assert re.search("AuthenticationError: rank0 closed the connection.*changed or relayed", said), said
        job.signal(0, 9)
        with pytest.raises(Exception, match="SIGKILL"):
            job.first.result()  # type: ignore[attr-defined]
