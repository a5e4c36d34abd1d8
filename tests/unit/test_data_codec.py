"""The codec of restricted jobs: values come back as they were, and no bytes do harm."""

from __future__ import annotations

import math
import os
import pickle
import random
from collections import OrderedDict
from typing import Any

import msgspec
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farprop.errors import FarpropError, NotDataError, NotExposedError, ProtocolError, RemoteError
from farprop.wire import data_codec, exposed
from farprop.wire.codec import decode_with
from farprop.wire.data_codec import (
    MAX_DEPTH,
    decode_call,
    decode_failure,
    decode_value,
    encode_call,
    encode_failure,
    encode_value,
)
from farprop.wire.message import FAST, Message
from farprop.wire.tensors import DTYPES
from tests.security.functions import Point, Unknown, add

pack = msgspec.msgpack.encode


def _copied_buffers(encoded: Message) -> list[bytearray]:
    """Copies of the buffers, as a receiver has them."""
    return [bytearray(buffer) for buffer in encoded.buffers]


def _round_trip(value: Any) -> Any:
    encoded = encode_value(value)
    return decode_value(encoded.payload, _copied_buffers(encoded), encoded.flags)


def _decoded(item: Any, buffers: Any = ()) -> Any:
    return decode_value(pack(item), buffers, 0)


# Values

atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.binary().map(bytearray)
    | st.lists(st.integers(0, 9)).map(torch.Size)
    | st.sampled_from([dtype for dtype in DTYPES if dtype is not None])
    | st.sampled_from(["cpu", "cuda", "cuda:3", "meta"]).map(torch.device)
)
keys = st.recursive(atoms.filter(lambda key: type(key) is not bytearray), lambda inner: st.tuples(inner, inner))
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(keys)
        | st.frozensets(keys)
        | st.builds(Point, st.integers(14, 99), inner)
    ),
    max_leaves=20,
)


@given(values)
@settings(deadline=None)
def test_values_round_trip(value: Any) -> None:
    came = _round_trip(value)
    if type(value) in (set, frozenset):  # their order may differ
        assert type(came) is type(value)
        assert came == value
    else:
        assert came == value
        assert type(came) is type(value)


@given(st.lists(values, max_size=4), st.dictionaries(st.text(), values, max_size=3))
@settings(deadline=None)
def test_calls_round_trip(args: list[Any], kwargs: dict[str, Any]) -> None:
    encoded = encode_call(None, tuple(args), kwargs)
    came = decode_call(encoded.payload, _copied_buffers(encoded), encoded.flags)
    assert (list(came[0]), came[1]) == (args, kwargs)


def test_nan_infinity_and_large_integers_round_trip() -> None:
    assert math.isnan(_round_trip(math.nan))
    assert _round_trip(-math.inf) == -math.inf
    for number in (2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**10_000):
        assert _round_trip(number) == number
        assert _round_trip([number]) == [number]
    assert [type(value) for value in _round_trip([True, 1, 1.0])] == [bool, int, float]


class _Text(str):
    pass


class _Tensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        numpy.float64(1),
        numpy.ones(2),
        _Text("x"),
        OrderedDict(),
        range(3),
        Unknown(1),
        Point(1, object()),
        lambda: 1,
        [].append,
        torch.nn.Linear(1, 1),
        torch.ones(2, device="meta"),
        torch.ones(2).as_subclass(_Tensor),
        Exception("x"),
        torch.qint8,
        "\ud800",
        2 ** (1 << 20),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_are_not_data_are_refused(value: Any) -> None:
    with pytest.raises(NotDataError):
        encode_value(value)
    with pytest.raises(NotDataError):
        encode_call(None, (value,), {})
    with pytest.raises(NotDataError):
        encode_call(None, (), {"name": [value]})


def test_too_deep_or_recursive_values_are_refused() -> None:
    value: Any = []
    for _ in range(MAX_DEPTH):
        value = [value]
    assert _round_trip(value) == value
    with pytest.raises(NotDataError, match="nested 100 deep"):
        encode_value([value])
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotDataError, match="not contain itself"):
        encode_value(endless)


