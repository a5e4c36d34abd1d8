"""Tools of attackers: write access to the store, a proxy between workers, the identity of another user."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import farprop.distributed  # noqa: F401 - it has the backend
import farprop.rpc as rpc
from farprop.transport import sockets
from farprop.transport.tls import Certificates, TlsSocket
from tests.calls import functions as f

Address = tuple[str, int]
_connect_tcp = sockets._connect_tcp
NOBODY = 65534


class Store:
    """A job's store, and what an attacker can do who reaches its port and knows no secret."""

    def __init__(self) -> None:
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=50)
        )
        self.environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun: the workers don't start one of their own
        }

    def find(self, name: str) -> str:
        """Wait for the value that workers store under ``name``; returns its full key."""
        deadline = time.monotonic() + 50
        while time.monotonic() < deadline:
            found = [key for key in self.store.list_keys() if key.endswith(f"/{name}")]
            if found:
                return str(found[0])
            time.sleep(0.005)  # the store has no notification of new keys
        raise AssertionError(f"no worker has set {name}")

    def get(self, name: str) -> bytes:
        return bytes(self.store.get(self.find(name)))

    def set(self, name: str, value: bytes, beside: str | None = None) -> None:
        """Overwrite a value. If it does not exist yet, ``beside`` names one that does."""
        key = self.find(name) if beside is None else self.find(beside)[: -len(beside)] + name
        self.store.set(key, value)  # type: ignore[arg-type]


class Proxy:
    """A proxy between a dialer and ``target`` that records everything. ``change(direction, number, data)`` returns the
    bytes to pass on: direction is "there" or "back", number counts the bytes that passed in it before.
    """

    def __init__(self, target: Address, change: Callable[[str, int, bytes], bytes | None] | None = None) -> None:
        self.target = target
        self.recorded: dict[str, bytearray] = {"there": bytearray(), "back": bytearray()}
        self.change = change
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._start(self._accept)

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._start(self.serve, sock)

    def serve(self, dialer: socket.socket) -> None:
        """Relay one connection in both directions."""
        with dialer, socket.create_connection(self.target) as listener:
            self.carry(dialer, listener)

    def carry(self, dialer: Any, listener: Any) -> None:
        ways = {dialer.fileno(): ("there", dialer, listener), listener.fileno(): ("back", listener, dialer)}
        while not self._is_closed:
            ready = [fd for fd, (_, source, _) in ways.items() if getattr(source, "has_more", False)]
            ready = ready or select.select(list(ways), [], [], 0.1)[0]
            for descriptor in ready:
                direction, source, sink = ways[descriptor]
                try:
                    data: bytes | None = source.recv(1 << 16)
                    if not data:
                        return
                    before = len(self.recorded[direction])
                    self.recorded[direction] += data
                    if self.change is not None:
                        data = self.change(direction, before, data)
                    if data is None:
                        return
                    sink.sendall(data)
                except BlockingIOError:
                    continue
                except OSError:
                    return

    def close(self) -> None:
        self._is_closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


class TlsRelay(Proxy):
    """Terminates TLS on both sides with its own certificate and relays the plaintext: it could read and change
    everything if the workers accepted it.
    """

    def serve(self, dialer: socket.socket) -> None:
        certificates = Certificates(None)
        with dialer, socket.create_connection(self.target) as listener:
            inside, _ = certificates.accept(dialer)
            _make_tls(inside, dialer, b"")
            outside = certificates.dial(listener)
            _make_tls(outside, listener, outside.handshake(b"")[1])
            self.carry(inside, outside)


def _make_tls(tls: TlsSocket, sock: socket.socket, to_send: bytes) -> None:
    is_made = False
    while not is_made:
        sock.sendall(to_send)
        is_made, to_send = tls.handshake(sock.recv(1 << 16))
    sock.sendall(to_send)


@contextmanager
def closing_all(*proxies: Proxy) -> Iterator[None]:
    try:
        yield
    finally:
        for proxy in proxies:
            proxy.close()


# Run by workers


def redirect(by_target: dict[Address, Address]) -> None:
    """Redirects the connections that this process dials."""

    def redirected(address: Address, seconds: float) -> socket.socket:
        return _connect_tcp(by_target.get(tuple(address), address), seconds)

    sockets._connect_tcp = redirected


def start_or_say(rank: int, world_size: int = 2) -> str:
    """Join a job; returns an empty text, or the error."""
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=20)
    try:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def join_group_or_say(rank: int) -> str:
    """Join a process group of two; returns an empty text, or the error."""
    try:
        dist.init_process_group("farprop", rank=rank, world_size=2)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def call_or_say(to: str, function: Any = f.add, *args: Any) -> Any:
    try:
        return rpc.rpc_sync(to, function, args=args or (1,))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def touch(path: str) -> None:
    """The function that an attacker wants a worker to run."""
    with open(path, "w") as file:
        file.write(str(os.getpid()))
