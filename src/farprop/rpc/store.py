"""Opening the store through which workers find each other: ``env://``, ``tcp://``, ``file://``, a c10d ``Store``, or
any other URL that torch supports.

``env://`` and ``tcp://`` are opened here and not by torch's rendezvous, which makes rank 0 wait silently for workers
that may never start. Here rank 0 does not wait; the agent finds out and reports who is missing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from farprop._torch import create_store
from farprop.errors import RendezvousError
from farprop.rpc import launchers
from farprop.runtime.rendezvous import is_agents_port
from farprop.runtime.store_file import StoreFile

# The last store of this process, and what keeps it open. It stays open until the next one is opened: if this process
# hosts the store, other workers may still read from it, or call init_rpc again with the same address.
_last: Any = None
_LISTENER_SECONDS = 2.0


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
        _prepare_file(options.init_method)
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
            _prepare_file(init_method)
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


def _prepare_file(init_method: str) -> None:
    url = urlparse(init_method)
    if url.scheme == "file" or "://" not in init_method:
        StoreFile(url.path).prepare(to_write=True)  # torch's store writes to it when it is made


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
    if rank >= 0 and os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        return _variable("MASTER_ADDR"), int(_variable("MASTER_PORT")), rank
    launched = launchers.launched()
    if launched is None:
        return _variable("MASTER_ADDR"), int(_variable("MASTER_PORT")), int(_variable("RANK")) if rank < 0 else rank
    host, port = launched.address()
    return host, port, launched.rank if rank < 0 else rank


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"environment variable {name} expected, but not set. Set it, or use another init_method.")
    return value


def _tcp_store(host: str, port: int, rank: int, world_size: int, timeout: float) -> dist.Store:
    is_hosted_by_torchrun = is_agents_port(port)
    end = time.monotonic() + timeout
    if rank != 0 or is_hosted_by_torchrun:
        await_listener(host, port, min(timeout, _LISTENER_SECONDS))
    try:
        return dist.TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0 and not is_hosted_by_torchrun,
            timeout=timedelta(seconds=max(0.1, end - time.monotonic())),
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


def await_listener(host: str, port: int, seconds: float) -> None:
    """Wait for a while until something listens at an address. Torch's store would sleep for up to a second after its
    first attempt, and most workers start within milliseconds of each other.
    """
    end = time.monotonic() + seconds
    pause = 0.01
    while (left := end - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), left).close()
        except ConnectionRefusedError:
            time.sleep(pause)
            pause = min(2 * pause, 0.1)  # each attempt looks the host's name up
        except OSError:
            return  # what it means is the store's to say
        else:
            return
