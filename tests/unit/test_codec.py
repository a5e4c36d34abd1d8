"""The pickle codec: objects come back as they were."""

from __future__ import annotations

import collections
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farprop.errors import UsageError
from farprop.wire.codec import decode, encode
from farprop.wire.tensors import _DTYPE_NAMES, INLINE_LIMIT, MAX_WASTE


def round_trip(obj: Any) -> Any:
    encoded = encode(obj)
    return decode(encoded.payload, [memoryview(bytearray(b)) for b in encoded.buffers])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.requires_grad != b.requires_grad or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        return torch.equal(a.to_dense(), b.to_dense())
    raw = [
        bytes(t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).untyped_storage())
        for t in (a, b)
    ]
    return raw[0] == raw[1]


def tensor_of(dtype: torch.dtype, count: int) -> torch.Tensor:
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).remainder(2).to(torch.uint8)
    return raw.view(dtype)


@pytest.mark.parametrize("name", _DTYPE_NAMES)
def test_every_dtype_survives_small_and_large(name: str) -> None:
    dtype = getattr(torch, name)
    for count in (3, INLINE_LIMIT):
        tensor = tensor_of(dtype, count)
        got = round_trip(tensor)
        assert got.dtype == dtype
        assert got.shape == tensor.shape
        assert bytes(got.untyped_storage()) == bytes(tensor.untyped_storage())


def test_every_cpu_dtype_of_torch_has_a_code() -> None:
    quantised = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    known = {getattr(torch, name) for name in _DTYPE_NAMES}
    have = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert have - quantised <= known


@settings(max_examples=150, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), max_size=4),
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int16, torch.bool, torch.complex64]),
    grad=st.booleans(),
)
def test_any_geometry_survives(shape: list[int], order: Any, step: int, dtype: torch.dtype, grad: bool) -> None:
    full = torch.rand([n * step + 1 for n in shape], dtype=torch.float64).mul(3).to(dtype)
    view = full[tuple(slice(0, n * step, step) for n in shape)]
    dims = list(range(view.dim()))
    order.shuffle(dims)
    view = view.permute(dims) if dims else view
    if grad and (dtype.is_floating_point or dtype.is_complex):
        view = view.detach().requires_grad_()
    got = round_trip(view)
    assert same(got, view)
    assert got.is_contiguous() == view.is_contiguous()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(7.5),
        lambda: torch.zeros(0),
        lambda: torch.zeros(2, 0, 3, requires_grad=True),
        lambda: torch.rand(3, requires_grad=True) * 2,
        lambda: torch.rand(4, dtype=torch.complex64).conj(),
        lambda: torch.rand(4, dtype=torch.complex64).conj().imag,
        lambda: torch.rand(5).expand(3, 5),
        lambda: torch.rand(8, 8).t(),
        lambda: torch.rand(5, 5).narrow(1, 2, 2),
        lambda: torch.rand(300, 300).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_csc(),
        lambda: torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4, 5], (2, 3), check_invariants=True),
        lambda: torch.eye(5).to_sparse().coalesce(),
    ],
)
def test_special_tensors_survive(make: Any) -> None:
    tensor = make()
    assert same(round_trip(tensor), tensor)


@pytest.mark.filterwarnings("ignore:torch.quantize_per", "ignore:TypedStorage is deprecated")
def test_quantised_tensors_survive() -> None:
    tensor = torch.quantize_per_tensor(torch.rand(10), 0.1, 3, torch.quint8)
    got = round_trip(tensor)
    assert torch.equal(got.int_repr(), tensor.int_repr())
    assert got.q_scale() == tensor.q_scale()


@pytest.mark.parametrize("count", [16, 4 * INLINE_LIMIT])
def test_views_share_one_storage_which_is_sent_once(count: int) -> None:
    base = torch.arange(float(count))
    encoded = encode([base, base[2:5], base.view(-1, 2).t()])
    assert len(encoded.payload) + sum(b.nbytes for b in encoded.buffers) < 4 * count + 1000
    whole, part, turned = decode(encoded.payload, [memoryview(bytearray(b)) for b in encoded.buffers])
    whole[3] = -1
    assert part[1] == -1
    assert turned[1, 1] == -1
    assert whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()


def test_view_encoded_before_its_base_still_shares_storage() -> None:
    base = torch.arange(100000.0)
    part, whole, other = round_trip([base[10:20], base, base[99990:]])
    whole[12] = -5
    whole[99999] = -6
    assert part[2] == -5
    assert other[9] == -6
    assert torch.equal(part[3:], base[13:20])


