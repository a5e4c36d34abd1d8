"""`python -m bench.tls_floor`: what TLS costs a bare ping-pong of two processes, without farprop's calls.

It measures in turns plain TCP, OpenSSL on memory as farprop uses it, and OpenSSL on the socket (Python's `SSLSocket`).
"""

from __future__ import annotations

import os
import socket
import ssl
import statistics
import threading
import time
from typing import Any

from farprop.transport.tls import Certificates

ROUNDS, SAMPLES = 7, 2000
MESSAGE = b"x" * 100


def _tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for sock in (ours, theirs):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def _on_memory(certificates: Certificates) -> tuple[Any, Any]:
    ours, theirs = _tcp()
    dialer, (listener, _) = certificates.dial(ours), certificates.accept(theirs)
    is_made, to_send = dialer.handshake(b"")
    while not is_made:
        is_made, to_send = dialer.handshake(listener.handshake(to_send)[1])
    listener.handshake(to_send)
    return dialer, listener


def _on_socket(certificates: Certificates) -> tuple[Any, Any]:
    ours, theirs = _tcp()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    server, _ = certificates._for_listener()
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(server.wrap_socket(theirs, server_side=True)))
    thread.start()
    wrapped = client.wrap_socket(ours)
    thread.join()
    return wrapped, made[0]


def main() -> None:
    certificates = Certificates(None)
    ways = {"plain": _tcp(), "on memory": _on_memory(certificates), "on the socket": _on_socket(certificates)}
    room = memoryview(bytearray(1 << 16))
    if os.fork() == 0:
        for _ in range(ROUNDS):
            for _, answerer in ways.values():
                for _ in range(SAMPLES):
                    answerer.send(room[: answerer.recv_into(room)])
        os._exit(0)
    medians: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, (caller, _) in ways.items():
            times = []
            for _ in range(SAMPLES):
                began = time.perf_counter()
                caller.send(MESSAGE)
                caller.recv_into(room)
                times.append(time.perf_counter() - began)
            medians[way].append(statistics.median(times) * 1e6)
    os.wait()
    for way, each in medians.items():
        ratios = [one / plain for one, plain in zip(each, medians["plain"], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{way:<14} {statistics.median(each):6.0f} µs, {statistics.median(ratios):.2f} x plain ({spread})")


if __name__ == "__main__":
    main()
