"""The format of every message that travels between two workers, except for the handshake and process groups.

A message is a header of fixed size, then a body, then the buffers that travel inline. The body holds, in this order:
the function's name, the numbers of the returned shared-memory segments, the table of buffers, the heads that the flags
announce (``REFS``, ``REMOTE``, ``CONTEXT``, ``TRACED``, ``RETURNS`` or ``MODES``, in this order), and the payload,
which a codec wrote.

Rules that hold here:

- ``Message.pack`` writes all of the body, and ``Message.parse_heads`` reads the heads once, when the message arrives.
- Garbage either parses or raises ``ProtocolError``, never anything else.
- Flags are plain integers in the code that every call runs through: an operation on an ``IntFlag`` is a Python call.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from farprop.errors import ProtocolError
from farprop.ids import GlobalId
from farprop.protocol.backward import ALL, NONE, Credit, CreditShare, PassId, Series, Statuses
from farprop.protocol.references.control_plane import Operation, OperationKind
from farprop.protocol.references.records import Fork, OwnedValue, ReturnedFork, UserReference
from farprop.wire.tensors import DeviceMapRequired


class Kind(enum.IntEnum):
    REQUEST = 1  # run a function or a method
    ANSWER = 2  # its value
    FAILURE = 3  # its exception
    NOTICE = 4  # not a call: returned segments; with FORGET, segments to unmap; with a payload, last words
    CANCEL = 5  # the caller does not want the answer to this call any more


class Flag(enum.IntFlag):
    # A request of farprop's own: not counted as work of the program. In a failure: farprop did not run the request.
    SYSTEM = 1
    TRACED = 2  # in a request: a ``TraceHead`` follows; in an answer: the record of a profile
    FORGET = 4  # in a notice: the numbers are segments that the sender dropped
    CUT = 4  # in others: a tensor was computed from what requires grad, and there is no autograd context
    FAST = 8  # fast_codec wrote the payload
    REFS = 16  # the message carries remote references
    REMOTE = 32  # a request of remote(): keep the value, under this reference
    CONTEXT = 64  # the message belongs to a distributed autograd context
    # In an answer: references that the callee borrowed, and has dropped. In a request, as MODES: a ``ModesHead``.
    RETURNS = 128


REQUEST, ANSWER, FAILURE, NOTICE, CANCEL = (int(kind) for kind in Kind)
SYSTEM, TRACED, FORGET, FAST, REFS, REMOTE, CONTEXT, RETURNS = (int(flag) for flag in Flag)
CUT = int(Flag.CUT)
MODES = RETURNS
ALL_FLAGS = sum(Flag)
HEADS = REFS | REMOTE | CONTEXT | TRACED | RETURNS


class Method(enum.Enum):
    """Farprop's own methods. Each travels as one byte in the place of a function's name."""

    CONTROL = b"\x01"  # a batch of operations on references
    FETCH = b"\x02"  # the value of a reference
    REF_BACKWARD = b"\x03"  # run a backward pass from it
    GRADIENTS = b"\x10"  # gradients of a backward pass
    RETURN_CREDIT = b"\x11"  # credit goes back to the pass's origin
    RELEASE = b"\x12"  # which of a blocked worker's sends are used
    SURVEY = b"\x13"  # which sends are reachable from these
    PASS_FAILED = b"\x14"  # to the origin: its pass failed
    ABORT = b"\x15"  # from the origin: undo the pass
    REACH = b"\x17"  # what each of these sends reaches, and whether an input of the pass is there
    PREPARE = b"\x18"  # what a worker has to do in a pass that computes the gradients of some inputs
    CONTEXT_EXISTS = b"\x16"  # to the creator of a context: does it still exist
    STREAM_OPEN = b"\x19"  # call a generator function, whose items follow
    STREAM_PULL = b"\x1a"  # the next items
    STREAM_CLOSE = b"\x1b"  # no more of them
    PARCEL = b"\x04"  # a parcel follows in chunks; the answer says who did not get it
    PARCEL_CHUNK = b"\x05"  # one of them
    PARCEL_SHARE = b"\x06"  # a whole parcel, in memory that several workers of the host have
    PARCEL_DROP = b"\x07"  # from its caller: a parcel will not come, and calls that wait for it are given up
    RECORD = b"\x1e"  # note what this worker does, for a profile
    INSPECT = b"\x1f"  # what does this worker do


# kind, flags, buffers, name length, returned segments, call id, seconds (0: no deadline), heads and payload
HEADER = struct.Struct("<BBHHHQdQ")
# length, segment (0: the bytes follow inline; or a number with one of the flags below)
BUFFER = struct.Struct("<QQ")
SHARED = 1 << 62  # several workers have this segment: who writes to it changes only what it sees itself
_IN_PARCEL = 1 << 63
PARCEL_NUMBERS = 1 << 30
IN_REQUEST = 0  # the number of a parcel that is the last buffer of the request itself; others begin with 1
PARCEL_ALIGNMENT = 64
MAX_BUFFERS = MAX_RETURNED = 0xFFFF
MAX_TIMEOUT = 10 * 366 * 86400.0
MAX_SECONDS = 2 * MAX_TIMEOUT  # a deadline also has the seconds since the host was started

_COUNT = struct.Struct("<I")
_FORK = struct.Struct("<HHQHQB")
_RETURNED = struct.Struct("<HQB")
_SITE_LENGTH = struct.Struct("<H")
_MAX_SITE = 0xFFFF
# context, message id (0: no tensor requires grad), number of tensors that do, length of the anomaly mode's trace,
# number of ended contexts, whose ids follow the trace
_AUTOGRAD = struct.Struct("<QQIIH")
MAX_ENDED = 64
_OVERHEAD = 1024  # memory that a request takes beside its bytes, at both ends, roughly
_OPERATION = struct.Struct("<BHQHQB")


class AutogradHead(NamedTuple):
    """The place of a message in a distributed autograd context."""

    context_id: int
    message_id: int
    """Torch's autograd message id, which pairs the send and the recv node of this message. 0 for none."""
    tensors: int
    """How many tensors of the message require grad."""
    call_trace: str
    """In anomaly mode, the stack trace of the call."""
    ended: Sequence[int] = ()
    """In a request, the ids of contexts that have ended; at most ``MAX_ENDED``."""


