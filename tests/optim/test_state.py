"""``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from farprop.errors import UsageError
from farprop.optim import DistributedOptimizer
from tests.optim.models import Far, Near, Nested, Signs, assert_same, copy_values, inputs, train_far, train_near
from tests.support.workers import Cluster

CHOICES: list[tuple[Any, dict[str, Any]]] = [
    (optim.Adam, {"lr": 0.05, "amsgrad": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.Adagrad, {"lr": 0.1}),
    (Signs, {"lr": 0.1}),
    (Nested, {"lr": 0.1}),
]


def _round_trip(make: Any, kwargs: dict[str, Any]) -> None:
    near = Near()
    train_near(near, make(near.parameters, **kwargs), inputs(6))
    first = Far()
    optimizer = DistributedOptimizer(make, first.references, **kwargs)
    train_far(first, optimizer, inputs(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)

    # Other workers, but parameters that were on one worker are on one worker again. The state includes the settings.
    second = Far(("worker2", "worker0", "worker1"))
    copy_values(first.values(), second.references)
    fresh = DistributedOptimizer(make, second.references, **{**kwargs, "lr": 1.0})
    state = torch.load(file, weights_only=True)
    fresh.load_state_dict(state)
    train_far(second, fresh, inputs(3, start=3))
    assert_same(second.values(), near.values())
    # The original optimizer continues as well, and does not change the state.
    train_far(first, optimizer, inputs(3, start=3))
    assert_same(first.values(), near.values())
    file.seek(0)
    for one, other in zip(_tensors(state), _tensors(torch.load(file, weights_only=True)), strict=True):
        assert torch.equal(one, other)


def _tensors(state: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize(("make", "kwargs"), CHOICES, ids=lambda value: getattr(value, "__name__", None))
def test_a_new_optimizer_continues_from_a_state(workers: Cluster, make: Any, kwargs: dict[str, Any]) -> None:
    workers.run(0, _round_trip, make, kwargs)


def _form() -> None:
    far, near = Far(), Near()
    optimizer, local = DistributedOptimizer(optim.Adam, far.references), optim.Adam(near.parameters)
    train_far(far, optimizer, inputs(1))
    train_near(near, local, inputs(1))
    state = optimizer.state_dict()
    kept = [tensor.clone() for tensor in _tensors(state)]
    assert [(part["name"], part["parameters"]) for part in state["workers"]] == [
        ("worker1", [0, 3]),
        ("worker2", [1, 4]),
        ("worker0", [2, 5]),
    ]
    theirs = local.state_dict()["state"]
    for part in state["workers"]:
        own = part["optimizer"]["state"]
        for place, parameter in enumerate(part["parameters"]):
            for key, value in theirs[parameter].items():
                assert torch.equal(own[place][key], value)
    train_far(far, optimizer, inputs(1))
    assert_same(_tensors(state), kept)  # including the part of this worker
    optimizer.load_state_dict(state)
    train_far(far, optimizer, inputs(1))
    assert_same(_tensors(state), kept)


def test_the_state_is_a_copy_of_all_workers_states(workers: Cluster) -> None:
    workers.run(0, _form)


def _refused() -> None:
    far = Far()
    optimizer = DistributedOptimizer(optim.Adam, far.references)
    train_far(far, optimizer, inputs(1))
    state = optimizer.state_dict()
    for wrong in (
        {},
        {"workers": [{"parameters": [0]}]},
        {"workers": 3},
        [],
        None,
        optim.SGD([torch.ones(1)]).state_dict(),
    ):
        with pytest.raises(UsageError, match="not the state of a distributed optimizer"):
            optimizer.load_state_dict(wrong)  # type: ignore[arg-type]
    together = Far(("worker1", "worker1", "worker2"))
    for references, shown in (
        (far.references[:3], r"\[0, 3\], \[1, 4\], \[2, 5\]\. Now they have \[0\], \[1\], \[2\]"),
        (sorted(far.references, key=lambda r: r.owner_name()), r"Now they have \[0, 1\], \[2, 3\], \[4, 5\]"),
        (together.references, r"Now they have \[0, 1, 3, 4\], \[2, 5\]"),
    ):
        with pytest.raises(UsageError, match=shown + r"\. Give the parameters in the same order"):
            DistributedOptimizer(optim.Adam, references).load_state_dict(state)
    # Torch's own errors are raised on the workers.
    with pytest.raises(ValueError, match="different number of parameter groups"):
        DistributedOptimizer(Nested, far.references, lr=0.1).load_state_dict(state)


def test_a_state_for_other_parameters_raises(workers: Cluster) -> None:
    workers.run(0, _refused)
