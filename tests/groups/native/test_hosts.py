"""Groups over several hosts, which are network namespaces, and what happens if a cable is cut."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import farprop.rpc as rpc
from farprop.errors import RankLostError
from tests.groups import test_collectives as every_group
from tests.groups.kinds import default_group
from tests.groups.native import endless
from tests.groups.native import test_collectives as native
from tests.groups.native.test_deaths import check_lost, join_all
from tests.groups.native.test_failures import refused
from tests.support.hosts import Hosts
from tests.support.workers import Cluster, free_port, processes, run_workers

# The host of each rank.
PLACES = pytest.mark.parametrize("places", [[0, 1], [0, 0, 1], [0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 2]], ids=str)


@PLACES
def test_collectives(hosts, places):
    run_workers(every_group.collectives, len(places), (len(places), "farprop"), hosts.environments(places))


def test_large_tensors(hosts):
    run_workers(native.large, 4, (4,), hosts.environments([0, 0, 1, 1]))


def address_families(rank: int, size: int) -> dict[int, socket.AddressFamily]:
    with default_group("farprop", rank, size) as group:
        return {peer: sock.family for peer, sock in group._mesh._sockets.items()}


def test_ranks_of_one_host_use_unix_sockets(hosts):
    places = [0, 1, 0]
    found = run_workers(address_families, 3, (3,), hosts.environments(places))
    for rank, peers in enumerate(found):
        for peer, family in peers.items():
            is_near = places[rank] == places[peer]
            assert family == (socket.AF_UNIX if is_near else socket.AF_INET)


def test_hosts_without_a_secret_refuse_and_say_how_to_set_one(hosts, tmp_path):
    environments = []
    for host, environment in enumerate(hosts.environments([0, 1])):
        (place := tmp_path / str(host)).mkdir(mode=0o700)
        environments.append({**environment, "FARPROP_SECRET": None, "XDG_RUNTIME_DIR": str(place)})
    run_workers(refused, 2, (2, "share no secret.*FARPROP_SECRET"), environments, check=False)


# A cable is cut


def check_both_sides_lost(job: Cluster, endings: list[endless.Ending], places: list[int], host: int) -> None:
    """Each side has lost ranks of the other, later collectives fail, too, and all ranks can leave."""
    for rank, ending in enumerate(endings):
        mine = places[rank] == host
        check_lost(ending, {other for other, place in enumerate(places) if (place == host) != mine})
    for later in [job.start(rank, endless.once, "barrier") for rank in range(len(places))]:
        assert isinstance(later.result().error, RankLostError)
    for end in [job.start(rank, endless.leave) for rank in range(len(places))]:
        end.result()


def cut_during_collectives(hosts: Hosts, places: list[int], how: Callable[[Hosts, int], None]) -> None:
    size, seed = len(places), len(places)
    host = places[-1]
    with processes(size, hosts.environments(places)) as job:
        join_all(job, size)
        runs = [job.start(rank, endless.run, list(endless.KINDS), seed) for rank in range(size)]
        for rank in range(size):
            job.run(rank, endless.await_collectives, random.Random(seed).randrange(1, 20))
        how(hosts, host)
        check_both_sides_lost(job, [run.result() for run in runs], places, host)


@PLACES
def test_a_host_is_cut_off_during_collectives(hosts, places):
    cut_during_collectives(hosts, places, Hosts.cut)


def test_a_host_is_unplugged_during_collectives(hosts):
    cut_during_collectives(hosts, [0, 0, 1, 1], Hosts.unplug)


def test_a_host_is_cut_off_during_a_long_message(hosts):
    """The sender waits until it can write, not until something arrives."""
    places = [0, 1, 1]
    with processes(3, hosts.environments(places)) as job:
        join_all(job, 3)
        job.signal(2, signal.SIGSTOP)
        sending = job.start(0, endless.send_much, 2)
        hosts.cut(1)
        check_lost(sending.result(), {1, 2})
        job.signal(2, signal.SIGCONT)
        endings = [sending.result(), *(job.run(rank, endless.once, "barrier") for rank in (1, 2))]
        check_both_sides_lost(job, endings, places, 1)


@pytest.mark.parametrize("kind", ["all_reduce", "all_reduce, asynchronous", "broadcast"])
def test_a_host_is_cut_off_while_ranks_wait(hosts, kind):
    places = [0, 0, 1, 1]
    with processes(4, hosts.environments(places)) as job:
        join_all(job)
        runs = [job.start(rank, endless.once, kind) for rank in (1, 2, 3)]  # rank 0, the root, does not join
        hosts.cut(1)
        # Rank 0 joins when the others know.
        endings = [run.result() for run in runs]
        check_both_sides_lost(job, [job.run(0, endless.once, kind), *endings], places, 1)


def test_a_host_is_cut_off_while_ranks_are_idle(hosts):
    places = [0, 1]
    with processes(2, hosts.environments(places)) as job:
        join_all(job, 2)
        hosts.cut(1)
        check_both_sides_lost(job, [job.start(rank, endless.once, "barrier").result() for rank in range(2)], places, 1)


def test_groups_within_a_host_go_on(hosts):
    places = [0, 0, 1, 1]
    with processes(4, hosts.environments(places)) as job:
        join_all(job)
        for made in [job.start(rank, endless.make_groups, [[0, 1], [2, 3], [1, 2]]) for rank in range(4)]:
            made.result()
        hosts.cut(1)
        check_lost(job.run(1, endless.reduce_in, 2), {1})
        check_lost(job.run(2, endless.reduce_in, 2), {0})
        alive = [job.start(rank, endless.reduce_in, places[rank]) for rank in range(4)]
        assert [run.result() for run in alive] == [None] * 4
        for end in [job.start(rank, endless.leave) for rank in range(4)]:
            end.result()


def test_a_host_that_still_reaches_both_sides_of_a_cut_is_told(hosts):
    with processes(3, hosts.environments([0, 1, 2])) as job:
        join_all(job, 3)
        third = job.start(2, endless.once, "broadcast")  # waits for rank 0, to which its connection is intact
        hosts.part(0, 1)
        check_lost(third.result(), {0, 1})
        for rank in (1, 0):  # each may find out later than the other; they call the same collective
            check_lost(job.run(rank, endless.repeat, "broadcast"), {0, 1})
        for end in [job.start(rank, endless.leave) for rank in range(3)]:
            end.result()


def test_a_stopped_rank_is_not_lost(hosts):
    """Others fill its socket buffers, and wait for longer than they would for a vanished host."""
    with processes(3, hosts.environments([0, 1, 2])) as job:
        join_all(job, 3)
        job.signal(1, signal.SIGSTOP)
        runs = [job.start(rank, endless.reduce_much) for rank in (0, 2)]
        time.sleep(4)  # longer than a vanished host is waited for
        assert not any(run.done() for run in runs)
        job.signal(1, signal.SIGCONT)
        job.run(1, endless.reduce_much)
        for run in runs:
            run.result()
        for end in [job.start(rank, endless.leave) for rank in range(3)]:
            end.result()


# Rendezvous


def init_and_reduce(rank: int, size: int, init_method: str) -> list[float]:
    dist.init_process_group("farprop", init_method=init_method, rank=rank, world_size=size)
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.barrier()
    dist.destroy_process_group()
    return x.tolist()


def test_the_address_is_known_only_from_the_init_method(hosts):
    """Nothing else tells that there are several hosts, so no rank may publish 127.0.0.1 as its address."""
    environments = [{**environment, "MASTER_ADDR": None} for environment in hosts.environments([0, 1])]
    init_method = f"tcp://{hosts.address(0)}:{free_port()}"
    assert run_workers(init_and_reduce, 2, (2, init_method), environments) == [[2.0] * 3] * 2


def init_rpc_with_a_store(rank: int, size: int, host: str, port: int) -> int:
    store = dist.TCPStore(host, port, size, is_master=rank == 0)
    options = rpc.TensorPipeRpcBackendOptions(init_method=dist.PrefixStore("job", store))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    answer = rpc.rpc_sync(f"worker{1 - rank}", os.getpid)
    rpc.shutdown()
    store.add("left", 1)
    if rank == 0:  # the rank that hosts the store leaves last
        while store.add("left", 0) < size:
            os.sched_yield()
    return answer


def test_rpc_with_a_store_on_another_host(hosts):
    environments = [{**environment, "MASTER_ADDR": None} for environment in hosts.environments([0, 1])]
    answers = run_workers(init_rpc_with_a_store, 2, (2, hosts.address(0), free_port()), environments)
    assert len(set(answers)) == 2
