"""What crosses between hosts: each byte once, in one message if it is not much, and carried by all ranks if it is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from farprop.distributed.native import splits
from farprop.distributed.native.framing import FrameKind
from tests.groups.kinds import default_group
from tests.groups.native.layouts import SEVERAL_HOSTS, environment, hosts
from tests.support.workers import run_workers

SMALL, LARGE = 12, 240_000  # floats; the first two are carried by leaders, the last by all ranks
LAYOUT = pytest.mark.parametrize("layout", SEVERAL_HOSTS)

Pair = tuple[int, int]


class Crossing(NamedTuple):
    """The messages and bytes of a collective from one host to another."""

    messages: int
    bytes: int


def _parts(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x) for _ in range(dist.get_world_size())]


# The root is the last rank, which is not the first one of its host in some layouts.
ROOT = 3
COLLECTIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "broadcast": lambda x: dist.broadcast(x, ROOT),
    "reduce": lambda x: dist.reduce(x, ROOT),
    "gather": lambda x: dist.gather(x, _parts(x) if dist.get_rank() == ROOT else None, ROOT),
    "scatter": lambda x: dist.scatter(x, _parts(x) if dist.get_rank() == ROOT else None, ROOT),
    "all_gather": lambda x: dist.all_gather(_parts(x), x),
    "all_gather_single": lambda x: dist.all_gather_single(torch.empty(4 * x.numel()), x),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, _parts(x)),
    "reduce_scatter_single": lambda x: dist.reduce_scatter_single(x, torch.ones(4 * x.numel())),
    "all_to_all": lambda x: dist.all_to_all(_parts(x), _parts(x)),
    "all_to_all_single": lambda x: dist.all_to_all_single(torch.empty(4 * x.numel()), torch.ones(4 * x.numel())),
}


def sent_by_rank(rank: int, size: int, count: int) -> dict[str, list[Pair]]:
    """The messages that this rank sends in each collective: to whom, and how many bytes."""
    with default_group("farprop", rank, size) as group:
        mesh: Any = group._mesh
        send, sent = mesh.send, []

        def recorded(peer: int, kind: FrameKind, key: int, text: str, data: memoryview, deadline: float) -> None:
            if kind == FrameKind.COLLECTIVE:
                sent.append((peer, len(data)))
            send(peer, kind, key, text, data, deadline)

        mesh.send = recorded
        found = {}
        for name, collective in COLLECTIVES.items():
            sent.clear()
            collective(torch.ones(count))
            found[name] = sent.copy()
        del mesh.send
        return found


def crossings(name: str, layout: str, sent: list[dict[str, list[Pair]]]) -> dict[Pair, Crossing]:
    host_of = {rank: host for host, ranks in enumerate(hosts(layout)) for rank in ranks}
    messages: Counter[Pair] = Counter()
    size: Counter[Pair] = Counter()
    for rank, found in enumerate(sent):
        for peer, length in found[name]:
            pair = host_of[rank], host_of[peer]
            messages[pair] += 1
            size[pair] += length
    return {pair: Crossing(messages[pair], size[pair]) for pair in messages}


def needed(name: str, layout: str, tensor: int) -> dict[Pair, int]:
    """The bytes that have to cross from host to host, with tensors of so many bytes."""
    ranks = [len(members) for members in hosts(layout)]
    root = len(ranks) - 1
    pairs = [(a, b) for a in range(len(ranks)) for b in range(len(ranks)) if a != b]
    if name == "reduce":
        return {(a, b): tensor for a, b in pairs if b == root}
    if name == "gather":
        return {(a, b): tensor * ranks[a] for a, b in pairs if b == root}
    if name == "scatter":
        return {(a, b): tensor * ranks[b] for a, b in pairs if a == root}
    factor: Callable[[int, int], int] = {
        "all_reduce": lambda a, b: 1,
        "all_gather": lambda a, b: ranks[a],
        "reduce_scatter": lambda a, b: ranks[b],
        "all_to_all": lambda a, b: ranks[a] * ranks[b],
    }[name.removesuffix("_single")]
    return {(a, b): tensor * factor(a, b) for a, b in pairs}


@LAYOUT
def test_small_tensors_cross_in_one_message_for_each_two_hosts(layout):
    sent = run_workers(sent_by_rank, 4, (4, SMALL), environment(layout, 4))
    ranks = [len(members) for members in hosts(layout)]
    for name in COLLECTIVES:
        found = crossings(name, layout, sent)
        if name == "broadcast":
            # Down a tree: each host but the root's gets it once.
            assert sorted(target for _, target in found) == list(range(len(ranks) - 1))
            assert all(crossing == Crossing(1, 4 * SMALL) for crossing in found.values())
            continue
        expected = needed(name, layout, 4 * SMALL)
        if name.startswith("all_to_all"):  # with the counts in front
            for a, b in expected:
                expected[a, b] += 8 * ranks[a] * ranks[b] if ranks[a] * ranks[b] > 1 else 0
        assert found == {pair: Crossing(1, size) for pair, size in expected.items()}, name


@LAYOUT
def test_large_tensors_cross_once(layout):
    sent = run_workers(sent_by_rank, 4, (4, LARGE), environment(layout, 4))
    tensor, count = 4 * LARGE, len(hosts(layout))
    for name in COLLECTIVES:
        found = {pair: crossing.bytes for pair, crossing in crossings(name, layout, sent).items()}
        if name == "broadcast":
            assert sorted(target for _, target in found) == list(range(count - 1))
            assert set(found.values()) == {tensor}
        elif name == "all_reduce" and count > 2:
            # Each host reduces a part for all.
            assert sum(found.values()) == 2 * (count - 1) * tensor
            assert all(abs(size - 2 * tensor / count) < 100 for size in found.values())
        else:
            assert found == needed(name, layout, tensor), name


@pytest.mark.parametrize("layout", ["2+2", "3+1"])
def test_large_tensors_are_carried_by_all_ranks_of_a_host(layout):
    sent = run_workers(sent_by_rank, 4, (4, LARGE), environment(layout, 4))
    for ranks in hosts(layout):
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather", "broadcast"):
            sizes = [sum(length for _, length in sent[rank][name]) for rank in ranks]
            assert max(sizes) - min(sizes) < 1000, (name, sizes)


# Bits


def totals(rank: int, size: int, count: int) -> list[torch.Tensor]:
    """Totals of the same random numbers from different collectives."""
    with default_group("farprop", rank, size):
        own = torch.randn(count, generator=torch.Generator().manual_seed(rank))
        x = own.clone()
        dist.all_reduce(x)
        found = [x]
        for root in range(size):
            y = own.clone()
            dist.reduce(y, root)
            found.append(y if rank == root else x)
            assert rank == root or y.equal(own)
        part = torch.empty(count // size)
        dist.reduce_scatter_single(part, own)
        whole = torch.empty(count)
        dist.all_gather_single(whole, part)
        average = own.clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        halves = own.clone()
        dist.all_reduce(halves, dist._make_nccl_premul_sum(0.5))
        return [*found, whole, average * size, halves * 2]  # the factors are powers of two: exact


@LAYOUT
@pytest.mark.parametrize("count", [SMALL, 20_000, LARGE])
def test_totals_are_in_the_order_of_ranks_then_of_hosts(layout, count):
    values = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    right = None
    for ranks in hosts(layout):
        total = values[ranks[0]].clone()
        for rank in ranks[1:]:
            total += values[rank]
        right = total if right is None else right + total
    for found in run_workers(totals, 4, (4, count), environment(layout, 4)):
        assert all(total.equal(right) for total in found)


# The arithmetic


def test_lanes_cover_everything_and_lie_within_the_shares_of_their_carriers():
    dice = random.Random(1)
    for _ in range(500):
        length = dice.choice([0, 1, 63, 64, 1000, 100_000])
        made = []
        for _ in range(dice.randrange(1, 4)):
            ranks = dice.randrange(1, 6)
            cuts = sorted(dice.randrange(length + 1) for _ in range(ranks - 1))
            lengths = [end - start for start, end in zip([0, *cuts], [*cuts, length], strict=True)]
            made.append(
                dice.choice(
                    [
                        splits.even_split(length, ranks),
                        splits.single_split(length, ranks, dice.randrange(ranks)),
                        splits.split_by_lengths(lengths),
                    ]
                )
            )
        found = splits.lanes(made)
        assert [lane.start for lane in found] == [0, *(lane.end for lane in found[:-1])]
        assert found[-1].end == length
        for lane in found:
            assert lane.start < lane.end or (length == 0 and len(found) == 1)
            for carrier, split in zip(lane.carriers, made, strict=True):
                start, end = split[carrier]
                assert start <= lane.start <= lane.end <= end
