"""Settings, names, the roster and its verdict, secrets, functions' names."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farprop.config import Settings
from farprop.errors import AuthenticationError, ProtocolError, RendezvousError, UsageError
from farprop.ids import WorkerInfo
from farprop.protocol.roster import Entry, judge, verdict_from_json, verdict_to_json
from farprop.runtime.agent import Agent
from farprop.runtime.dialling import Unresponsive
from farprop.runtime.group import Group
from farprop.runtime.secret import find_secret
from farprop.runtime.survival import is_certain
from farprop.wire.functions import FunctionNotFound, name_of, resolve


def entry(rank: int, **changes: object) -> Entry:
    made = Entry(f"w{rank}", rank, 2, f"i{rank}", ("127.0.0.1", 5), "u", "n", "host", 9, "same", True)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_a_good_roster_passes_and_survives_json() -> None:
    entries = [entry(0), entry(1)]
    assert judge(entries) is None
    assert verdict_from_json(verdict_to_json(entries, None)) == entries
    assert Entry.from_json(entry(0).to_json()) == entry(0)


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"name": "w0"}, "'w0' is not unique: rank 0 on host, rank 1 on host"),
        ({"world_size": 3}, "w1 says 3"),
        ({"fingerprint": "other"}, "share no secret"),
        ({"fingerprint": "other", "own_secret": False}, "w0 has no FARPROP_SECRET"),
    ],
)
def test_each_problem_is_said(second: dict[str, object], says: str) -> None:
    entries = [entry(0), entry(1, **second)]
    problem = judge(entries)
    assert problem is not None
    assert says in problem
    with pytest.raises(RendezvousError, match="."):
        verdict_from_json(verdict_to_json(entries, problem))


@settings(max_examples=200)
@given(text=st.one_of(st.text(), st.binary(), st.from_regex(r'\{"(problem|workers|tcp)": .*\}')))
def test_whatever_the_store_holds_is_an_entry_or_a_rendezvous_error(text: str | bytes) -> None:
    for read in (Entry.from_json, verdict_from_json):
        with pytest.raises(RendezvousError):
            read(text)


def test_worker_info() -> None:
    info = WorkerInfo("worker0", 0)
    assert pickle.loads(pickle.dumps(info)) == info
    assert {info: 1}[WorkerInfo(name="worker0", id=0)] == 1
    assert repr(info) == "WorkerInfo(id=0, name=worker0)"
    with pytest.raises(AttributeError):
        info.name = "other"
    for name in ("", " ", "abc*", "x" * 128):
        with pytest.raises(RuntimeError):
            WorkerInfo(name, 0)


def test_settings_are_read_from_the_environment() -> None:
    read = Settings.from_env({"FARPROP_PORT_RANGE": "5000-5010", "FARPROP_INSECURE": "1", "FARPROP_TRANSPORT": "tcp"})
    assert (read.port_range, read.insecure, read.transport) == ((5000, 5010), True, "tcp")
    assert Settings.from_env({"FARPROP_PORT_RANGE": "5000", "FARPROP_INSECURE": "0"}).port_range == (5000, 5000)
    assert Settings.from_env({}) == Settings()
    for bad in ({"FARPROP_PORT_RANGE": "9-1"}, {"FARPROP_SHM_POOL_BYTES": "-1"}, {"FARPROP_TRANSPORT": "x"}):
        with pytest.raises(UsageError, match="FARPROP_"):
            Settings.from_env(bad)


def test_a_found_secret_is_shared_private_and_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    first, second = find_secret(Settings(), "job"), find_secret(Settings(), "job")
    assert first.key == second.key
    assert first.fingerprint == second.fingerprint
    assert first.file is not None
    assert first.file.stat().st_mode & 0o777 == 0o600
    assert first.file.parent.stat().st_mode & 0o777 == 0o700
    assert find_secret(Settings(), "other job").key != first.key
    assert len(os.listdir(first.file.parent)) == 2
    first.remove_file()
    assert find_secret(Settings(), "job").key != first.key
    assert first.key.hex() not in first.fingerprint


def test_given_secrets() -> None:
    a = find_secret(Settings(secret="x" * 20), "job")
    assert a == find_secret(Settings(secret="x" * 20 + "\n"), "another job")
    assert a.file is None
    assert find_secret(Settings(insecure=True), "j").key == find_secret(Settings(insecure=True), "k").key
    with pytest.raises(UsageError, match="can be guessed"):
        find_secret(Settings(secret="short"), "job")


def _decorated() -> None: ...


def test_names_of_functions() -> None:
    assert name_of(torch.add) == b"torch:add"
    assert name_of(min) == b"builtins:min"
    assert name_of(Path.exists) == b"pathlib:Path.exists"
    assert name_of(os.path.join) is not None
    for nameless in (lambda: 1, functools.partial(min), "x".join, [].append, entry(0).to_json):
        assert name_of(nameless) is None
    for function in (torch.add, min, Path.exists, torch.nn.Linear, torch.nn.functional.relu):
        name = name_of(function)
        assert name is not None
        assert resolve(name) is function


def test_a_function_that_is_shadowed_is_not_named() -> None:
    wrapped = functools.wraps(_decorated)(lambda: 1)
    assert wrapped.__qualname__ == "_decorated"
    assert name_of(wrapped) is None


@pytest.mark.parametrize("name", [b"no.such.module:f", b"os:no_such", b"os:path.no_such", b"", b":", b"os"])
def test_names_that_lead_nowhere(name: bytes) -> None:
    with pytest.raises((FunctionNotFound, ValueError)):
        resolve(name)


def test_a_peer_that_comes_while_we_join_is_not_a_stranger() -> None:
    """It was looked up before this worker had joined, and judged after."""
    group = Group(None, WorkerInfo("w0", 0), 2)  # type: ignore[arg-type]

    class JoinsMeanwhile(dict[str, Entry]):
        def get(self, *_: object) -> None:  # type: ignore[override]
            group.entries = {"w1": entry(1)}
            group.joined.set()

    group.entries = JoinsMeanwhile()
    known = WorkerInfo("w1", 1), "i1"
    assert group.identify(json.dumps(["w1", 1, "i1"]).encode()) == known
    group.entries = {"w1": entry(1)}
    group.joined.set()
    assert group.identify(json.dumps(["w1", 1, "i1"]).encode()) == known
    with pytest.raises(AuthenticationError, match="not a worker of this group"):
        group.identify(json.dumps(["w1", 1, "another instance"]).encode())
    with pytest.raises(ProtocolError, match="makes no sense"):
        group.identify(b"{}")


def test_a_worker_that_is_still_joining_takes_nobody_for_dead() -> None:
    """It knows no addresses yet; others may have passed it references already."""
    agent = Agent.__new__(Agent)
    agent._closed = False
    agent._group = Group(None, WorkerInfo("w0", 0), 2)  # type: ignore[arg-type]
    with pytest.raises(Unresponsive) as raised:
        agent._probe(1)
    assert not is_certain(raised.value)
