"""Opening the store through which workers find each other: ``env://``, ``tcp://``, ``file://``, a c10d ``Store``, or
any other URL that torch supports.

``env://`` and ``tcp://`` are opened here and not by torch's rendezvous, which makes rank 0 wait silently for workers
that may never start. Here rank 0 does not wait; the agent finds out and reports who is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from farprop._torch import create_store
from farprop.errors import RendezvousError

# The last store of this process, and what keeps it open. It stays open until the next one is opened: if this process
# hosts the store, other workers may still read from it, or call init_rpc again with the same address.
_last: Any = None


def open_store(
    init_method: Any, rank: int, world_size: int | None, options: Any, timeout: float
) -> tuple[dist.Store, int, int | None]:
    """Open the store; returns it, and the rank and world size from the arguments, the URL or the environment."""
    global _last
    if isinstance(init_method, dist.Store):
        if rank < 0:
            raise ValueError("rank parameter missing: with a Store, pass rank (and world_size) to init_rpc.")
        store: dist.Store = init_method
    elif not world_size:
        with _rendezvous_errors(options.init_method):
            store = _last = create_store(options, rank)
        world_size = None
        if rank < 0:
            rank = int(os.environ["RANK"])
    else:
        scheme = urlparse(init_method).scheme
        if scheme in ("env", "tcp"):
            host, port, rank = _address(init_method, scheme, rank)
            store = _last = _tcp_store(host, port, rank, world_size, timeout)
        elif scheme == "file" or "://" not in init_method:
            if rank < 0:
                raise ValueError("rank parameter missing: with file://, pass rank to init_rpc.")
            path = urlparse(init_method).path
            with _rendezvous_errors(init_method):
                store = _last = dist.FileStore(path, world_size)
        else:
            rendezvous = dist.rendezvous(init_method, rank=rank, world_size=world_size)
            store, rank, world_size = next(rendezvous)
            _last = rendezvous, store
    store.set_timeout(timedelta(seconds=timeout))
    if world_size is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, but it is {rank}.")
    return store, rank, world_size


@contextmanager
def _rendezvous_errors(init_method: str) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RendezvousError(f"The store of {init_method} can't be opened: {error}") from error


def _address(init_method: str, scheme: str, rank: int) -> tuple[str, int, int]:
    url = urlparse(init_method)
    query = parse_qs(url.query)
    if rank < 0 and "rank" in query:
        rank = int(query["rank"][0])
    if scheme == "tcp":
        if url.hostname is None or url.port is None:
            raise ValueError(f"init_method {init_method!r} has no host or port: write tcp://HOST:PORT.")
        if rank < 0:
            raise ValueError("rank parameter missing: with tcp://, pass rank to init_rpc.")
        return url.hostname, url.port, rank
    if rank < 0:
        rank = int(_variable("RANK"))
    return _variable("MASTER_ADDR"), int(_variable("MASTER_PORT")), rank


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"environment variable {name} expected, but not set. Set it, or use another init_method.")
    return value


def _tcp_store(host: str, port: int, rank: int, world_size: int, timeout: float) -> dist.Store:
    # torchrun hosts a store of its own at this address.
    is_hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return dist.TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0 and not is_hosted_by_torchrun,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        if rank == 0 and not is_hosted_by_torchrun:
            raise RendezvousError(
                f"Rank 0 can't open the store at {host}:{port}: {error}. Is the port taken, "
                "or the address another host's?"
            ) from error
        raise RendezvousError(
            f"No store answers at {host}:{port} within {timeout:.0f} s: rank 0 has not called init_rpc there. "
            "Start all workers with the same MASTER_ADDR and MASTER_PORT (or init_method)."
        ) from error