# Tensors


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype is not None], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3), (200, 300)], ids=str)
def test_dense_tensors_of_all_dtypes_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape) * dtype.itemsize
    raw = bytearray(os.urandom(count)) if dtype is not torch.bool else bytearray(n % 2 for n in range(count))
    tensor = torch.frombuffer(raw, dtype=dtype) if count else torch.empty(0, dtype=dtype)
    tensor.resize_(shape)
    came = _round_trip(tensor)
    assert (came.dtype, came.shape, came.requires_grad) == (dtype, tensor.shape, False)
    assert came.is_contiguous()
    if count:
        assert bytes(came.untyped_storage()[:count]) == bytes(raw)


def test_views_conjugates_parameters_and_repeated_tensors() -> None:
    large = torch.randn(200, 200)
    for tensor in (large.t(), large[::2, 3:], large.expand(2, 200, 200), torch.ones(2, dtype=torch.complex64).conj()):
        assert torch.equal(_round_trip(tensor), tensor)
    complex_numbers = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(_round_trip(complex_numbers.conj().imag), complex_numbers.conj().imag)
    leaf = torch.ones(2, requires_grad=True)
    for tensor in (leaf, leaf * 2, torch.nn.Parameter(torch.ones(2))):
        came = _round_trip(tensor)
        assert came.requires_grad
        assert came.is_leaf
        assert type(came) is torch.Tensor
    encoded = encode_value([large, large, (large, leaf, leaf)])
    assert len(encoded.buffers) == 1
    first, second, (third, fourth, fifth) = decode_value(encoded.payload, _copied_buffers(encoded), 0)
    assert first is second is third
    assert fourth is fifth
    first.add_(1)  # the receiver may write to it


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("coalesced", [False, True])
def test_sparse_tensors_round_trip(requires_grad: bool, coalesced: bool) -> None:
    indices = torch.tensor([[0, 1, 1], [2, 0, 0]])
    tensor = torch.sparse_coo_tensor(indices, torch.randn(3, 2), (2, 3, 2), check_invariants=True)
    tensor = (tensor.coalesce() if coalesced else tensor).requires_grad_(requires_grad)
    came = _round_trip(tensor)
    assert (came.layout, came.shape, came.requires_grad) == (torch.sparse_coo, tensor.shape, requires_grad)
    assert came.is_coalesced() is coalesced
    assert torch.equal(came.detach().to_dense(), tensor.detach().to_dense())
    rows = torch.randn(3, 4).relu().to_sparse_csr().requires_grad_(requires_grad)
    came = _round_trip(rows)
    assert (came.layout, came.shape, came.requires_grad) == (torch.sparse_csr, rows.shape, requires_grad)
    assert torch.equal(came.detach().to_dense(), rows.detach().to_dense())
    assert _round_trip(torch.empty(0, 4).to_sparse()).shape == (0, 4)


def test_both_ends_list_tensors_that_require_grad_in_the_same_order() -> None:
    tensors = [torch.full((n + 1,), float(n), requires_grad=True) for n in range(6)]
    value = [tensors[3], {"a": tensors[1], "b": (torch.ones(1), tensors[0], tensors[3])}, Point(1, tensors[2])]
    graph: list[torch.Tensor] = [torch.ones(1)]  # left over from a failed attempt
    encoded = encode_call(None, (tensors[5], value), {"last": tensors[4]}, graph)
    assert [id(t) for t in graph] == [id(tensors[n]) for n in (5, 3, 1, 0, 2, 4)]
    noted: list[torch.Tensor] = []
    decode_with((), noted, decode_call, encoded.payload, _copied_buffers(encoded), encoded.flags)
    assert [len(t) - 1 for t in noted] == [5, 3, 1, 0, 2, 4]


# Names


