"""An attacker who can read and write the store can keep a job from starting, and nothing more."""

from __future__ import annotations

import json
import pickle
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import farprop.distributed  # noqa: F401 - it has the backend
import farprop.rpc as rpc
from farprop.errors import RendezvousError
from farprop.wire.message import REQUEST
from tests.calls import functions as f
from tests.security.attackers import Proxy, Store, closing_all, join_group_or_say, start_or_say
from tests.support.raw_messages import pack
from tests.support.workers import Cluster, processes


def _with_address(value: bytes, address: Any) -> bytes:
    """An entry with another address and the old signature, if it has one."""
    signature, brace, text = value.partition(b"{")
    fields = json.loads(brace + text)
    fields.update(tcp=list(address), unix="")
    return signature + json.dumps(fields).encode()


def _shut_down() -> None:
    rpc.shutdown(graceful=False)


def _ask_peer_for_its_name(rank: int) -> Any:
    said = start_or_say(rank)
    if said:
        return said
    return rpc.rpc_sync(f"worker{1 - rank}", f.own_name)


class Injector(Proxy):
    """Relays a handshake, then sends its own request to the dialled worker."""

    def __init__(self, target: Any, path: Path) -> None:
        super().__init__(target, self._inject)
        self._request = pack(
            REQUEST, 0, 1 << 40, 0.0, b"tests.security.attackers:touch", pickle.dumps(((str(path),), {}), 5)
        )

    def _inject(self, direction: str, before: int, data: bytes) -> bytes:
        # The dialer's first two messages are the handshake, and the first one has 42 bytes.
        return self._request + data if direction == "there" and before > 42 else data


def test_relay_address_in_a_poisoned_store_is_not_used(tmp_path: Path) -> None:
    """An attack that ran code on both workers in an earlier version: worker 1's entry has the attacker's address."""
    attacked = Store()
    path = tmp_path / "ran"
    with processes(2, attacked.environment, check=False) as job:
        second = job.start(1, _ask_peer_for_its_name, 1)
        value = attacked.get("worker/1")
        target = tuple(json.loads(value[value.index(b"{") :])["tcp"])
        relay = Injector(target, path)
        with closing_all(relay):
            attacked.set("worker/1", _with_address(value, relay.address))
            said = job.run(0, _ask_peer_for_its_name, 0), second.result()
            for text in said:
                assert re.search("RendezvousError.*'worker/1' in the store is not signed|have different secrets|"
                                 "share no secret", str(text)), text  # fmt: skip
            assert relay.connections == 0
    assert not path.exists()


def test_forged_decision_is_refused(tmp_path: Path) -> None:
    """Rank 1 waits for rank 0's decision, and gets a forged one from an attacker who has read the entries."""
    attacked = Store()
    said = _error_of_rank_1_for_a_forged_decision(attacked, attacked.environment, start_or_say, name="worker0", unix="")
    assert "RendezvousError: 'decision' in the store is not signed with this job's secret" in said


def test_forged_decision_is_refused_by_a_process_group() -> None:
    attacked = Store()
    environment = {**attacked.environment, "FARPROP_TRANSPORT": "tcp"}
    said = _error_of_rank_1_for_a_forged_decision(attacked, environment, join_group_or_say, name="rank0")
    assert "'decision' in the store is not signed with this job's secret" in said


def _error_of_rank_1_for_a_forged_decision(
    attacked: Store, environment: dict[str, str], join: Callable[[int], str], **first: str
) -> str:
    """The forged decision has the attacker's address for rank 0. Rank 1 must not dial it."""
    with processes(2, environment, check=False) as job, socket.create_server(("127.0.0.1", 0)) as listener:
        second = job.start(1, join, 1)
        value = attacked.get("worker/1")
        own = json.loads(value[value.index(b"{") :])
        forged = {**own, "rank": 0, "instance": "x", "tcp": listener.getsockname(), **first}
        decision = json.dumps({"problem": None, "workers": [forged, own]}).encode()
        attacked.set("decision", value[: value.index(b"{")] + decision, beside="worker/1")
        said: str = second.result()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    return said


def _join_dynamic_group(rank: int) -> str:
    try:
        rpc.init_rpc(f"worker{rank}", rank=rank)
    except RendezvousError as error:
        return str(error)
    return ""


def _assert_served(job: Cluster, caller: int, callee: int) -> None:
    assert job.run(caller, rpc.rpc_sync, f"worker{callee}", f.add, (1,)) == 2