class Creation(NamedTuple):
    """The head of a ``remote()`` request: the reference under which the callee keeps the value."""

    fork: Fork
    site: bytes
    """The line of the program that called ``remote()``."""


class ReceivedRefs(NamedTuple):
    """The references of a message, as the receiver's runtime resolved them."""

    creation: OwnedValue | None
    """The slot for the value of a ``remote()`` call; None for other calls, and for one that was recalled."""
    items: Sequence[object]
    """For each reference a handle, or the value's record if this worker owns it. The decoder finds them by index."""
    borrowed: Sequence[UserReference] = ()
    """Of a request: the references that are borrowed until it is answered."""


class ParcelPart(NamedTuple):
    """A buffer of a request whose bytes come with a parcel of the same caller: ``IN_REQUEST``, or another one."""

    number: int
    offset: int
    nbytes: int

    @property
    def row(self) -> tuple[int, int]:
        """Its row in the table of buffers."""
        return self.nbytes, _IN_PARCEL | self.number << 32 | self.offset // PARCEL_ALIGNMENT

    @classmethod
    def of(cls, segment: int, length: int) -> ParcelPart | None:
        """Read a row; None if it is that of a segment."""
        if not segment & _IN_PARCEL:
            return None
        return cls(segment >> 32 & PARCEL_NUMBERS - 1, (segment & 0xFFFFFFFF) * PARCEL_ALIGNMENT, length)


def is_in_request(segment: int) -> bool:
    """Whether a row of the table of buffers is of a part of the request's last buffer, where its bytes count."""
    return bool(segment & _IN_PARCEL) and segment >> 32 & PARCEL_NUMBERS - 1 == IN_REQUEST