def test_functions_and_classes_are_sent_by_name() -> None:
    assert _round_trip(add) is add
    assert _round_trip([Point, torch.mul]) == [Point, torch.mul]
    for hidden in (os.system, print, torch.add, Unknown, eval):
        with pytest.raises(NotExposedError, match="which is not exposed"):
            _round_trip(hidden)
    for name in (b"os:system", b"builtins:eval", b"\xff", b"", "text", 5, None):
        for tag in (data_codec.EXPOSED, data_codec.DATACLASS):
            with pytest.raises(FarpropError):
                _decoded([tag, name])
    with pytest.raises(ProtocolError, match="no dataclass"):
        _decoded([data_codec.DATACLASS, exposed.name_of(add)])
    name = exposed.name_of(Point)
    for fields in (["x"], ["x", "z", 1, 2], ["y", "x", 1, 2], ["x", "y", 1], ["x", "y", 1, 2, 3], ["x", "y", 13, 2]):
        with pytest.raises(ProtocolError):
            _decoded([data_codec.DATACLASS, name, *fields])
    assert _decoded([data_codec.DATACLASS, name, "x", "y", 1, 2]) == Point(1, 2)


# What a peer might send

_FLOAT = 0  # the code of float32
_BIG = 1 << 62


@pytest.mark.parametrize(
    "item",
    [
        [],
        [99],
        [-1],
        [True],
        ["x"],
        [[]],
        {},
        {"a": 1},
        [0, {}],
        [2, 1],
        [2, [0], 1],
        [3, [0, 1]],
        [4, [2]],
        [5],
        [5, 1],
        [5, b"x" * (1 << 17)],
        [6, 1.0],
        [6, 1, 2],
        [7, "x"],
        [9, 0],
        [9, -1],
        [12, -1],
        [12, _BIG],
        [12, "x"],
        [13, 1000],
        [13, -1],
        [14, "nonsense", None],
        [14, "cpu", -1],
        [14, "cuda", 1000],
        [14, [], None],
        [14, "cpu"],
        [16, 0],
        [16, -1],
        [16, "x"],
        msgspec.msgpack.Ext(5, b"x"),
        # dense tensors
        [8],
        [8, b"", _FLOAT, [1], False],
        [8, b"1234", _FLOAT, [2], False],
        [8, b"12345678", _FLOAT, [1], False],
        [8, b"1234", _FLOAT, [-1], False],
        [8, b"1234", _FLOAT, [-1, -1], False],
        [8, b"1234", _FLOAT, [True], False],
        [8, b"1234", _FLOAT, [1.0], False],
        [8, b"1234", _FLOAT, 1, False],
        [8, b"1234", _FLOAT, [1] * 1000, False],
        [8, b"1234", "float32", [1], False],
        [8, b"1234", 1000, [1], False],
        [8, b"1234", -1, [1], False],
        [8, b"1234", True, [1], False],
        [8, b"1234", _FLOAT, [1], 1],
        [8, b"1234", _FLOAT, [1], False, 0],
        [8, "1234", _FLOAT, [1], False],
        [8, 0, _FLOAT, [1], False],
        [8, -1, _FLOAT, [1], False],
        [8, b"", _FLOAT, [0, _BIG, _BIG], False],
        [8, b"", _FLOAT, [0, -1], False],
        [8, b"\x02", 15, [1], False],  # neither true nor false
        [8, b"12345678", 10, [1], True],  # integers cannot require grad
    ],
    ids=lambda item: repr(item)[:30],
)
def test_nonsense_is_a_protocol_error(item: Any) -> None:
    with pytest.raises(ProtocolError):
        _decoded(item)
    with pytest.raises(ProtocolError):
        decode_call(pack([item]), (), FAST)
    with pytest.raises(ProtocolError):
        decode_call(pack([[], ["name", item]]), (), 0)


def _dense(tensor: torch.Tensor) -> list[Any]:
    return [*data_codec.WrittenTensors().write(tensor), False]


