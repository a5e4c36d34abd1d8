"""The arguments and methods of torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from farprop.distributed import LonelyProcessGroup
from farprop.errors import UsageError
from farprop.nn.parallel import DistributedDataParallel
from tests.ddp.models import Net, assert_gradients, batch, share
from tests.groups.kinds import default_group
from tests.support.workers import run_workers


def wrapped(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or nn.Linear(2, 1), process_group=LonelyProcessGroup(), **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"delay_all_reduce_named_params": [("weight", None)]}, "delay_all_reduce_named_params=.* Leave it out"),
        ({"param_to_hook_all_reduce": torch.ones(1)}, "param_to_hook_all_reduce=a Tensor. Leave it out"),
        ({"mixed_precision": object()}, "mixed_precision=a object. Use torch.autocast"),
        ({"skip_all_reduce_unused_params": True}, "skip_all_reduce_unused_params=True. .*find_unused_parameters=True"),
        ({"bucket_cap_mb_list": [1, 2]}, r"bucket_cap_mb_list=\[1, 2\]. .* as bucket_cap_mb"),
    ],
)
def test_unsupported_arguments_raise(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        wrapped(**options)


def test_arguments_without_effect_are_accepted() -> None:
    ddp = wrapped(skip_all_reduce_unused_params=False, bucket_cap_mb_list=[], batched_grad_copy=True, dim=1)
    assert (ddp.dim, ddp.batched_grad_copy, ddp.mixed_precision) == (1, True, None)
    assert (ddp.device_type, ddp.is_multi_device_module, ddp.output_device) == ("cpu", False, None)
    with pytest.warns(FutureWarning, match="check_reduction is deprecated"):
        wrapped(check_reduction=True)
    with pytest.raises(ValueError, match="output_device=.* needs device_ids.* Leave it out"):
        wrapped(output_device="cpu")


def meshes(rank: int, size: int) -> None:
    with default_group("gloo", rank, size):
        right = Net()
        mesh = init_device_mesh("cpu", (size,))
        ddp = DistributedDataParallel(Net(), device_mesh=mesh)
        assert ddp.device_mesh is mesh
        assert ddp.process_group is mesh.get_group()
        ddp(share(batch(size), rank)).mean().backward()
        right(batch(size)).mean().backward()
        assert_gradients(ddp.module, right)
        with pytest.raises(UsageError, match="both process_group and device_mesh"):
            DistributedDataParallel(Net(), device_mesh=mesh, process_group=dist.group.WORLD)
        square = init_device_mesh("cpu", (size, 1), mesh_dim_names=("rows", "columns"))
        with pytest.raises(UsageError, match="Only 1D device mesh"):
            DistributedDataParallel(Net(), device_mesh=square)
        with pytest.raises(UsageError, match="a slice of a larger mesh"):
            DistributedDataParallel(Net(), device_mesh=square["rows"])


def test_a_mesh_stands_for_its_group() -> None:
    run_workers(meshes, 2, (2,))


class Counting(nn.Module):
    """Has synchronised and ignored buffers and parameters."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.full((1,), float(rank)))
        self.own = nn.Parameter(torch.full((1,), float(rank)))
        self.register_buffer("seen", torch.full((1,), float(rank)))
        self.register_buffer("own_seen", torch.full((1,), float(rank)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared * x + self.own * x


def state(module: nn.Module) -> list[float]:
    return [value.item() for value in module.state_dict().values()]


# The (shared, own, seen, own_seen) of rank 1's module, after wrapping and after a forward pass.
BUFFERS: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    "by default": ({}, [0, 0, 0, 0], [0, 0, 0, 0]),
    "not at all": ({"broadcast_buffers": False}, [0, 0, 1, 1], [0, 0, 5, 5]),
    "at the start": ({"forward_sync_buffers": False}, [0, 0, 0, 0], [0, 0, 5, 5]),
    "the newer one counts": ({"broadcast_buffers": False, "forward_sync_buffers": True}, [0, 0, 0, 0], [0, 0, 0, 0]),
}


def buffers(rank: int, size: int) -> None:
    with default_group("gloo", rank, size):
        for name, (options, wrapped_, passed) in BUFFERS.items():
            ddp = DistributedDataParallel(Counting(rank), **options)
            if rank == 1:
                assert state(ddp.module) == wrapped_, name
                ddp.module.seen.fill_(5.0)
                ddp.module.own_seen.fill_(5.0)
            assert ddp.will_sync_module_buffers() == ddp.forward_sync_buffers == ddp.broadcast_buffers
            ddp(torch.ones(1)).sum().backward()
            if rank == 1:
                assert state(ddp.module) == passed, name
        ddp.broadcast_buffers = False
        assert not ddp.will_sync_module_buffers()
        ddp.module.seen.fill_(float(rank))
        ddp._sync_buffers()
        assert ddp.module.seen.item() == 0


def test_when_buffers_are_synchronised() -> None:
    run_workers(buffers, 2, (2,))


def ignored(rank: int, size: int) -> None:
    with default_group("gloo", rank, size):
        module = Counting(rank)
        names = ["own", "own_seen"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        ddp = DistributedDataParallel(module)
        assert state(module) == [0, rank, 0, rank]
        ddp(torch.full((1,), rank + 1.0)).sum().backward()
        assert module.shared.grad.item() == 1.5  # the mean of both ranks
        assert module.own.grad.item() == rank + 1.0
        assert module.own_seen.item() == rank
        assert ddp.parameters_to_ignore == set(names)
        assert list(DistributedDataParallel._get_data_parallel_params(ddp)) == [module.shared]
        named = list(DistributedDataParallel._get_data_parallel_params(module, named_params=True))
        assert [name for name, _ in named] == ["shared"]
        assert ddp._distributed_rank == rank


def test_ignored_parameters_and_buffers() -> None:
    run_workers(ignored, 2, (2,))


def builtin_hooks(rank: int, size: int) -> None:
    with default_group("gloo", rank, size):
        for kind, exact in (
            (dist.BuiltinCommHookType.ALLREDUCE, True),
            (dist.BuiltinCommHookType.FP16_COMPRESS, False),
        ):
            torch.manual_seed(1)
            ddp = DistributedDataParallel(nn.Linear(1, 1))
            ddp._register_builtin_comm_hook(kind)
            ddp(torch.full((1, 1), 1.0001 + 2 * rank)).sum().backward()
            expected = 2.0001
            found = ddp.module.weight.grad.item()
            assert found == pytest.approx(expected, abs=1e-6 if exact else 1e-2)
            assert (abs(found - expected) < 1e-6) == exact


def test_builtin_hooks() -> None:
    run_workers(builtin_hooks, 2, (2,))


def test_moving_inputs_and_outputs() -> None:
    ddp = wrapped()
    inputs, named = ddp.to_kwargs((torch.ones(2),), {"y": torch.zeros(1)}, "cpu")
    assert inputs[0][0].tolist() == [1, 1]
    assert named[0]["y"].tolist() == [0]
    assert ddp.scatter((5,), {"a": 1}, [0, 1]) == (((5,), (5,)), ({"a": 1}, {"a": 1}))
    with pytest.raises(AssertionError, match="not implemented for CPU tensors"):  # torch's own error
        ddp.gather(torch.ones(2), "cpu")
