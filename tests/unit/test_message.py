"""The format of messages: packed messages parse to the same fields, and garbage raises ProtocolError."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farprop.errors import ProtocolError
from farprop.ids import GlobalId
from farprop.protocol.backward import ALL, NONE, WHOLE, Credit, CreditShare, PassId, Series
from farprop.protocol.references.control_plane import Operation, OperationKind
from farprop.protocol.references.records import Fork, ReturnedFork
from farprop.wire.frames import FrameReader
from farprop.wire.message import (
    ALL_FLAGS,
    ANSWER,
    CONTEXT,
    FAST,
    HEADS,
    MAX_ENDED,
    MAX_SECONDS,
    MODES,
    NOTICE,
    REFS,
    REMOTE,
    REQUEST,
    RETURNS,
    SYSTEM,
    TRACED,
    AutogradHead,
    Bundle,
    Creation,
    GradientAnswer,
    GradientPart,
    Message,
    Method,
    PassHead,
    pack_operations,
    unpack_operations,
)
from farprop.wire.modes_head import ModesHead
from farprop.wire.trace_head import TraceHead

shorts = st.integers(0, 2**16 - 1)
longs = st.integers(0, 2**64 - 1)
ids = st.builds(GlobalId, shorts, longs)
forks = st.builds(Fork, shorts, ids, ids, st.booleans(), st.booleans())
operations = st.builds(Operation, st.sampled_from(OperationKind), ids, ids, st.booleans())
autograd_heads = st.builds(
    AutogradHead,
    longs,
    longs,
    st.integers(0, 2**32 - 1),
    st.text(max_size=30),
    st.lists(longs, max_size=MAX_ENDED).map(tuple),
)
shares = st.sampled_from(
    [ALL, CreditShare(NONE, {}), CreditShare(Credit(3, 700).split(3)[2], {1: (1, True), 65535: (7, False)})]
)
HALF = Credit(1, 1)


def received(data: bytes) -> Message:
    reader = FrameReader(1 << 20)
    reader.target[: len(data)] = data
    (message,) = reader.received(len(data))
    message.parse_heads()
    return message


@settings(max_examples=200, deadline=None)
@given(
    refs=st.none() | st.lists(forks, max_size=5),
    creation=st.none() | st.builds(Creation, forks, st.binary(max_size=50)),
    autograd=st.none() | autograd_heads,
    profile=st.none() | st.binary(max_size=50),
    returned=st.none() | st.lists(st.builds(ReturnedFork, ids, st.booleans()), max_size=5),
    modes=st.none() | st.binary(max_size=50),
    payload=st.binary(max_size=50),
    kind=st.sampled_from([REQUEST, ANSWER]),
    other_flags=st.sampled_from([0, FAST, SYSTEM, FAST | SYSTEM]),
    seconds=st.none() | st.floats(0, MAX_SECONDS, exclude_min=True),
)
def test_heads_round_trip(
    refs: list[Fork] | None,
    creation: Creation | None,
    autograd: AutogradHead | None,
    profile: bytes | None,
    returned: list[ReturnedFork] | None,
    modes: bytes | None,
    payload: bytes,
    kind: int,
    other_flags: int,
    seconds: float | None,
) -> None:
    sent = Message(payload, [], flags=other_flags, kind=kind, call_id=7, seconds=seconds, name=b"module:function")
    for flag, head in ((REFS, refs), (REMOTE, creation), (CONTEXT, autograd), (TRACED, profile)):
        sent.flags |= flag if head is not None else 0
    sent.refs, sent.creation, sent.autograd, sent.trace = refs or (), creation, autograd, profile or b""
    if returned is not None and kind == ANSWER:
        sent.flags |= RETURNS
        sent.returned = returned
    if modes is not None and kind == REQUEST:
        sent.flags |= MODES
        sent.modes = modes
    got = received(sent.pack())
    for field in ("kind", "flags", "call_id", "seconds", "name", "creation", "autograd"):
        assert getattr(got, field) == getattr(sent, field), field
    assert list(got.refs) == list(sent.refs)
    assert list(got.returned) == list(sent.returned)
    assert bytes(got.trace) == sent.trace
    assert not sent.flags & MODES or kind == ANSWER or bytes(got.modes) == modes
    assert bytes(got.payload) == payload


@settings(max_examples=500, deadline=None)
@given(flags=st.integers(0, ALL_FLAGS), kind=st.sampled_from([REQUEST, ANSWER]), body=st.binary(max_size=200))
def test_garbage_heads_parse_or_are_a_protocol_error(flags: int, kind: int, body: bytes) -> None:
    message = Message(body, [], flags=flags, kind=kind)
    try:
        message.parse_heads()
    except ProtocolError:
        assert flags & HEADS
    else:
        assert len(message.payload) <= len(body)
        assert len(message.refs) <= len(body)
        assert len(message.returned) <= len(body)


@pytest.mark.parametrize("cut", [1, 22, 23])
def test_truncated_references_are_a_protocol_error(cut: int) -> None:
    message = Message(b"", [], flags=REFS)
    message.refs = [Fork(1, GlobalId(2, 3), GlobalId(4, 5), exists=True)]
    whole = message.pack()[-27:]
    message = Message(whole[:-cut], [], flags=REFS)
    with pytest.raises(ProtocolError, match="too short"):
        message.parse_heads()


@pytest.mark.parametrize("cut", [1, 11, 12])
def test_truncated_returns_are_a_protocol_error(cut: int) -> None:
    message = Message(b"", [], flags=RETURNS, kind=ANSWER)
    message.returned = [ReturnedFork(GlobalId(4, 5), orphans=False)]
    message = Message(message.pack()[-15:-cut], [], flags=RETURNS, kind=ANSWER)
    with pytest.raises(ProtocolError, match="too short"):
        message.parse_heads()


def test_only_answers_give_references_back() -> None:
    message = Message(bytes(4), [], flags=RETURNS, kind=NOTICE)
    with pytest.raises(ProtocolError, match="no answer"):
        message.parse_heads()


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_truncated_modes_are_a_protocol_error(cut: int) -> None:
    message = Message(b"", [], flags=MODES, kind=REQUEST)
    message.modes = b"{}"
    message = Message(message.pack()[-6:-cut], [], flags=MODES, kind=REQUEST)
    with pytest.raises(ProtocolError, match="short"):
        message.parse_heads()


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=50) | st.sampled_from([b"{}", b'{"autocast": {"cpu": 1}}', b'{"checkpoint": true}']))
def test_garbage_modes_parse_or_are_a_protocol_error(data: bytes) -> None:
    try:
        head = ModesHead.parse(data)
    except ProtocolError:
        return
    assert ModesHead.parse(head.pack()) == head


def test_long_creation_site_is_truncated() -> None:
    message = Message(b"payload", [], flags=REMOTE)
    message.creation = Creation(Fork(1, GlobalId(2, 3), GlobalId(4, 5), exists=False), b"x" * 100_000)
    data = message.pack()
    again = Message(data[len(data) - 22 - 2 - 0xFFFF - 7 - 1 :], [], flags=REMOTE)
    again.parse_heads()
    assert again.creation is not None
    assert len(again.creation.site) == 0xFFFF
    assert bytes(again.payload) == b"payload"


def test_method_numbers_are_unique_and_cannot_be_names() -> None:
    values = [method.value for method in Method]
    assert len(set(values)) == len(values)
    assert all(len(value) == 1 and value[0] < 0x20 for value in values)


# Operations on references


def operation(number: int) -> Operation:
    return Operation(OperationKind.DELETE, GlobalId(1, number), GlobalId(2, number))


@settings(max_examples=100, deadline=None)
@given(st.lists(operations, max_size=20).map(tuple))
def test_operations_round_trip(sent: tuple[Operation, ...]) -> None:
    got = unpack_operations(pack_operations(sent))
    assert got == sent
    assert all(type(one.kind) is OperationKind for one in got)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_operations_are_a_protocol_error(data: bytes) -> None:
    try:
        done = unpack_operations(data)
    except ProtocolError:
        assert len(data) % 22 or any(kind not in list(OperationKind) for kind in data[::22])
    else:
        assert len(pack_operations(done)) == len(data)


@pytest.mark.parametrize("cut", [1, 21])
def test_truncated_batch_is_a_protocol_error(cut: int) -> None:
    whole = pack_operations([operation(1), operation(2)])
    with pytest.raises(ProtocolError, match="makes no sense"):
        unpack_operations(whole[:-cut])


def test_unknown_operation_is_a_protocol_error() -> None:
    sent = bytearray(pack_operations([operation(1)]))
    sent[0] = 99
    with pytest.raises(ProtocolError, match="99"):
        unpack_operations(bytes(sent))


# Backward passes


def head_with(**fields: Any) -> PassHead:
    blank = PassHead(1 << 50, (1 << 63) + 3, PassId(3, 9), 8, False, False, False, ALL)
    return blank._replace(**fields)


@given(share=shares, fast=st.booleans(), keep_graph=st.booleans(), anomaly=st.booleans())
def test_pass_heads_round_trip(share: CreditShare, fast: bool, keep_graph: bool, anomaly: bool) -> None:
    head = head_with(share=share, fast=fast, keep_graph=keep_graph, anomaly=anomaly)
    assert PassHead.parse(head.pack()) == head


@given(
    parts=st.lists(st.builds(GradientPart, longs, shares, st.integers(0, 2**32 - 1)), max_size=4),
    series=st.builds(Series, st.integers(0, 2**16 - 1), st.booleans()),
)
def test_heads_of_bundles_round_trip(parts: list[GradientPart], series: Series) -> None:
    head = head_with(message_id=0, share=CreditShare(NONE, {}), bundle=Bundle(parts, series))
    assert PassHead.parse(head.pack()) == head
    for broken in (head.pack()[:-1], head.pack() + b"x"):
        with pytest.raises(ProtocolError):
            PassHead.parse(broken)


def test_whole_credit_parses_to_the_constant() -> None:
    assert PassHead.parse(head_with(share=CreditShare(WHOLE, {})).pack()).share is ALL
    (part,) = GradientAnswer.parse(GradientAnswer([GradientPart(1, CreditShare(WHOLE, {}), 1)], None).pack()).parts
    assert part.share is ALL


@pytest.mark.parametrize("statuses", [{}, {1: (1, True)}])
def test_truncated_pass_head_is_a_protocol_error(statuses: dict[int, tuple[int, bool]]) -> None:
    data = head_with(share=CreditShare(HALF, statuses)).pack()
    for broken in (b"", data[:10], data[:-1], data + b"x"):
        with pytest.raises(ProtocolError):
            PassHead.parse(broken)


@given(
    parts=st.lists(st.builds(GradientPart, longs, shares, st.integers(0, 2**32 - 1)), max_size=4),
    credit=st.none() | shares,
)
def test_gradient_answers_round_trip(parts: list[GradientPart], credit: CreditShare | None) -> None:
    assert GradientAnswer.parse(GradientAnswer(parts, credit).pack()) == GradientAnswer(parts, credit)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=100))
def test_garbage_gradient_answers_parse_or_are_a_protocol_error(data: bytes) -> None:
    try:
        found = GradientAnswer.parse(data)
    except ProtocolError:
        return
    assert len(found.parts) <= len(data)


@settings(max_examples=300, deadline=None)
@given(
    data=st.binary(max_size=100) | st.sampled_from([b"{}", b'{"carrier": {"a": 1}}', b'{"profile": {"x": 2}}', b"[]"])
)
def test_garbage_trace_heads_parse_or_are_a_protocol_error(data: bytes) -> None:
    try:
        head = TraceHead.parse(data)
    except ProtocolError:
        return
    assert TraceHead.parse(head.pack()) == head


def test_trace_head_round_trips() -> None:
    head = TraceHead({"with_stack": True}, {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"})
    assert TraceHead.parse(memoryview(head.pack())) == head
    assert TraceHead().pack() == b"{}"