class Message:
    """One message, sent or received.

    To send one, a codec makes it with a payload, the runtime fills in the other fields, and ``pack`` writes it. A
    ``FrameReader`` makes one from received bytes.

    ``buffers`` holds memory; as read from the stream, it holds pairs of a segment's number and a length. Those of a
    request may be ``ParcelPart``. ``keep`` keeps the buffers' memory alive until they are sent. ``seconds`` is the time
    that a request may take or, if both ends have the same monotonic clock, its deadline; None if it has none.
    ``out_of_band`` are the objects that the codec found and that travel as ``refs``. The receiver's runtime resolves
    ``refs`` and ``creation`` into ``received_refs``. ``returned`` are borrowed references that an answer gives back.
    """

    __slots__ = (
        "arrived",
        "autograd",
        "buffers",
        "call_id",
        "creation",
        "flags",
        "function_name",
        "keep",
        "kind",
        "modes",
        "name",
        "out_of_band",
        "payload",
        "received_refs",
        "record",
        "refs",
        "returned",
        "returned_segments",
        "seconds",
        "sent",
        "trace",
    )

    function_name: bytes
    """What inspection shows for a function that travels without a name. Not set for others, and never sent."""
    modes: bytes | memoryview
    """A request's packed ``ModesHead``. Set only with the flag ``MODES``."""
    arrived: float
    """When a request was read. Set only while somebody listens to events."""

    def __init__(
        self,
        payload: bytes | memoryview,
        buffers: list[Any],
        keep: object = None,
        flags: int = 0,
        out_of_band: Sequence[Any] = (),
        kind: int = REQUEST,
        call_id: int = 0,
        seconds: float | None = None,
        name: bytes = b"",
        returned_segments: Sequence[int] = (),
    ) -> None:
        self.payload = payload
        self.buffers = buffers
        self.keep = keep
        self.flags = flags
        self.out_of_band = out_of_band
        self.kind = kind
        self.call_id = call_id
        self.seconds = seconds
        self.name = name
        self.returned_segments = returned_segments
        self.refs: Sequence[Fork] = ()
        self.returned: Sequence[ReturnedFork] = ()
        self.creation: Creation | None = None
        self.autograd: AutogradHead | None = None
        self.trace: bytes | memoryview = b""
        self.received_refs: ReceivedRefs | None = None
        self.sent = False  # True once some of its bytes may have been sent
        self.record: Any = None  # of a request that somebody listens to: its ``CallRecord``

    @property
    def nbytes(self) -> int:
        """The bytes of the payload and the buffers."""
        size = len(self.payload)
        buffers = self.buffers
        if buffers:
            size += sum([buffer.nbytes for buffer in buffers])
            if type(buffers[0]) is ParcelPart or type(buffers[-1]) is not memoryview:
                size -= sum([b.nbytes for b in buffers if type(b) is ParcelPart and b.number == IN_REQUEST])
        return size

    @property
    def memory(self) -> int:
        """The bytes that a request takes while it waits, roughly."""
        return _OVERHEAD + (self.nbytes if self.buffers else len(self.payload))

    @property
    def is_heartbeat(self) -> bool:
        """Whether it is a notice of nothing: the other host was asked whether it still answers."""
        return self.kind == NOTICE and not self.flags and not self.returned_segments

    def pack(self, table: Sequence[tuple[int, int]] = (), returned: Sequence[int] = ()) -> bytes:
        """Write the message, except for its inline buffers.

        Args:
            table: for each buffer its length and its segment (0: it follows inline).
            returned: numbers of segments to give back.

        Returns:
            The header and the body.
        """
        payload, name, flags = self.payload, self.name, self.flags
        if flags & HEADS:
            payload = self._pack_heads() + payload
        header = HEADER.pack(
            self.kind, flags, len(table), len(name), len(returned), self.call_id, self.seconds or 0.0, len(payload)
        )
        if not table and not returned:
            return header + name + payload
        rows = [BUFFER.pack(*row) for row in table]
        return b"".join((header, name, struct.pack(f"<{len(returned)}I", *returned), *rows, payload))

    def _pack_heads(self) -> bytes:
        parts: list[bytes | memoryview] = []
        if self.flags & REFS:
            parts.append(_COUNT.pack(len(self.refs)))
            parts += [_pack_fork(fork) for fork in self.refs]
        if self.creation is not None:
            site = self.creation.site[:_MAX_SITE]
            parts += (_pack_fork(self.creation.fork), _SITE_LENGTH.pack(len(site)), site)
        if self.autograd is not None:
            context_id, message_id, tensors, call_trace, ended = self.autograd
            trace = call_trace.encode() if call_trace else b""
            parts += (_AUTOGRAD.pack(context_id, message_id, tensors, len(trace), len(ended)), trace)
            if ended:
                parts.append(struct.pack(f"<{len(ended)}Q", *ended))
        if self.flags & TRACED:
            parts += (_COUNT.pack(len(self.trace)), self.trace)
        if self.flags & MODES and self.kind == REQUEST:
            parts += (_COUNT.pack(len(self.modes)), self.modes)
        elif self.flags & RETURNS:
            parts.append(_COUNT.pack(len(self.returned)))
            parts += [_RETURNED.pack(*fork, orphans) for fork, orphans in self.returned]
        return b"".join(parts)

    def parse_heads(self) -> None:
        """Read the heads that the flags announce, and strip them from ``payload``."""
        flags = self.flags
        if not flags & HEADS or self.kind == FAILURE:
            return
        data = memoryview(self.payload)
        at = 0
        try:
            if flags & REFS:
                (count,) = _COUNT.unpack_from(data)
                end = _COUNT.size + count * _FORK.size
                if end > len(data):
                    raise ProtocolError(f"a message says that it has {count} references, and is too short for them")
                self.refs = [_fork_of(*row) for row in _FORK.iter_unpack(data[_COUNT.size : end])]
                at = end
            if flags & REMOTE:
                fork = _fork_of(*_FORK.unpack_from(data, at))
                (length,) = _SITE_LENGTH.unpack_from(data, at + _FORK.size)
                at += _FORK.size + _SITE_LENGTH.size
                self.creation = Creation(fork, bytes(data[at : at + length]))
                at += length
            if flags & CONTEXT:
                context_id, message_id, tensors, length, count = _AUTOGRAD.unpack_from(data, at)
                at += _AUTOGRAD.size
                trace = bytes(data[at : at + length]).decode(errors="replace") if length else ""
                at += length
                ended: Sequence[int] = ()
                if count:
                    if count > MAX_ENDED:
                        raise ProtocolError(f"a message says that {count} contexts have ended, more than {MAX_ENDED}")
                    ended = struct.unpack_from(f"<{count}Q", data, at)
                    at += 8 * count
                self.autograd = AutogradHead(context_id, message_id, tensors, trace, ended)
            if flags & TRACED:
                (length,) = _COUNT.unpack_from(data, at)
                at += _COUNT.size
                self.trace = data[at : at + length]
                at += length
            if flags & MODES and self.kind == REQUEST:
                (length,) = _COUNT.unpack_from(data, at)
                at += _COUNT.size
                self.modes = data[at : at + length]
                at += length
            elif flags & RETURNS:
                at = self._parse_returned(data, at)
        except struct.error as error:
            raise ProtocolError(f"the heads of a message are too short: {error}") from error
        if at > len(data):
            raise ProtocolError("a message is shorter than its heads say")
        self.payload = data[at:]

    def _parse_returned(self, data: memoryview, at: int) -> int:
        if self.kind != ANSWER:
            raise ProtocolError("a message that is no answer gives references back")
        (count,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        end: int = at + count * _RETURNED.size
        if end > len(data):
            raise ProtocolError(f"an answer says that it gives {count} references back, and is too short for them")
        rows = _RETURNED.iter_unpack(data[at:end])
        self.returned = [ReturnedFork(GlobalId(fork_on, fork), bool(orphans)) for fork_on, fork, orphans in rows]
        return end


def check_header(kind: int, flags: int, seconds: float) -> None:
    """Raises ``ProtocolError`` for a header that no worker writes."""
    if not REQUEST <= kind <= CANCEL or flags & ~ALL_FLAGS:
        raise ProtocolError(f"unknown message kind {kind} or flags {flags:#x}")
    if not 0.0 <= seconds <= MAX_SECONDS:
        raise ProtocolError(f"a deadline of {seconds} seconds makes no sense")


def notice(returned: Sequence[int] = (), flags: int = 0) -> bytes:
    """Pack a notice of returned segments or, with ``FORGET``, of dropped ones."""
    return Message(b"", [], flags=flags, kind=NOTICE).pack((), returned)


def last_words(text: str) -> Message:
    """A notice of a process that fails: who failed first, and with what."""
    return Message(text.encode(errors="replace"), [], flags=SYSTEM, kind=NOTICE)


def cancel(call_id: int) -> Message:
    """The caller of a call has cancelled it."""
    return Message(b"", [], kind=CANCEL, call_id=call_id)


# References


_EXISTS, _LENT = 1, 2


def _pack_fork(fork: Fork) -> bytes:
    return _FORK.pack(fork.owner, *fork.rref, *fork.fork, _EXISTS * fork.exists | _LENT * fork.lent)


def _fork_of(owner: int, rref_on: int, rref: int, fork_on: int, fork: int, flags: int) -> Fork:
    return Fork(owner, GlobalId(rref_on, rref), GlobalId(fork_on, fork), bool(flags & _EXISTS), bool(flags & _LENT))


def pack_operations(operations: Sequence[Operation]) -> bytes:
    return b"".join([_OPERATION.pack(kind, *rref, *fork, flag) for kind, rref, fork, flag in operations])


def unpack_operations(data: bytes) -> tuple[Operation, ...]:
    try:
        return tuple(
            Operation(OperationKind(kind), GlobalId(rref_on, rref), GlobalId(fork_on, fork), bool(flag))
            for kind, rref_on, rref, fork_on, fork, flag in _OPERATION.iter_unpack(data)
        )
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"a batch of operations on references makes no sense: {error}") from error


