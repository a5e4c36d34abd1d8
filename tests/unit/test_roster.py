"""The roster of a job: entries in the store, rank 0's decision, and membership."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farprop.errors import AuthenticationError, ProtocolError, RendezvousError
from farprop.ids import WorkerInfo
from farprop.protocol.roster import (
    Entry,
    Identity,
    check_roster,
    decision_from_json,
    decision_to_json,
    different_secrets,
)
from farprop.runtime.dialer import UnresponsiveError
from farprop.runtime.liveness import is_certain
from farprop.runtime.membership import Membership
from farprop.runtime.peers import Peers


def entry(rank: int, **changes: object) -> Entry:
    made = Entry(f"w{rank}", rank, 2, f"i{rank}", ("127.0.0.1", 5), "u", "n", "host", 9, True)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_valid_roster_passes_and_survives_json() -> None:
    entries = [entry(0), entry(1)]
    assert check_roster(entries) is None
    assert decision_from_json(decision_to_json(entries, None)) == entries
    assert Entry.from_json(entry(0).to_json()) == entry(0)


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"name": "w0"}, "'w0' is not unique: rank 0 on host, rank 1 on host"),
        ({"world_size": 3}, "w1 says 3"),
        ({"tls": False}, "FARPROP_TLS=0 is set on w1"),
    ],
)
def test_each_problem_is_reported(second: dict[str, object], says: str) -> None:
    entries = [entry(0), entry(1, **second)]
    problem = check_roster(entries)
    assert problem is not None
    assert says in problem
    with pytest.raises(RendezvousError, match="."):
        decision_from_json(decision_to_json(entries, problem))


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
def test_garbage_in_the_store_is_a_rendezvous_error(text: str | bytes) -> None:
    for read in (Entry.from_json, decision_from_json):
        with pytest.raises(RendezvousError):
            read(text)


@settings(max_examples=300, deadline=None)
@given(changes=CHANGES)
def test_altered_entry_parses_with_the_right_types_or_is_an_error(changes: dict[str, object]) -> None:
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
def test_garbage_identity_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="makes no sense"):
        Identity.from_bytes(data)


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


def test_membership_accepts_only_known_peers() -> None:
    group = Membership(None, WorkerInfo("w0", 0), 2)  # type: ignore[arg-type]
    peer, stranger = entry(1).identity, entry(1, instance="another").identity
    group.check(stranger)  # before it has joined, this worker accepts everybody
    group.entries = {"w1": entry(1)}
    group.joined.set()
    group.check(peer)
    for other in (stranger, peer._replace(rank=0), peer._replace(name="w0"), peer._replace(max_message_bytes=1)):
        with pytest.raises(AuthenticationError, match="not a worker of this group"):
            group.check(other)
    dynamic = Membership(None, WorkerInfo("w0", 0), None)  # type: ignore[arg-type]
    dynamic.entries = {"w1": entry(1)}
    dynamic.joined.set()
    dynamic.check(peer)
    dynamic.check(stranger)  # it has just joined
    with pytest.raises(AuthenticationError, match="not a worker of this group"):
        dynamic.check(peer._replace(rank=5))


def test_joining_worker_declares_nobody_dead() -> None:
    """It knows no addresses yet; others may have passed it references already."""
    peers = Peers.__new__(Peers)
    peers._closed = False
    peers._membership = Membership(None, WorkerInfo("w0", 0), 2)  # type: ignore[arg-type]
    with pytest.raises(UnresponsiveError) as raised:
        peers.probe(1)
    assert not is_certain(raised.value)
