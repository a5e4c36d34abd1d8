"""The fast codec yields the same values as the full codec, or leaves a value to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farprop.wire.fast_codec import decode_call, decode_value, encode_call, encode_plain, encode_value
from farprop.wire.message import FAST
from farprop.wire.tensors import INLINE_LIMIT

atoms = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(atoms, max_size=6),
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=3),
    grad=st.booleans(),
)
def test_values_and_small_tensors_round_trip(values: list[Any], shapes: list[list[int]], grad: bool) -> None:
    args = (*values, *(torch.rand(shape, requires_grad=grad) for shape in shapes))
    encoded = encode_call(None, args, {})
    got, kwargs = decode_call(encoded.payload, encoded.buffers, encoded.flags)
    assert kwargs == {}
    assert len(got) == len(args)
    for theirs, ours in zip(got, args, strict=True):
        assert type(theirs) is type(ours)
        if isinstance(ours, torch.Tensor):
            assert torch.equal(theirs, ours)
            assert theirs.requires_grad == ours.requires_grad
        else:
            assert theirs == ours


@pytest.mark.parametrize(
    "value",
    [
        torch.rand(2, 3).t(),
        torch.zeros(0),
        torch.eye(2).to_sparse(),
        torch.rand(1, dtype=torch.complex64).conj(),
        torch.rand(1, dtype=torch.complex64).conj().imag,
        torch.nn.Parameter(torch.rand(2)),
        [1, 2],
        {"a": 1},
    ],
)
def test_unsupported_values_use_the_full_codec(value: Any) -> None:
    assert encode_plain((value,)) is None
    encoded = encode_value(value)
    assert not encoded.flags & FAST
    got = decode_value(encoded.payload, [memoryview(bytearray(b)) for b in encoded.buffers], encoded.flags)
    assert type(got) is type(value)
    if isinstance(value, torch.Tensor):
        assert torch.equal(got.to_dense(), value.to_dense())


def test_large_tensors_go_out_of_band() -> None:
    tensor = torch.rand(INLINE_LIMIT, requires_grad=True)
    encoded = encode_call(None, (1, tensor, "x", torch.ones(2)), {})
    assert encoded.flags & FAST
    assert len(encoded.buffers) == 1
    (one, large, text, small), _ = decode_call(encoded.payload, [bytearray(b) for b in encoded.buffers], encoded.flags)
    assert (one, text) == (1, "x")
    assert torch.equal(large, tensor)
    assert large.requires_grad
    assert torch.equal(small, torch.ones(2))


def test_tensors_that_share_storage_use_the_full_codec() -> None:
    base = torch.rand(4)
    assert encode_plain((base, base[1:])) is None
    assert encode_plain((base, base)) is None
    assert encode_plain((base, base.clone())) is not None
    (left, right), _ = decode_call(*_parts(encode_call(None, (base, base[1:]), {})))
    left[1] = 9
    assert right[0] == 9


def _parts(encoded: Any) -> tuple[Any, Any, int]:
    return encoded.payload, encoded.buffers, encoded.flags


def test_subclasses_of_supported_types_use_the_full_codec() -> None:
    class Number(int):
        pass

    class Marked(torch.Tensor):
        pass

    assert encode_plain((Number(1),)) is None
    assert encode_plain((torch.rand(2).as_subclass(Marked),)) is None