def test_poisoned_store_does_not_harm_a_running_job() -> None:
    """Workers of a dynamic group keep reading the store."""
    attacked = Store()
    with processes(3, attacked.environment, check=False) as job:
        assert [job.run(rank, _join_dynamic_group, rank) for rank in range(2)] == ["", ""]
        _assert_served(job, 0, 1)
        good = attacked.get("place/2")
        for bad in (b"", b"gone", b"\xff\xfe" * 50, b"[" * 100_000, _with_address(good, ("127.0.0.1", 9)), b"1e999"):
            attacked.set("place/2", bad)
            _assert_served(job, 0, 1)
            _assert_served(job, 1, 0)
            assert {info.name for info in job.run(0, _infos)} == {"worker0", "worker1"}
        # A new worker cannot join, and gets an error that says why.
        assert "'place/2' in the store is not signed" in job.run(2, _join_dynamic_group, 2)
        attacked.set("place/2", good)
        assert job.run(2, _join_dynamic_group, 2) == ""
        _assert_served(job, 2, 1)
        attacked.set("places", b"1000000000")
        _assert_served(job, 0, 2)
        assert {info.name for info in job.run(0, _infos)} == {"worker0", "worker1", "worker2"}
        for rank in range(3):
            job.run(rank, _shut_down)


def test_removed_claims_do_not_give_away_the_name_of_a_living_worker() -> None:
    attacked = Store()
    with processes(2, attacked.environment, check=False) as job:
        assert job.run(0, _join_dynamic_group, 0) == ""
        for claim in ("name/worker0", "id/0"):
            attacked.set(claim, b"")
        assert "is not unique" in job.run(1, _join_dynamic_group, 0)
        assert {info.name for info in job.run(0, _infos)} == {"worker0"}
        job.run(0, _shut_down)


def test_workers_that_left_do_not_block_later_workers() -> None:
    """The last worker to leave removes the found secret. Its values in the store stay signed with it."""
    store = Store()
    with processes(2, store.environment, check=False) as job:
        for _ in range(2):
            for rank in range(2):
                assert job.run(rank, _join_dynamic_group, rank) == ""
                _assert_served(job, rank, rank)
                job.run(rank, _leave)


def _leave() -> None:
    rpc.shutdown()


def _infos() -> Any:
    from farprop.rpc.api import _get_current_rpc_agent

    return _get_current_rpc_agent().get_worker_infos()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("job", b"\xff not ours", "'job' in the store says"),
        ("kind", b"\xff", "mixes statically and dynamically"),
        ("claim/0", b"\xff\xfe nonsense", "Rank 0 is taken already"),
    ],
)
def test_nonsense_in_the_store_is_a_rendezvous_error(name: str, value: bytes, says: str) -> None:
    attacked = Store()
    attacked.store.set(f"rpc_prefix_0/{name}", value)  # type: ignore[arg-type]
    with processes(1, attacked.environment, check=False) as job:
        said = job.run(0, start_or_say, 0)
        assert said.startswith(("RendezvousError: ", "UsageError: "))
        assert says in said


def test_counters_that_are_not_numbers() -> None:
    """The store closes the connection of a client that increments them."""
    attacked = Store()
    attacked.store.set("rpc_prefix_0/places", "x")
    with processes(1, attacked.environment, check=False) as job:
        assert "The store failed at 'places'" in job.run(0, _join_dynamic_group, 0)
    attacked = Store()
    attacked.store.set("rpc_prefix_0/seen", "x")
    with processes(2, attacked.environment, check=False) as job:
        second = job.start(1, start_or_say, 1)
        assert (job.run(0, start_or_say, 0), second.result()) == ("", "")
        assert job.run(0, rpc.rpc_sync, "worker1", f.add, (1,)) == 2
        for rank in range(2):
            job.run(rank, _shut_down)


def test_store_does_not_reveal_the_secret() -> None:
    """Neither the secret, nor any value that is the same in two jobs with the same secret."""
    secret = "8f14e45fceea167a5a36dedd4bea2543"
    seen: list[set[bytes]] = []
    for _ in range(2):
        attacked = Store()
        with processes(2, {**attacked.environment, "FARPROP_SECRET": secret}, check=False) as job:
            threads = [threading.Thread(target=job.run, args=(rank, start_or_say, rank)) for rank in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            values = [bytes(attacked.store.get(key)) for key in attacked.store.list_keys()]
            assert not [value for value in values if secret.encode() in value]
            seen.append({word for value in values for word in re.findall(rb"[0-9a-f]{32,}", value)})
            for rank in range(2):
                job.run(rank, _shut_down)
    boot = set(re.findall(rb"[0-9a-f]{32,}", Path("/proc/sys/kernel/random/boot_id").read_bytes()))
    assert seen[0] & seen[1] <= boot