@pytest.mark.parametrize(
    ("indices", "shape"),
    [
        (torch.tensor([[5]]), [2]),
        (torch.tensor([[-1]]), [2]),
        (torch.tensor([[0, 1]]), [2]),  # more than there are values
        (torch.tensor([[0.0]]), [2]),
        (torch.tensor([0]), [2]),
        (torch.tensor([[0]]), [2, 3]),
        (torch.tensor([[0]]), [_BIG, _BIG]),
        (torch.tensor([[0]]), [-2]),
        (torch.tensor([[0]]), "x"),
        (torch.tensor([[0], [2**40]]), [2, 3]),
    ],
    ids=str,
)
def test_invalid_sparse_indices_are_refused(indices: torch.Tensor, shape: Any) -> None:
    values = _dense(torch.ones(1))
    for coalesced in (False, True):
        with pytest.raises(ProtocolError):
            _decoded([data_codec.COO, _dense(indices), values, shape, coalesced, False])


@pytest.mark.parametrize(
    ("rows", "columns"),
    [([0, 1, 5], [0]), ([0, 1, 1], [7]), ([0, 1, 1], [-1]), ([1, 0, 1], [0]), ([0, 1], [0]), ([0, -1, 1], [0])],
)
def test_invalid_csr_indices_are_refused(rows: list[int], columns: list[int]) -> None:
    parts = [_dense(torch.tensor(rows)), _dense(torch.tensor(columns)), _dense(torch.ones(1))]
    with pytest.raises(ProtocolError):
        _decoded([data_codec.CSR, *parts, [2, 3], False])
    good = [_dense(torch.tensor([0, 1, 1])), _dense(torch.tensor([2])), _dense(torch.ones(1))]
    assert _decoded([data_codec.CSR, *good, [2, 3], False]).to_dense().tolist() == [[0, 0, 1], [0, 0, 0]]
    for part in (None, [], [b"", 0, [0], True], "x"):
        with pytest.raises(ProtocolError):
            _decoded([data_codec.CSR, part, *good[1:], [2, 3], False])


def test_pickles_are_refused_and_named_in_the_error(tmp_path: Any) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "boom"), "w")

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        bomb = pickle.dumps(((Bomb(),), {}), protocol)
        for flags in (0, FAST):
            with pytest.raises(ProtocolError, match="pickle" if protocol > 1 else None):
                decode_call(bomb, (), flags)
            with pytest.raises(ProtocolError):
                decode_value(bomb, (), flags)
        assert isinstance(decode_failure(bomb), ProtocolError)
    with pytest.raises(ProtocolError):
        data_codec.refuse(bomb, ())
    assert not (tmp_path / "boom").exists()


def test_deep_nesting_is_refused() -> None:
    for opening in (b"\x91", b"\x92\x00", b"\x92\x01", b"\xdd\x00\x00\x00\x02\x00", b"\x81"):
        for depth in (200, 2_000, 100_000):
            for meta in (opening * depth, opening * depth + b"\x90"):
                with pytest.raises(ProtocolError):
                    decode_value(meta, (), 0)


def test_lengths_beyond_the_message_allocate_nothing() -> None:
    for meta in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            decode_value(meta, (), 0)
        with pytest.raises(ProtocolError):
            decode_value(b"\x92\x00" + meta, (), 0)


def _decodes_or_raises_typed_error(meta: bytes, buffers: list[bytearray]) -> None:
    for decode, flags in ((decode_call, 0), (decode_call, FAST), (decode_value, 0)):
        try:
            decode(meta, buffers, flags)
        except FarpropError:
            pass
    assert isinstance(decode_failure(meta), Exception)


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=500)
def test_any_bytes_decode_or_raise_a_typed_error(meta: bytes) -> None:
    _decodes_or_raises_typed_error(meta, [])


raw = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.integers(0, 20) | st.floats() | st.text()
    | st.binary(max_size=40) | st.sampled_from([b"tests.security.functions:Point", b"torch:mul", b"os:system", "x"]),
    lambda inner: st.lists(inner, max_size=6) | st.builds(lambda tag, rest: [tag, *rest], st.integers(0, 18),
        st.lists(inner, max_size=6)) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=25,
)  # fmt: skip


