"""The targets. Each takes bytes that a peer can send. It catches the typed errors that are expected; any other error is
a bug. A target imports its farprop modules when it is made: so they can be instrumented, and a missing one does not
stop the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Target = Callable[[bytes], None]

CAP = 1 << 30  # far more than any input has: announced sizes must not be allocated


def frames() -> Target:
    """The stream of calls. The first byte selects the size of the pieces that the rest is read in."""
    from farprop.errors import ProtocolError
    from farprop.wire.frames import FrameReader

    def run(data: bytes) -> None:
        piece = (1, 7, 33, 4096, 1 << 20)[data[0] % 5] if data else 1
        reader = FrameReader(CAP)
        at = 1
        while at < len(data):
            target = reader.target
            assert len(target)
            count = min(len(target), len(data) - at, piece)
            target[:count] = data[at : at + count]
            at += count
            try:
                received = reader.received(count)
            except ProtocolError:
                return
            for frame in received:
                assert len(frame.name) + len(frame.payload) <= len(data)
                assert all(type(b) is memoryview or b[0] for b in frame.buffers)

    return run


def messages() -> Target:
    """The heads of messages, and payloads that are not pickles. The first byte selects the parser."""
    from farprop.errors import ProtocolError
    from farprop.protocol import first_failure, recording
    from farprop.protocol.backward import WHOLE
    from farprop.wire.message import (
        ANSWER,
        CONTEXT,
        MAX_ENDED,
        REQUEST,
        GradientAnswer,
        Message,
        PassHead,
        unpack_operations,
        unpack_share,
    )
    from farprop.wire.modes_head import ModesHead
    from farprop.wire.trace_head import TraceHead

    def heads(data: bytes) -> None:
        message = Message(data[2:], [], flags=data[0] if data else 0, kind=ANSWER if data[1:2] > b"\x7f" else REQUEST)
        message.parse_heads()
        assert len(message.refs) + len(message.returned) <= len(data)
        assert len(message.payload) <= len(data)

    def context(data: bytes) -> None:
        message = Message(data, [], flags=CONTEXT)
        message.parse_heads()
        trace, ended = int.from_bytes(data[20:24], "little"), int.from_bytes(data[24:26], "little")
        assert len(message.payload) == len(data) - 26 - trace - 8 * ended
        assert ended <= MAX_ENDED

    def share(data: bytes) -> None:
        credit, statuses = unpack_share(data)
        assert len(statuses) <= len(data)
        # As a pass uses it.
        whole = credit.plus(WHOLE)
        assert not credit.parts or sum(s.parts for s in whole.split(3)) >= whole.parts
        whole.is_whole  # noqa: B018 - it must not allocate much memory

    def head(data: bytes) -> None:
        found = PassHead.parse(data)
        found.share.credit.is_whole  # noqa: B018
        assert found.bundle is None or len(found.bundle.parts) <= len(data)

    def answer(data: bytes) -> None:
        assert len(GradientAnswer.parse(data).parts) <= len(data)

    def operations(data: bytes) -> None:
        assert len(unpack_operations(data)) <= len(data)

    def trace(data: bytes) -> None:
        TraceHead.parse(data)

    def command(data: bytes) -> None:
        recording.unpack(data, recording.Command)

    def recorded(data: bytes) -> None:
        assert len(recording.unpack(data, recording.Recorded).events) <= len(data)

    def last_words(data: bytes) -> None:
        said = first_failure.cleaned(data.decode(errors="replace"))
        assert len(said) <= first_failure.MAX_TEXT
        assert said.isprintable()

    def modes(data: bytes) -> None:
        ModesHead.parse(data)

    parsers = [heads, context, share, head, operations, answer, trace, command, recorded, last_words, modes]

    def run(data: bytes) -> None:
        if data:
            try:
                parsers[data[0] % len(parsers)](data[1:])
            except ProtocolError:
                pass

    return run


def group_frames() -> Target:
    """The frames that one rank of a group sends to another."""
    from farprop.distributed.native.framing import FrameKind, FrameReader
    from farprop.distributed.native.group_state import GroupState
    from farprop.distributed.native.matching import MessageMatcher, PostedRecv
    from farprop.errors import CollectiveError, ProtocolError

    class Mesh:
        """As ``distributed.native.mesh``, without sockets and threads."""

        def __init__(self) -> None:
            self.state = GroupState(0, 2, lambda error, to_tell: None)
            self.matcher = MessageMatcher(CAP)
            self.read_lock = threading.Lock()

        def handle(self, peer: int, kind: FrameKind, text: str) -> None:
            if kind == FrameKind.GOODBYE:
                self.state.on_peer_left(peer, *text.partition(" ")[::2])
            elif kind == FrameKind.GROUP_FAILED:
                self.state.on_peer_failure(peer, *text.partition(" ")[::2])

    def run(data: bytes) -> None:
        mesh = Mesh()
        piece = (1, 7, 33, 1 << 20)[data[0] % 4] if data else 1
        rest = data[1:]
        reader = FrameReader(mesh, 1, CAP)
        mesh.state.begin("barrier", 1.0)
        for kind in (FrameKind.MESSAGE, FrameKind.COLLECTIVE):
            mesh.matcher.post(PostedRecv(kind, 1, 1, memoryview(bytearray(4)), "int8", lambda _, error: None))
        try:
            while rest:
                target = reader.target()
                count = min(len(target), len(rest), piece)
                target[:count] = rest[:count]
                rest = rest[count:]
                reader.filled(count)
                if not reader.advance():
                    break
        except (ProtocolError, CollectiveError):
            pass
        assert sum(mesh.matcher._counts.values()) == len(mesh.matcher._unexpected) <= len(data)

    return run


def handshake() -> Target:
    """The bytes that an unauthenticated peer sends to a listener or to a dialer. The first byte selects which."""
    from farprop.errors import AuthenticationError, ProtocolError
    from farprop.protocol.handshake import REFUSED, DialerHandshake, ListenerHandshake

    def run(data: bytes) -> None:
        machine: Any
        if data and data[0] % 2:
            machine = DialerHandshake(b"k" * 32, b"identity", b"target", b"unix", b"n" * 32)
            machine.start()
        else:
            machine = ListenerHandshake(b"k" * 32, b"identity", b"unix", b"n" * 32)
        try:
            for at in range(1, len(data), 64):
                machine.receive(data[at : at + 64])
                machine.validate()
        except (ProtocolError, AuthenticationError):
            assert machine.state == REFUSED
        assert not machine.peer_identity

    return run


def roster() -> Target:
    """Values of the store, signed or not, and the identity that a peer sends."""
    from farprop.errors import ProtocolError, RendezvousError
    from farprop.protocol.roster import Entry, Identity, decision_from_json
    from farprop.protocol.signing import CALLS, Keys

    keys = Keys(b"k" * 32, "job", CALLS)

    def run(data: bytes) -> None:
        for parse in (Entry.from_json, decision_from_json, Identity.from_bytes, lambda data: keys.read("x", data)):
            try:
                parse(data)
            except (RendezvousError, ProtocolError):
                pass

    return run


def data_codec() -> Target:
    """The data of restricted mode. The first byte selects the decoder, the second the length of the buffer."""
    from farprop.errors import FarpropError
    from farprop.wire.data_codec import decode_call, decode_value
    from farprop.wire.message import FAST

    def run(data: bytes) -> None:
        kind, cut = (data[0], data[1]) if len(data) > 1 else (0, 0)
        decode: Any = decode_call if kind & 1 else decode_value
        try:
            decode(data[2 + cut :], [memoryview(bytearray(data[2 : 2 + cut]))], FAST if kind & 2 else 0)
        except FarpropError:
            pass

    return run


TARGETS: dict[str, Callable[[], Target]] = {
    maker.__name__: maker for maker in (frames, messages, group_frames, handshake, roster, data_codec)
}


def seeds(name: str) -> list[bytes]:
    """Inputs to start from: without them, the fuzzer takes long to find inputs that are nearly valid."""
    import torch

    from farprop.distributed.native import framing as groups
    from farprop.ids import GlobalId
    from farprop.protocol import recording
    from farprop.protocol.backward import Credit, CreditShare, PassId, Series
    from farprop.protocol.events import Span
    from farprop.protocol.handshake import VERSION
    from farprop.protocol.references.control_plane import Operation, OperationKind
    from farprop.protocol.references.records import Fork
    from farprop.protocol.roster import Entry
    from farprop.wire.data_codec import encode_call, encode_value
    from farprop.wire.message import (
        ANSWER,
        FAST,
        NOTICE,
        REFS,
        REMOTE,
        REQUEST,
        Bundle,
        GradientAnswer,
        GradientPart,
        PassHead,
        pack_operations,
        pack_share,
    )
    from farprop.wire.modes_head import ModesHead
    from farprop.wire.trace_head import TraceHead
    from tests.support.raw_messages import pack, pack_fork, pack_forks

    one, two = GlobalId(1, 2), GlobalId(3, 4)
    entry = Entry("w", 0, 2, "i", ("a", 1), "", "n", "h", 1, True, device_maps={"v": {"a": "b"}}).to_json().encode()
    data: list[Any] = [
        [1, 2.5, "text", b"bytes", None, True, 1 << 80, 1j, (1,), {2}, {"a": [3]}, torch.float32],
        torch.ones(3, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
    ]
    hello = b"FARPROP\n" + VERSION.to_bytes(2, "little") + bytes(32)
    span, operator = Span("pass", "p", 1, 0.0, 1.0, {"bytes": 3}), recording.Operator("aten::add", 1, 0.0, 1.0)
    share = CreditShare(Credit(3, 5), {1: (2, True), 7: (9, False)})
    found = {
        "frames": [
            b"\4" + pack(REQUEST, 0, 1, 1.5, b"m:f", b"meta") + pack(NOTICE, 0, 0, 0.0, b"", b"", (), [1, 2]),
            b"\2" + pack(ANSWER, REFS, 9, 0.0, b"", b"x" * 9, [(3, 0), (5, 7)]) + b"abc",
            b"\3" + pack(REQUEST, 0, 1, 0.0, b"", b"x" * 70_000),
        ],
        "messages": [
            b"\0" + bytes([REMOTE]) + pack_fork(Fork(1, one, two, True)) + b"\2\0ab",
            b"\0" + bytes([REFS]) + pack_forks([Fork(1, one, two, True)] * 3) + b"payload",
            b"\1" + bytes(26) + b"pickle",
            b"\1" + bytes(24) + b"\2\0" + bytes(16) + b"pickle",
            b"\2" + pack_share(share),
            b"\3" + PassHead(1, 2, PassId(0, 1), 1, True, False, False, share).pack(),
            b"\3"
            + PassHead(
                *(1, 0, PassId(0, 1), 1, False, False, False, share),
                Bundle([GradientPart(1, share, 2), GradientPart(3, share, 1)], Series(2, True)),
            ).pack(),
            b"\4" + pack_operations([Operation(OperationKind.REGISTER, one, two, True)] * 2),
            b"\5" + GradientAnswer([GradientPart(1, share, 2)], share).pack(),
            b"\6" + TraceHead({"with_stack": True}, {"traceparent": "00-1-2-01"}).pack(),
            b"\7" + recording.pack(recording.Begin("r", True, 9)),
            b"\x08" + recording.pack(recording.Recorded(0.0, 1.0, [span], 0, [operator], 0, ["why"], {1: "t"}, 1, 0.5)),
            b"\x09w1 failed first: ValueError: \x1b[31m\xff",
            b"\x0a" + ModesHead({"cpu": "bfloat16"}, True).pack(),
        ],
        "group_frames": [
            b"\3" + groups.HEARTBEAT + groups.pack(groups.FrameKind.MESSAGE, 1, "int8", 4) + b"data",
            b"\1"
            + groups.pack(groups.FrameKind.COLLECTIVE, 1, "barrier", 4)
            + b"data"
            + groups.pack(groups.FrameKind.GOODBYE, 0, "", 0),
            b"\2"
            + groups.pack(groups.FrameKind.FINGERPRINT, 5, "barrier", 0)
            + groups.pack(groups.FrameKind.GROUP_FAILED, 0, "E why", 0),
        ],
        "handshake": [side + hello + tail for side in (b"\0", b"\1") for tail in (b"", bytes(44))],
        "roster": [entry, b'{"problem": null, "workers": [' + entry + b"]}", b'["w", 0, "i", 5]'],
        "data_codec": [
            bytes([encoded.flags // FAST << 1 | is_call, 0]) + encoded.payload
            for value in data
            for is_call, encoded in ((0, encode_value(value)), (1, encode_call(None, (value, 1), {"a": value})))
        ],
    }
    return found[name]
