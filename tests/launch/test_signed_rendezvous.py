"""An attack on the launcher: a state of the rendezvous in the store that runs code when it is unpickled."""

from __future__ import annotations

import os
import pickle
import socket
from base64 import b64encode
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.registry import _create_c10d_handler, get_rendezvous_handler

from farprop.errors import UsageError
from farprop.launch.signed_rendezvous import create_handler
from tests.support.hosts import SECRET

RUN = "run"


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _attack(handler_of: Callable[[RendezvousParameters], Any], path: Path) -> None:
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    server = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    server.set(f"torch.rendezvous.{RUN}", b64encode(pickle.dumps(_Evil(path))))
    parameters = RendezvousParameters(
        "farprop", f"localhost:{port}", RUN, 1, 1, is_host="0", join_timeout="5", local_addr="localhost"
    )
    handler_of(parameters).next_rendezvous()


def test_a_state_of_a_strangers_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARPROP_SECRET", SECRET)
    with pytest.raises(RendezvousStateError, match="not signed with this job's secret"):
        _attack(create_handler, tmp_path / "ran")
    assert not (tmp_path / "ran").exists()


def test_the_attack_works_on_torchs_own(tmp_path: Path) -> None:
    """Or the test above would prove nothing."""
    with pytest.raises(Exception):  # noqa: B017 - what a dict is not
        _attack(_create_c10d_handler, tmp_path / "ran")
    assert (tmp_path / "ran").exists()


def test_without_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARPROP_SECRET", raising=False)
    monkeypatch.delenv("FARPROP_SECRET_FILE", raising=False)
    with pytest.raises(UsageError, match="There is no secret: set FARPROP_SECRET_FILE"):
        create_handler(RendezvousParameters("farprop", "localhost:0", RUN, 1, 1))


def test_torchrun_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARPROP_SECRET", SECRET)
    handler = get_rendezvous_handler(RendezvousParameters("farprop", "localhost:0", RUN, 1, 1, local_addr="localhost"))
    assert handler.get_backend() == "farprop"
    assert handler.next_rendezvous().rank == 0
    assert handler.shutdown()