# Backward passes

# context, message id, origin, number, the origin's oldest running pass, flags; a credit share follows or, with
# _BUNDLED, a place in a series and parts
_PASS = struct.Struct("<QQHQQB")
# level of the credit, length of its parts, number of statuses; an empty share stands for all of the credit
_SHARE = struct.Struct("<IHH")
_STATUS = struct.Struct("<HIB")
# message id, number of gradients, length of the credit share
_PART = struct.Struct("<QIH")
_DEEPEST = 1 << 18  # the highest accepted level of a credit: half of the format's limit, so that it can be split
# how many messages follow, whether this one was announced
_SERIES = struct.Struct("<HB")
_FAST_MODE, _KEEP_GRAPH, _ANOMALY, _BUNDLED, _CREATE_GRAPH = 1, 2, 4, 8, 16
# In bytes. A smaller one is made contiguous and gets its own memory, because the fast codec takes no others.
_SMALL_GRADIENT = 16 * 1024

Gradient = torch.Tensor | None


class GradientPart(NamedTuple):
    """Gradients for one of the sends of the worker that a message goes to."""

    message_id: int
    share: CreditShare
    gradients: int
    """How many of the payload's gradients belong to this part."""


class Bundle(NamedTuple):
    """The gradients of a message that has them for several sends, or belongs to a series."""

    parts: Sequence[GradientPart]
    series: Series