def test_views_of_other_dtypes_share_storage() -> None:
    base = torch.zeros(8)
    got, bits = round_trip([base, base.view(torch.int32)])
    got[1] = 1.0
    assert bits[1] == 0x3F800000


def test_small_view_does_not_send_its_large_storage() -> None:
    base = torch.rand(1000, 1000)
    encoded = encode(base[5])
    assert len(encoded.payload) + sum(b.nbytes for b in encoded.buffers) < 5000
    wide = torch.rand(1000, 2000)
    column = wide[:, 3]
    assert wide.nbytes - column.nbytes > MAX_WASTE
    encoded = encode(column)
    assert len(encoded.payload) + sum(b.nbytes for b in encoded.buffers) < 5000
    assert torch.equal(round_trip(column), column)


def test_received_tensors_can_be_written_and_detached_in_place() -> None:
    for tensor in (torch.ones(3), torch.ones(INLINE_LIMIT)):
        got = round_trip(tensor)
        got += 1
        got.detach_()
        assert got[0] == 2
        assert not got._is_view()


def test_requires_grad_of_views_survives() -> None:
    leaf = torch.rand(4, requires_grad=True)
    a, b = round_trip([leaf, leaf.detach()[1:]])
    assert a.requires_grad
    assert not b.requires_grad


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    names: dict[str, list[int]]


Pair = collections.namedtuple("Pair", "left right")


def test_containers_survive() -> None:
    tensor = torch.rand(3)
    deep: Any = tensor
    for _ in range(100):
        deep = [deep]
    value = {
        "point": Point(tensor, {"a": [1, 2]}),
        "pair": Pair(tensor, deep),
        "big": 1 << 5000,
        "bytes": bytes(1 << 20),
        "nested": {(1, "x"): {2.5, None, True, b"q"}},
        tensor: "a tensor as a key",
    }
    got = round_trip(value)
    assert torch.equal(got["point"].x, tensor)
    assert got["pair"].left is got["point"].x
    assert got["big"] == 1 << 5000
    assert got["bytes"] == bytes(1 << 20)
    assert got["nested"] == value["nested"]


def test_ordered_dicts_survive() -> None:
    ordered: Any = collections.OrderedDict(b=1, a=collections.OrderedDict())
    ordered["itself"] = ordered
    with_attribute = collections.OrderedDict(x=2)
    with_attribute.version = 3  # type: ignore[attr-defined]
    got, other = round_trip((ordered, with_attribute))
    assert type(got) is type(got["a"]) is collections.OrderedDict
    assert list(got) == ["b", "a", "itself"]
    assert got["itself"] is got
    assert (other, other.version) == ({"x": 2}, 3)


def test_modules_and_parameters_survive() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 2))
    module[2].weight.requires_grad_(False)
    tied = torch.nn.ModuleDict({"a": module, "b": torch.nn.Linear(2, 2)})
    tied["b"].weight = module[2].weight
    got = round_trip(tied)
    assert got["b"].weight is got["a"][2].weight
    for (name, theirs), (other, ours) in zip(got.named_parameters(), tied.named_parameters(), strict=True):
        assert name == other
        assert isinstance(theirs, torch.nn.Parameter)
        assert same(theirs, ours)


def test_large_numpy_arrays_go_out_of_band_and_can_be_written() -> None:
    array = np.arange(50000.0)
    encoded = encode(array)
    assert len(encoded.buffers) == 1
    got = round_trip(array)
    got[0] = 5
    assert (got[1:] == array[1:]).all()


def test_lambdas_closures_and_local_classes_survive() -> None:
    factor = torch.tensor(3.0)

    class Local:
        def times(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    assert round_trip(lambda x: x * factor)(torch.tensor(2.0)) == 6
    assert round_trip(Local()).times(torch.tensor(2.0)) == 6


def test_pickling_errors_are_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="Can not pickle torch.futures.Future"):
        encode(torch.futures.Future())
    with pytest.raises(TypeError, match="generator"):
        encode(i for i in range(3))


def test_tensor_on_another_device_is_refused_with_advice() -> None:
    class Elsewhere:
        dtype = torch.float32
        layout = torch.strided
        is_cpu = False
        device = torch.device("cuda:0")

    from farprop.wire.tensors import reduce_tensor

    with pytest.raises(UsageError, match=r"cuda:0.*\.cpu\(\)"):
        reduce_tensor(Elsewhere(), {}, None)  # type: ignore[arg-type]


def test_plain_pickle_is_tried_first() -> None:
    assert b"cloudpickle" not in encode([1, torch.add, Pair(1, 2)]).payload
    assert pickle.loads(encode([1, 2]).payload) == [1, 2]
