"""``init_rpc``: how workers join a job, and the errors when they can't."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import farprop.rpc as rpc
from farprop.errors import RendezvousError
from tests.calls import functions as f
from tests.support.workers import free_port, run_workers


def _start(rank: int, world_size: int | None, init_method: Any, name: str | None = None, **options: Any) -> None:
    rpc.init_rpc(
        name or f"worker{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=init_method, **options),
    )


def _ring(rank: int, world_size: int) -> str:
    """Call the next worker, then shut down gracefully."""
    name = rpc.rpc_sync(f"worker{(rank + 1) % world_size}", f.own_name)
    rpc.shutdown()
    return str(name)


def _with_method(rank: int, init_method: str) -> str:
    _start(rank, 3, init_method)
    return _ring(rank, 3)


def test_init_with_tcp_and_file() -> None:
    with tempfile.TemporaryDirectory() as directory:
        for method in (f"tcp://127.0.0.1:{free_port()}", f"file://{directory}/meet"):
            assert run_workers(_with_method, 3, (method,)) == ["worker1", "worker2", "worker0"]


def _with_env(rank: int) -> str:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    return _ring(rank, 3)


def _with_torchrun_variables(rank: int) -> str:
    os.environ.update(RANK=str(rank), WORLD_SIZE="3")
    rpc.init_rpc(f"worker{rank}", world_size=3)
    return _ring(rank, 3)


def test_init_with_env() -> None:
    assert run_workers(_with_env, 3) == ["worker1", "worker2", "worker0"]
    assert run_workers(_with_torchrun_variables, 3) == ["worker1", "worker2", "worker0"]


def _with_torchrun_and_another_address(rank: int, method: str) -> str:
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", RANK=str(rank), WORLD_SIZE="3")
    return _with_method(rank, method)


def test_tcp_with_an_address_of_its_own_works_under_torchrun() -> None:
    """Torchrun hosts a store at the address of its variables, not at this one. All waited for it for a minute."""
    method = f"tcp://127.0.0.1:{free_port()}"
    assert run_workers(_with_torchrun_and_another_address, 3, (method,)) == ["worker1", "worker2", "worker0"]


def _with_store(rank: int, path: str) -> str:
    _start(rank, 3, dist.FileStore(path, 3))
    return _ring(rank, 3)


def test_init_with_a_store() -> None:
    with tempfile.TemporaryDirectory() as directory:
        assert run_workers(_with_store, 3, (f"{directory}/store",)) == ["worker1", "worker2", "worker0"]


def _init_repeatedly(rank: int) -> int:
    calls = 0
    for turn in range(4):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        assert rpc.rpc_sync(f"worker{1 - rank}", f.own_name) == f"worker{1 - rank}"
        calls += 1
        rpc.shutdown(graceful=turn != 2)
        if turn == 2:
            with pytest.raises(RuntimeError, match="has not been initialized"):
                rpc.rpc_sync("worker0", f.noop)
    return calls


def _init_repeatedly_with_graceful_shutdown(rank: int) -> int:
    for _ in range(5):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        assert rpc.rpc_sync(f"worker{1 - rank}", f.own_name) == f"worker{1 - rank}"
        rpc.shutdown()
    return 5


def test_repeated_init_at_the_same_address() -> None:
    assert run_workers(_init_repeatedly_with_graceful_shutdown, 2) == [5, 5]


def _sixty_four(rank: int) -> int:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=64)
    total = sum(rpc.rpc_sync(f"worker{(rank + step) % 64}", f.add, args=(step,)) for step in (1, 2, 31))
    rpc.shutdown()
    return total


@pytest.mark.one_transport
def test_sixty_four_workers_on_one_machine() -> None:
    assert run_workers(_sixty_four, 64, timeout=110) == [1 + 2 + 31 + 3] * 64


def _someone_missing(rank: int) -> str:
    began = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        _start(rank, 4, "env://", rpc_timeout=5)
    assert time.monotonic() - began < 20
    assert not rpc._is_current_rpc_agent_set()
    return str(caught.value)


def test_missing_workers_are_named() -> None:
    for text in run_workers(_someone_missing, 2):
        assert text.startswith("Ranks 2, 3 of 4 have not called init_rpc within 5 s.")


def _same_name(rank: int) -> str:
    with pytest.raises(RuntimeError, match="is not unique") as caught:
        _start(rank, 3, "env://", name="twin" if rank else "single")
    return str(caught.value)


def test_duplicate_names_are_refused_on_all_workers() -> None:
    for text in run_workers(_same_name, 3):
        assert "Worker name 'twin' is not unique: rank 1 on" in text
        assert "Give each worker its own name" in text


def _same_rank(process: int) -> str:
    try:
        _start(0 if process == 0 else 1, 3, "env://", name=f"w{process}", rpc_timeout=5)
    except RuntimeError as error:
        return str(error)
    return "joined"


def test_duplicate_ranks_are_refused() -> None:
    # With a given secret: the file of a found one stays until the last of them has given up, which is no leak.
    texts = run_workers(_same_rank, 3, env={"FARPROP_SECRET": secrets.token_hex(32)})
    assert any("Rank 1 is taken already by a process on" in text for text in texts[1:])
    assert "Rank 2 of 3 has not called init_rpc" in texts[0]


def _sizes_differ(rank: int) -> str:
    with pytest.raises(RendezvousError, match="do not agree on world_size") as caught:
        _start(rank, 2 + rank, "env://")
    return str(caught.value)


def test_different_world_sizes_are_refused() -> None:
    assert all("worker1 says 3" in text for text in run_workers(_sizes_differ, 2))


@pytest.mark.one_transport
def test_bad_ranks_and_names_are_refused_before_anything_starts() -> None:
    for rank in (2, -2, 100):
        with pytest.raises(ValueError, match="rank must be from 0 to world_size - 1 = 1"):
            _start(rank, 2, "env://")
    for name in ("", "a b", "x" * 200, "ä"):
        with pytest.raises(RuntimeError, match="[Nn]ame must"):
            rpc.init_rpc(name, rank=0, world_size=1)


def _twice(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=1)
    with pytest.raises(RuntimeError, match="RPC is already initialized"):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=1)
    assert rpc.rpc_sync("worker0", f.add, args=(1,)) == 2
    rpc.shutdown()


def test_a_second_init_is_refused_and_does_no_harm() -> None:
    run_workers(_twice, 1)


def _listening_address(rank: int) -> tuple[str, int]:
    _start(rank, 2, "env://")
    host, port = rpc.api.current_agent()._own_entry.tcp
    _ring(rank, 2)
    return host, port


@pytest.mark.one_transport
def test_port_range_and_interface() -> None:
    base = free_port()
    low, high = base, min(base + 20, 65535)
    env = {"FARPROP_PORT_RANGE": f"{low}-{high}", "FARPROP_INTERFACE": "lo", "FARPROP_TRANSPORT": "tcp"}
    places = run_workers(_listening_address, 2, env=env)
    assert len(set(places)) == 2
    for host, port in places:
        assert host == "127.0.0.1"
        assert low <= port <= high
    for host, _ in run_workers(_listening_address, 2):
        assert host == "127.0.0.1"  # a local job is not reachable from outside


def _bad_setting(rank: int, setting: dict[str, str]) -> str:
    os.environ.update(setting)
    with pytest.raises(RuntimeError) as caught:
        _start(rank, 1, "env://")
    return str(caught.value)


@pytest.mark.one_transport
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"FARPROP_INTERFACE": "nope0"}, "Interfaces here: lo"),
        ({"FARPROP_INTERFACE": "192.0.2.1"}, "Set FARPROP_INTERFACE"),
        ({"FARPROP_PORT_RANGE": "70000"}, "write it as FIRST-LAST"),
        ({"FARPROP_PORT_RANGE": "abc-def"}, "write it as FIRST-LAST"),
        ({"FARPROP_TRANSPORT": "pigeon"}, "'auto'"),
        ({"FARPROP_MAX_MESSAGE_BYTES": "many"}, "FARPROP_MAX_MESSAGE_BYTES"),
        ({"FARPROP_SECRET": "short"}, "can be guessed"),
        ({"FARPROP_SECRET_FILE": "/nowhere/at/all"}, "can't be read"),
    ],
)
def test_bad_settings_say_what_to_do(setting: dict[str, str], says: str) -> None:
    assert says in run_workers(_bad_setting, 1, (setting,))[0]


def _no_free_port(rank: int, port: int) -> str:
    os.environ["FARPROP_PORT_RANGE"] = f"{port}-{port}"
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(RuntimeError) as caught:
            _start(rank, 1, "env://")
    return str(caught.value)


def test_a_full_port_range_is_an_error() -> None:
    assert "Widen the range" in run_workers(_no_free_port, 1, (free_port(),))[0]


# Groups that workers join and leave


def _dynamic(rank: int, path: str) -> list[str]:
    if rank:
        _wait_for(Path(f"{path}.{rank - 1}"))
    _start(rank, None, f"file://{path}")
    Path(f"{path}.{rank}").touch()
    if rank == 2:
        assert rpc.rpc_sync("worker0", f.own_name) == "worker0"
        assert rpc.rpc_sync("worker0", _call_worker2) == "worker2"
        Path(f"{path}.done").touch()
    _wait_for(Path(f"{path}.done"))
    names = sorted(info.name for info in rpc.api.current_agent().get_worker_infos())
    Path(f"{path}.seen{rank}").touch()
    for other in range(3):
        _wait_for(Path(f"{path}.seen{other}"))
    rpc.shutdown()
    return names


def _call_worker2() -> str:
    return str(rpc.rpc_sync("worker2", f.own_name))


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_workers_join_and_leave() -> None:
    with tempfile.TemporaryDirectory() as directory:
        everyone = ["worker0", "worker1", "worker2"]
        assert run_workers(_dynamic, 3, (f"{directory}/meet",)) == [everyone] * 3