class PassHead(NamedTuple):
    """The head of every message of a backward pass."""

    context_id: int
    message_id: int
    """The id of the forward message that the gradients belong to; 0 without gradients."""
    pass_id: PassId
    oldest: int
    """The number of the origin's oldest pass in this context that still runs."""
    fast: bool
    keep_graph: bool
    anomaly: bool
    share: CreditShare
    bundle: Bundle | None = None
    """If there is one, it has the messages' ids and the credit."""
    create_graph: bool = False
    """Whether the pass is recorded, so that its gradients can be differentiated."""

    def pack(self) -> bytes:
        context_id, message_id, (origin, number), oldest, fast, keep_graph, anomaly, share, bundle, create_graph = self
        flags = _FAST_MODE * fast | _KEEP_GRAPH * keep_graph | _ANOMALY * anomaly | _CREATE_GRAPH * create_graph
        if bundle is not None:
            head = _PASS.pack(context_id, 0, origin, number, oldest, flags | _BUNDLED)
            return b"".join((head, _SERIES.pack(*bundle.series), *_pack_parts(bundle.parts)))
        head = _PASS.pack(context_id, message_id, origin, number, oldest, flags)
        return head if share is ALL else head + pack_share(share)

    @classmethod
    def parse(cls, data: bytes) -> PassHead:
        try:
            context_id, message_id, origin, number, oldest, flags = _PASS.unpack_from(data)
        except struct.error as error:
            raise _nonsense(error) from error
        bundle = None
        if flags & _BUNDLED:
            share, bundle = CreditShare(NONE, {}), _unpack_bundle(data)
        else:
            share = ALL if len(data) == _PASS.size else unpack_share(data[_PASS.size :])
        fast, keep_graph, anomaly = bool(flags & _FAST_MODE), bool(flags & _KEEP_GRAPH), bool(flags & _ANOMALY)
        pass_id, create_graph = PassId(origin, number), bool(flags & _CREATE_GRAPH)
        return cls(context_id, message_id, pass_id, oldest, fast, keep_graph, anomaly, share, bundle, create_graph)


class GradientAnswer(NamedTuple):
    """The head of the answer to ``Method.GRADIENTS``. The payload holds the gradients of all parts."""

    parts: Sequence[GradientPart]
    credit: CreditShare | None
    """The credit that returns to the origin, which is the caller."""

    def pack(self) -> bytes:
        rows = _pack_parts(self.parts)
        if self.credit is not None:
            rows += (b"\x01", pack_share(self.credit))
        return b"".join(rows)

    @classmethod
    def parse(cls, data: bytes) -> GradientAnswer:
        parts, at = _unpack_parts(data, 0)
        return cls(parts, None if at == len(data) else unpack_share(data[at + 1 :]))


