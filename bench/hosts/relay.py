"""A cable with a delay: `python -m bench.hosts.relay INTERFACE INTERFACE SECONDS` passes frames on, each after SECONDS.

It does what netem does, where the kernel has none. Frames keep the kernel's note about their segments, so that large
ones need not be cut up here. It ends with its input.
"""

from __future__ import annotations

import ctypes
import select
import socket
import sys
import time
from collections import deque

_ALL_PROTOCOLS = 0x0003
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_LARGEST = 1 << 17
_SET_TIMER_SLACK = 29


def _tap(interface: str) -> socket.socket:
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    tap.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    tap.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for size in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        tap.setsockopt(socket.SOL_SOCKET, size, 64 << 20)
    tap.bind((interface, _ALL_PROTOCOLS))
    tap.setblocking(False)
    return tap


def relay(one: socket.socket, other: socket.socket, seconds: float) -> None:
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()  # when it is due, where to, and the frame
    across = {one: other, other: one}
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([one, other, sys.stdin], [], [], pause)
        if sys.stdin in ready:
            return
        due = time.monotonic() + seconds
        for tap, opposite in across.items():
            try:
                while tap in ready:
                    waiting.append((due, opposite, tap.recv(_LARGEST)))
            except BlockingIOError:
                pass
        while waiting and waiting[0][0] <= time.monotonic():
            _, opposite, frame = waiting.popleft()
            try:
                opposite.send(frame)
            except OSError:
                pass  # as any cable, it loses what the other end has no room for


def main(one: str, other: str, seconds: float) -> None:
    # A sleep ends up to 50 µs late by default.
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1)
    with _tap(one) as first, _tap(other) as second:
        print("ready", flush=True)
        relay(first, second, seconds)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
