"""The floor: a bare, blocking ping-pong of 100 bytes between two processes, or a hand-over between two threads.

`python -m bench.floor_side` starts itself a second time as the process that answers.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time

from bench.channel import Sample, serve, take_stdout
from bench.with_gaps import sample_of

SIZE = 100
SAMPLES = 400
WARMUP = 20
GAPS = "unix-gaps"
THREAD_GAPS = "thread-gaps"
WITH_GAPS = (GAPS, THREAD_GAPS)
KINDS = {
    "unix": "bare Unix-socket ping-pong",
    "tcp": "bare TCP ping-pong",
    GAPS: "bare Unix-socket ping-pong with the same gaps and work",
    THREAD_GAPS: "bare hand-over to another thread and back, with the same gaps and work",
}
_SECONDS = struct.Struct("d")


def ping(kind: str) -> Sample:
    return hand_over() if kind == THREAD_GAPS else ping_on(_connected(kind), SIZE, kind == GAPS)


def hand_over() -> Sample:
    """Have another thread of this process work: two bare locks, which it and the caller wait for in turn."""
    asked, answered = threading.Lock(), threading.Lock()
    work = [0.0]

    def serve_for_ever() -> None:
        while asked.acquire():
            burn(work[0])
            answered.release()

    def call(seconds: float) -> None:
        work[0] = seconds
        asked.release()
        answered.acquire()

    asked.acquire()
    answered.acquire()
    threading.Thread(target=serve_for_ever, daemon=True).start()
    return sample_of(call, burn)


def ping_on(ends: tuple[socket.socket, socket.socket], size: int, with_gaps: bool = False) -> Sample:
    """Give the second end to a process that answers `size` bytes with as many, and send them on the first."""
    end, theirs = ends
    with theirs:
        # it ends when our end is closed
        command = [sys.executable, "-m", "bench.floor_side", str(theirs.fileno()), str(size)]
        subprocess.Popen(command, pass_fds=[theirs.fileno()])
    message = bytes(size)

    def call(seconds: float) -> None:
        end.sendall(_SECONDS.pack(seconds).ljust(size, b"x"))
        end.recv(size, socket.MSG_WAITALL)

    def sample() -> None:
        end.sendall(message)
        end.recv(size, socket.MSG_WAITALL)

    return sample_of(call, burn) if with_gaps else sample


def pong(end: socket.socket, size: int) -> None:
    while message := end.recv(size, socket.MSG_WAITALL):
        (seconds,) = _SECONDS.unpack_from(message)
        if seconds:
            burn(seconds)
        end.sendall(message)


def burn(seconds: float) -> None:
    """Keep the core busy for this time."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """A TCP connection to the listener: both ends."""
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def _connected(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind != "tcp":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return connect(listener)


def main() -> None:
    if len(sys.argv) > 1:
        os.close(0)  # the commands are for the driver
        with socket.socket(fileno=int(sys.argv[1])) as end:
            pong(end, int(sys.argv[2]))
    else:
        serve(ping, take_stdout())


if __name__ == "__main__":
    main()