def _pack_parts(parts: Sequence[GradientPart]) -> list[bytes]:
    rows = [_COUNT.pack(len(parts))]
    for message_id, share, gradients in parts:
        packed = b"" if share is ALL else pack_share(share)
        rows += (_PART.pack(message_id, gradients, len(packed)), packed)
    return rows


def _unpack_parts(data: bytes, at: int) -> tuple[list[GradientPart], int]:
    """The parts that begin at a place of ``data``, and the place after them."""
    parts: list[GradientPart] = []
    try:
        (count,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        for _ in range(count):
            message_id, gradients, length = _PART.unpack_from(data, at)
            at += _PART.size
            parts.append(GradientPart(message_id, unpack_share(data[at : at + length]), gradients))
            at += length
    except struct.error as error:
        raise _nonsense(error) from error
    if at > len(data):
        raise _nonsense("it is too short")
    return parts, at


def _unpack_bundle(data: bytes) -> Bundle:
    try:
        following, announced = _SERIES.unpack_from(data, _PASS.size)
    except struct.error as error:
        raise _nonsense(error) from error
    parts, at = _unpack_parts(data, _PASS.size + _SERIES.size)
    if at != len(data):
        raise _nonsense("it is too long")
    return Bundle(parts, Series(following, bool(announced)))


def encode_gradients(encode_call: Callable[..., Message], head: bytes, gradients: Sequence[Gradient]) -> Message:
    """Encode a head and gradients.

    A gradient that occurs twice (``a + b`` has one for both) is sent once.
    Its second place has the number of the first.
    """
    items: list[Any] = [head]
    places: dict[int, int] = {}
    several = len(gradients) > 1
    for place, gradient in enumerate(gradients):
        if gradient is None:
            items.append(None)
            continue
        first = places.setdefault(id(gradient), place)
        if first != place:
            items.append(first)
        elif gradient.layout is torch.strided and gradient.nbytes <= _SMALL_GRADIENT:
            if not gradient.is_contiguous():
                gradient = gradient.contiguous()  # such as the expanded gradient of sum()
            elif several and gradient.untyped_storage().nbytes() > gradient.nbytes:
                gradient = gradient.clone()  # such as those of cat(), which share their memory
            items.append(gradient)
        else:
            items.append(gradient)
    try:
        return encode_call(None, tuple(items), {})
    except DeviceMapRequired:
        # Gradients travel as copies on the CPU. The receiver moves them to the devices of its tensors.
        on_cpu = [item.cpu() if isinstance(item, torch.Tensor) else item for item in items]
        return encode_call(None, tuple(on_cpu), {})


def gradients_of(items: Sequence[Any]) -> Sequence[Gradient]:
    """The gradients of a message, of what was decoded after its head."""
    if int not in map(type, items):
        return items
    gradients: list[Gradient] = []
    for item in items:
        if type(item) is int:
            item = gradients[item] if 0 <= item < len(gradients) else None
            if item is None:
                raise ProtocolError("a message of a backward pass refers to a gradient that it does not have")
        gradients.append(item)
    return gradients


def pack_share(share: CreditShare) -> bytes:
    if share == ALL:
        return b""
    credit, statuses = share
    parts = credit.parts.to_bytes((credit.parts.bit_length() + 7) // 8, "little")
    rows = [_STATUS.pack(worker, number, blocked) for worker, (number, blocked) in statuses.items()]
    return b"".join((_SHARE.pack(credit.level, len(parts), len(statuses)), parts, *rows))


def unpack_share(data: bytes) -> CreditShare:
    if not data:
        return ALL
    try:
        level, size, count = _SHARE.unpack_from(data)
        at = _SHARE.size + size
        parts = int.from_bytes(data[_SHARE.size : at], "little")
        # The level is the size in bits of the integers that are computed from it.
        if level > _DEEPEST or parts.bit_length() > level + 1:
            raise struct.error(f"a share of {parts.bit_length()} bits at level {level}")
        statuses: Statuses = {}
        for _ in range(count):
            worker, statement, blocked = _STATUS.unpack_from(data, at)
            statuses[worker] = statement, bool(blocked)
            at += _STATUS.size
        if at != len(data):
            raise struct.error(f"expected {at} bytes, got {len(data)}")
    except struct.error as error:
        raise _nonsense(error) from error
    return CreditShare(Credit(parts, level), statuses)


def _nonsense(why: object) -> ProtocolError:
    return ProtocolError(f"a message of a backward pass makes no sense: {why}")
