"""Settings, names, the roster and its verdict, secrets, functions' names."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import os
import pickle
import re
import secrets
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farprop.config import Settings
from farprop.errors import AuthenticationError, ProtocolError, RendezvousError, UsageError
from farprop.ids import WorkerInfo
from farprop.protocol.roster import Entry, Identity, different_secrets, judge, verdict_from_json, verdict_to_json
from farprop.protocol.signing import CALLS, GROUP, Keys, Unsigned
from farprop.runtime import found_secret
from farprop.runtime.agent import Agent
from farprop.runtime.dialling import Unresponsive
from farprop.runtime.found_secret import FoundSecret
from farprop.runtime.group import Group
from farprop.runtime.secret import check_settings, find_secret
from farprop.runtime.survival import is_certain
from farprop.wire.functions import FunctionNotFound, name_of, resolve


def entry(rank: int, **changes: object) -> Entry:
    made = Entry(f"w{rank}", rank, 2, f"i{rank}", ("127.0.0.1", 5), "u", "n", "host", 9, True)
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
        ({"tls": False}, "FARPROP_TLS=0 is set on w1"),
    ],
)
def test_each_problem_is_said(second: dict[str, object], says: str) -> None:
    entries = [entry(0), entry(1, **second)]
    problem = judge(entries)
    assert problem is not None
    assert says in problem
    with pytest.raises(RendezvousError, match="."):
        verdict_from_json(verdict_to_json(entries, problem))


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (True, True, r"w0 \(host\) and w1 \(host\) share no secret"),
        (True, False, "w0 has no FARPROP_SECRET"),
        (False, True, "w1 has no FARPROP_SECRET"),
        (False, False, "w0 and w1 have different secrets, or somebody else"),
    ],
)
def test_different_secrets_are_explained(first: bool, second: bool, says: str) -> None:
    pair = entry(0, own_secret=first), entry(1, own_secret=second)
    for own, other in (pair, pair[::-1]):
        assert re.match(says, different_secrets(own, other.to_json().encode(), "worker/1"))
    assert "'worker/1' in the store is not signed" in different_secrets(pair[0], b"\xff{", "worker/1")


GARBAGE = st.one_of(
    st.text(),
    st.binary(),
    st.from_regex(r'\{"(problem|workers|tcp)": .*\}'),
    st.sampled_from([b"[" * 100_000, b'{"workers":' * 50_000, b"1e999", b"\xff\xfe", b'{"rank": 1e999}']),
)
CHANGES = st.dictionaries(
    st.sampled_from([field.name for field in dataclasses.fields(Entry)]),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=2000)),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
        max_leaves=5,
    ),
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(text=GARBAGE)
def test_whatever_the_store_holds_is_an_entry_or_a_rendezvous_error(text: str | bytes) -> None:
    for read in (Entry.from_json, verdict_from_json):
        with pytest.raises(RendezvousError):
            read(text)


@settings(max_examples=300, deadline=None)
@given(changes=CHANGES)
def test_an_entry_with_other_fields_is_one_of_the_right_types_or_an_error(changes: dict[str, object]) -> None:
    fields = {**dataclasses.asdict(entry(1)), **changes}
    try:
        read = Entry.from_json(json.dumps(fields))
    except RendezvousError:
        return
    assert isinstance(read.rank, int)
    assert isinstance(read.tcp, tuple)
    assert Entry.from_json(read.to_json()) == read
    assert Identity.from_bytes(read.identity.to_bytes()) == read.identity


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300))
def test_an_identity_is_one_or_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="makes no sense"):
        Identity.from_bytes(data)


KEYS = Keys(b"k" * 32, "job", CALLS)


def test_what_was_signed_is_read_where_it_was_put() -> None:
    value = KEYS.sign("worker/1", "text").encode()
    assert KEYS.read("worker/1", value) == b"text"
    assert KEYS.read("e", KEYS.sign("e", "").encode()) == b""
    others = [Keys(b"x" * 32, "job", CALLS), Keys(b"k" * 32, "another", CALLS), Keys(b"k" * 32, "job", GROUP)]
    for keys, name in [(KEYS, "worker/2"), *((other, "worker/1") for other in others)]:
        with pytest.raises(Unsigned, match=f"'{name}' in the store is not signed"):
            keys.read(name, value)
    assert repr(KEYS) == "<Keys>"


@settings(max_examples=300, deadline=None)
@given(value=st.binary(max_size=200), at=st.integers(0, 100), bit=st.integers(0, 7))
def test_whatever_else_the_store_holds_is_unsigned(value: bytes, at: int, bit: int) -> None:
    altered = bytearray(KEYS.sign("worker/1", "some text, signed").encode())
    altered[at % len(altered)] ^= 1 << bit
    for wrong in (value, bytes(altered)):
        with pytest.raises(Unsigned):
            KEYS.read("worker/1", wrong)


def alone(_: str, value: str) -> str:
    """What workers agree on if there is one."""
    return value


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
    with closing(FoundSecret("job", alone)) as first, closing(FoundSecret("job", alone)) as second:
        assert first.text == second.text
        assert first.file.stat().st_mode & 0o777 == 0o600
        assert first.file.parent.stat().st_mode & 0o777 == 0o700
        with closing(FoundSecret("other job", alone)) as other:
            assert other.text != first.text
            assert len(os.listdir(first.file.parent)) == 2
        first.remove()
        assert not first.file.exists()
        with closing(FoundSecret("job", alone)) as renewed:
            assert renewed.text != first.text
    assert os.listdir(first.file.parent) == []  # the last one to use one removes it


def test_secrets_that_nobody_uses_any_more_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    left_over = FoundSecret("a job whose workers were killed", alone)
    os.close(left_over._descriptor)  # as the system does it then
    left_over._descriptor = -1
    assert left_over.file.exists()
    (left_over.file.parent / "half.secret.123.abc").write_text("made by a worker that was killed a moment later")
    with closing(FoundSecret("job", alone)) as used, closing(FoundSecret("another", alone)) as newer:
        assert sorted(left_over.file.parent.iterdir()) == sorted([used.file, newer.file])


def test_a_left_over_secret_that_another_worker_replaces_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at, removed and made again by the other one, and then locked: what has its name now must stay."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    left_over = FoundSecret("job", alone)
    os.close(left_over._descriptor)
    left_over._descriptor = -1
    flock, others = fcntl.flock, list[FoundSecret]()

    def after_the_other(descriptor: int, how: int) -> None:
        if how & fcntl.LOCK_EX and not others:
            monkeypatch.setattr(fcntl, "flock", flock)
            others.append(FoundSecret("job", alone))
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", after_the_other)
    with closing(FoundSecret("job", alone)) as own, closing(others[0]) as other:
        assert own.text == other.text != left_over.text


@pytest.mark.parametrize("place", ["missing", "file"])
def test_a_runtime_directory_that_can_t_be_used(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "file":
        (tmp_path / place).touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / place))
    with closing(FoundSecret("job", alone)) as found:
        assert str(found.file).startswith(tempfile.gettempdir())


def test_a_directory_that_somebody_else_has_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes first makes another one and says its name; others believe it only if it is theirs alone."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # so what this user makes is another's
    (tmp_path / f"farprop-{os.geteuid()}").mkdir()
    monkeypatch.setattr(found_secret, "_usable", lambda path: path.name != f"farprop-{os.geteuid()}")
    with closing(FoundSecret("job", alone)) as first:
        said = first.file.parent.name
        with closing(FoundSecret("job", lambda *_: said)) as second:
            assert second.text == first.text
            assert second.file == first.file
        for lie in ("../elsewhere", "farprop-0-x", f"farprop-{os.geteuid()}-", f"farprop-{os.geteuid()}-missing"):
            with pytest.raises(UsageError, match="belongs to another user.*Set FARPROP_SECRET"):
                FoundSecret("job", lambda *_, lie=lie: lie)  # type: ignore[misc]
        first.remove()
    assert os.listdir(tmp_path) == [f"farprop-{os.geteuid()}"]


def test_given_secrets(tmp_path: Path) -> None:
    find_secret(Settings(secret=os.fsdecode(os.urandom(40).replace(b"\0", b"x"))), "job", alone)  # bytes of any kind
    good = "5f2e" + "0123456789abcdef" * 2 + "77"
    a = find_secret(Settings(secret=good), "job", alone)
    assert a.key == find_secret(Settings(secret=good + "\n"), "another job", alone).key
    assert not a.was_found
    insecure = Settings(insecure=True)
    assert find_secret(insecure, "j", alone).key == find_secret(insecure, "k", alone).key != a.key
    assert good not in repr(a) + repr(Settings(secret=good))
    file = tmp_path / "secret"
    file.write_text(good)
    file.chmod(0o600)
    assert find_secret(Settings(secret_file=str(file)), "job", alone).key == a.key
    with pytest.raises(UsageError, match="is not a file"):
        find_secret(Settings(secret_file="/dev/null"), "job", alone)


@pytest.mark.parametrize(
    "weak",
    [
        "short",
        "a" * 16,
        "a" * 64,
        "0123456789abcdef" * 2,
        "1234567890" * 4,
        "secret" * 10,
        "password-password",
        "12" * 30,
    ],
)
def test_secrets_that_can_be_guessed_are_refused(weak: str) -> None:
    with pytest.raises(UsageError, match="FARPROP_SECRET can be guessed.*token_hex"):
        find_secret(Settings(secret=weak), "job", alone)


def test_random_secrets_are_not_refused() -> None:
    for _ in range(2000):
        for made in (
            secrets.token_hex(16),
            secrets.token_hex(32),
            secrets.token_urlsafe(32),
            secrets.token_urlsafe(22),
        ):
            check_settings(Settings(secret=made))


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


def test_who_is_of_a_group() -> None:
    group = Group(None, WorkerInfo("w0", 0), 2)  # type: ignore[arg-type]
    peer, stranger = entry(1).identity, entry(1, instance="another").identity
    group.check(stranger)  # this worker has not joined, and knows nobody
    group.entries = {"w1": entry(1)}
    group.joined.set()
    group.check(peer)
    for other in (stranger, peer._replace(rank=0), peer._replace(name="w0"), peer._replace(max_message_bytes=1)):
        with pytest.raises(AuthenticationError, match="not a worker of this group"):
            group.check(other)
    dynamic = Group(None, WorkerInfo("w0", 0), None)  # type: ignore[arg-type]
    dynamic.entries = {"w1": entry(1)}
    dynamic.joined.set()
    dynamic.check(peer)
    dynamic.check(stranger)  # it has just come
    with pytest.raises(AuthenticationError, match="not a worker of this group"):
        dynamic.check(peer._replace(rank=5))


def test_a_worker_that_is_still_joining_takes_nobody_for_dead() -> None:
    """It knows no addresses yet; others may have passed it references already."""
    agent = Agent.__new__(Agent)
    agent._closed = False
    agent._group = Group(None, WorkerInfo("w0", 0), 2)  # type: ignore[arg-type]
    with pytest.raises(Unresponsive) as raised:
        agent._probe(1)
    assert not is_certain(raised.value)
