"""A switch made of Python: ``python -m tests.support.relay SEED INTERFACE...`` passes frames on between interfaces.

It does what netem does, where the kernel has none: frames are delayed, lost, doubled and put out of order, by chance.
Each interface has two ways, ``in`` from its host and ``out`` to its host, and each way has settings of its own. A line
of JSON on its input changes them while it runs (see ``links``), and is answered with a line. It ends with its input.

Frames keep the kernel's note about their segments, so that large ones need not be cut up here.
"""

from __future__ import annotations

import ctypes
import heapq
import json
import os
import random
import select
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

_ALL_PROTOCOLS = 0x0003
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_NOTE = 10  # bytes of the kernel's note in front of each frame
_LARGEST = 1 << 17
_SET_TIMER_SLACK = 29
_READS = 64  # frames from one interface before the others have their turn
_OVERTAKEN = 0.003  # seconds by which a frame is late that others overtake


@dataclass(slots=True)
class Way:
    """One direction of a cable."""

    delay: float = 0.0  # seconds
    rate: float = 0.0  # bytes a second; 0: no limit
    queue: float = 0.1  # seconds that a frame may wait for its turn; with a longer queue it is lost
    loss: float = 0.0  # these are probabilities
    double: float = 0.0
    reorder: float = 0.0
    free_at: float = 0.0  # when all that it has taken is through

    def arrivals(self, now: float, size: int, dice: random.Random) -> list[float]:
        """When a frame arrives that is sent now: never, once or twice."""
        if self.loss and dice.random() < self.loss:
            return []
        at = now
        if self.rate:
            at = max(now, self.free_at)
            if at - now > self.queue:
                return []
            self.free_at = at = at + size / self.rate
        at += self.delay
        if self.reorder and dice.random() < self.reorder:
            at += _OVERTAKEN
        return [at, at] if self.double and dice.random() < self.double else [at]


class _Port:
    def __init__(self, interface: str) -> None:
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
        tap.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        tap.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        for size in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            tap.setsockopt(socket.SOL_SOCKET, size, 64 << 20)
        tap.bind((interface, _ALL_PROTOCOLS))
        tap.setblocking(False)
        self.tap = tap
        self.ways = {"in": Way(), "out": Way()}

    def send(self, frame: bytes) -> None:
        try:
            self.tap.send(frame)
        except OSError:
            pass  # as any cable, it loses what the other end has no room for


class Relay:
    """The switch."""

    def __init__(self, interfaces: list[str], seed: str) -> None:
        self._ports = [_Port(interface) for interface in interfaces]
        self._dice = random.Random(seed)
        self._places: dict[bytes, _Port] = {}  # by the address of a host's interface
        self._waiting: list[tuple[float, int, _Port, bytes]] = []  # when it is due, a number, where to, and the frame
        self._taken = 0
        self._commands = b""

    def run(self) -> None:
        taps = [port.tap for port in self._ports]
        while True:
            pause = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            ready, _, _ = select.select([*taps, sys.stdin], [], [], pause)
            if sys.stdin in ready and not self._obey():
                return
            for port in self._ports:
                if port.tap in ready:
                    self._read(port)
            self._send_due()

    def _read(self, port: _Port) -> None:
        for _ in range(_READS):
            try:
                frame = port.tap.recv(_LARGEST)
            except OSError:  # there is no more, or the interface is down
                return
            self._take(port, frame)

    def _take(self, port: _Port, frame: bytes) -> None:
        now = time.monotonic()
        to, source = frame[_NOTE : _NOTE + 6], frame[_NOTE + 6 : _NOTE + 12]
        self._places[source] = port
        known = self._places.get(to)
        targets = [known] if known is not None else [other for other in self._ports if other is not port]
        for at_switch in port.ways["in"].arrivals(now, len(frame), self._dice):
            for target in targets:
                for due in target.ways["out"].arrivals(at_switch, len(frame), self._dice):
                    self._taken += 1
                    heapq.heappush(self._waiting, (due, self._taken, target, frame))

    def _send_due(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(self._waiting)
            target.send(frame)

    def _obey(self) -> bool:
        """Follow the commands that have come; False at the end of the input."""
        more = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, self._commands = (self._commands + more).split(b"\n")
        for line in lines:
            command: dict[str, Any] = json.loads(line)
            for way in command["ways"]:
                self._ports[command["port"]].ways[way] = Way(**command["settings"])
            print("done", flush=True)
        return bool(more)


def main(seed: str, *interfaces: str) -> None:
    # A sleep ends up to 50 µs late by default.
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1)
    os.nice(-10)  # cables don't wait for programs
    relay = Relay(list(interfaces), seed)
    print("ready", flush=True)
    relay.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
