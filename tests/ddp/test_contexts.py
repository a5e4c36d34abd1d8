"""DistributedDataParallel under distributed autograd: gradients are reduced into the context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.distributed import FaultyProcessGroup
from farprop.errors import BackwardError
from farprop.nn.parallel import DistributedDataParallel
from tests.ddp.models import Unused, batch, share
from tests.groups.kinds import default_group
from tests.support.workers import free_port, run_workers

TRAINERS = 2


class Server:
    """The layer on the last worker."""

    layer: nn.Module


def remote_layer(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(Server.layer(x))


def make_layer() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 4).double()


class Split(nn.Module):
    """A local layer, a remote one, and more local ones."""

    def __init__(self, is_split: bool) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.before = nn.Linear(4, 4).double()
        self.after = Unused()
        if not is_split:
            Server.layer = make_layer()
        self._call = (lambda x: rpc.rpc_sync("worker2", remote_layer, (x,))) if is_split else remote_layer

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.after(self._call(torch.tanh(self.before(x))), use)


def expected(number: int, uses: list[bool]) -> dict[str, torch.Tensor]:
    """The gradients of one process."""
    right = Split(False)
    for rank in range(TRAINERS):
        (right(share(batch(TRAINERS, number), rank), uses[rank]).mean() / TRAINERS).backward()
    return {name: leaf.grad for name, leaf in right.named_parameters() if leaf.grad is not None}


def check(ours: nn.Module, context_id: int, right: dict[str, torch.Tensor]) -> None:
    gradients = dist_autograd.get_gradients(context_id)
    found = {name: gradients[leaf] for name, leaf in ours.named_parameters() if leaf in gradients}
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10, msg=name)
    assert all(leaf.grad is None for leaf in ours.parameters())


def train(rank: int, group: dist.ProcessGroup, options: dict[str, Any]) -> None:
    ours = Split(True)
    uses_all = not options.get("find_unused_parameters") and not options.get("static_graph")
    if uses_all:
        del ours.after.never
    ddp = DistributedDataParallel(ours, process_group=group, **options)
    kept = []
    for number in range(3):
        uses = [True, True] if not options.get("find_unused_parameters") else [number == 1, number > 0]
        with dist_autograd.context() as context_id:
            loss = ddp(share(batch(TRAINERS, number), rank), uses[rank]).mean()
            dist_autograd.backward(context_id, [loss])
            right = expected(number, uses)
            check(ours, context_id, right)
            # The next iteration does not write to these gradients.
            kept.append((dist_autograd.get_gradients(context_id)[ours.before.weight], right["before.weight"]))
    for gradient, value in kept:
        torch.testing.assert_close(gradient, value, rtol=0, atol=1e-10)


def fail(rank: int, group: dist.ProcessGroup, options: dict[str, Any]) -> None:
    """The collective of the second iteration fails: its pass leaves no gradients, and the third iteration works."""
    ours = Split(True)
    del ours.after.never
    faulty = FaultyProcessGroup(group, fail=[4])  # after the two that broadcast the new buckets
    ddp = DistributedDataParallel(ours, process_group=faulty, init_sync=False, **options)
    for number in range(3):
        with dist_autograd.context() as context_id:
            loss = ddp(share(batch(TRAINERS, number), rank), True).mean()
            if number == 1:
                with pytest.raises(BackwardError, match="was told to fail"):
                    dist_autograd.backward(context_id, [loss])
                assert dist_autograd.get_gradients(context_id) == {}
            else:
                dist_autograd.backward(context_id, [loss])
                check(ours, context_id, expected(number, [True, True]))


def job(rank: int, port: int, name: str, options: dict[str, Any]) -> None:
    with default_group("gloo", rank, TRAINERS + 1):
        group = dist.new_group(list(range(TRAINERS)))
        Server.layer = make_layer()
        start = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=TRAINERS + 1, rpc_backend_options=start)
        if rank < TRAINERS:
            globals()[name](rank, group, options)
        rpc.shutdown()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0.0001},
    ],
    ids=["plain", "views", "unused", "static", "small buckets"],
)
def test_training(options):
    run_workers(job, TRAINERS + 1, (free_port(), "train", options))


def test_a_failed_collective_leaves_no_gradients_in_the_context():
    run_workers(job, TRAINERS + 1, (free_port(), "fail", {}))