@given(raw)
@settings(deadline=None, max_examples=1500)
def test_any_message_pack_decodes_or_raises_a_typed_error(item: Any) -> None:
    _decodes_or_raises_typed_error(pack(item), [bytearray(8), bytearray(0), bytearray(40_000)])


_SAMPLES: list[Any] = [
    [torch.randn(3, 4), torch.tensor([True, False]), torch.arange(5), torch.randn(120, 120)],
    torch.sparse_coo_tensor(torch.tensor([[0, 1], [2, 0]]), torch.ones(2), (2, 3), check_invariants=True),
    torch.eye(3).to_sparse_csr(),
    {"a": (1, 2.5, None, 1j), Point(1): frozenset((1, 2)), 2**80: bytearray(b"x")},
    [torch.Size((1, 2)), torch.float64, torch.device("cpu", 0), add, Point],
]


@given(st.integers(0, 2**32), st.integers(1, 6))
@settings(deadline=None, max_examples=1500)
def test_corrupted_messages_decode_or_raise_a_typed_error(seed: int, flips: int) -> None:
    chance = random.Random(seed)
    encoded = encode_value(chance.choice(_SAMPLES))
    meta = bytearray(encoded.payload)
    for _ in range(flips):
        place = chance.randrange(len(meta))
        what = chance.random()
        if what < 0.6:
            meta[place] = chance.choice((chance.randrange(256), (meta[place] + 1) % 256, 0, 0xFF, 0x90, 0xC0))
        elif what < 0.8:
            del meta[place : place + chance.randrange(1, 5)]
        else:
            meta[place:place] = chance.randbytes(chance.randrange(1, 5))
        if not meta:
            break
    buffers = _copied_buffers(encoded)
    if chance.random() < 0.3:
        buffers = [buffer[: chance.randrange(len(buffer))] for buffer in buffers]
    try:
        value = decode_value(bytes(meta), buffers, 0)
    except FarpropError:
        return
    try:
        repr(value)  # reads the elements of tensors
    except NotImplementedError:
        pass  # torch can't show all dtypes


# Failures


def test_only_exceptions_of_the_table_are_rebuilt() -> None:
    for error in (ValueError("x"), KeyError("x"), ZeroDivisionError("x"), ProtocolError("x"), RemoteError("x")):
        came = decode_failure(encode_failure(error, "worker1").payload)
        assert type(came) is type(error)
        assert came.args[0] == "x"
    error = OSError(2, "No such file")
    error.add_note("a note")
    came = decode_failure(encode_failure(error, "worker1").payload)
    assert isinstance(came, OSError)
    assert "No such file" in str(came)
    assert came.__notes__[0] == "a note"

    class Unshowable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    for own in (Unshowable("a", "b"), SystemExit(3), KeyboardInterrupt(), StopIteration(1), pickle.PicklingError("p")):
        came = decode_failure(encode_failure(own, "worker1").payload)
        assert type(came) is RemoteError
        assert type(own).__qualname__ in str(came)
    long = decode_failure(encode_failure(ValueError("\ud800" + "x" * 10_000_000), "worker1").payload)
    assert type(long) is ValueError
    assert len(str(long)) < 100_000


@pytest.mark.parametrize("name", ["os.system", "builtins.SystemExit", "builtins.print", "farprop.errors.copy", "x", ""])
def test_failure_with_a_name_that_is_no_known_exception_is_a_remote_error(name: str) -> None:
    assert type(decode_failure(pack((name, "echo", [], "worker1")))) is RemoteError


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys])
def test_many_keys_with_the_same_hash_are_refused(kind: Any) -> None:
    """Building a dict of these keys would take hours, and block all other threads."""
    prime = (1 << 61) - 1
    for number in (prime * i for i in range(3)):
        assert hash(number) == 0
    few = kind([prime * i for i in range(50)])
    assert decode_value(encode_value(few).payload, [], 0) == few
    many = kind([prime * i for i in range(1500)])
    with pytest.raises(ProtocolError, match="the same hash"):
        decode_value(encode_value(many).payload, [], 0)
    honest = kind(range(100_000))
    assert decode_value(encode_value(honest).payload, [], 0) == honest
