"""What attackers have at hand: a store that they can write to, a place in the path, the identity of another user."""

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

import farprop.rpc as rpc
from farprop.transport import sockets
from farprop.transport.tls import Certificates, TlsSocket
from tests.calls import functions as f

Address = tuple[str, int]
NOBODY = 65534


class Store:
    """A job's store, and what somebody can do with it who reaches its port and knows nothing else."""

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
        """The whole key of the value that workers put under ``name``, as soon as it is there."""
        deadline = time.monotonic() + 50
        while time.monotonic() < deadline:
            found = [key for key in self.store.list_keys() if key.endswith(f"/{name}")]
            if found:
                return str(found[0])
            time.sleep(0.005)  # the store tells nobody of new keys
        raise AssertionError(f"no worker has set {name}")

    def get(self, name: str) -> bytes:
        return bytes(self.store.get(self.find(name)))

    def set(self, name: str, value: bytes, beside: str | None = None) -> None:
        """Overwrite a value; ``beside`` names one that is there, if this one is not there yet."""
        key = self.find(name) if beside is None else self.find(beside)[: -len(beside)] + name
        self.store.set(key, value)  # type: ignore[arg-type]


class Proxy:
    """Sits between a dialler and ``target``. ``change(direction, number, data)`` says what becomes of bytes that pass:
    direction "there" or "back", and the number of bytes that passed in it before. Everything is recorded.
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

    def serve(self, dialler: socket.socket) -> None:
        """One connection: pass on what each side says."""
        with dialler, socket.create_connection(self.target) as listener:
            self.carry(dialler, listener)

    def carry(self, dialler: Any, listener: Any) -> None:
        ways = {dialler.fileno(): ("there", dialler, listener), listener.fileno(): ("back", listener, dialler)}
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
    """Ends TLS on both sides, with a certificate of its own, and passes on what is inside: it reads and could change
    everything, if the workers let it.
    """

    def serve(self, dialler: socket.socket) -> None:
        certificates = Certificates(None)
        with dialler, socket.create_connection(self.target) as listener:
            inside, _ = certificates.accept(dialler)
            _make_tls(inside, dialler, b"")
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
    """The network leads what this process dials somewhere else."""
    connect = socket.create_connection

    class Redirected:
        """The module ``socket`` with another ``create_connection``."""

        def __getattr__(self, name: str) -> Any:
            return getattr(socket, name)

        def create_connection(self, address: Any, **options: Any) -> socket.socket:
            return connect(by_target.get(tuple(address), address), **options)

    sockets.socket = Redirected()  # type: ignore[assignment]


def start_or_say(rank: int, world_size: int = 2) -> str:
    """Join a job; an empty text, or why it failed."""
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=20)
    try:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def call_or_say(to: str, function: Any = f.add, *args: Any) -> Any:
    try:
        return rpc.rpc_sync(to, function, args=args or (1,))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def touch(path: str) -> None:
    """What an attacker would have a worker run."""
    with open(path, "w") as file:
        file.write(str(os.getpid()))
