"""The floor: a bare, blocking ping-pong of 100 bytes between two processes.

`python -m bench.floor_side` starts itself a second time as the process that answers.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time

from bench.channel import Sample, serve, take_stdout
from bench.with_gaps import sample_of

SIZE = 100
SAMPLES = 400
WARMUP = 20
GAPS = "unix-gaps"
KINDS = {
    "unix": "bare Unix-socket ping-pong",
    "tcp": "bare TCP ping-pong",
    GAPS: "bare Unix-socket ping-pong with the same gaps and work",
}
_SECONDS = struct.Struct("d")


def ping(kind: str) -> Sample:
    end = _connected(kind)
    message = bytes(SIZE)

    def call(seconds: float) -> None:
        end.sendall(_SECONDS.pack(seconds).ljust(SIZE, b"x"))
        end.recv(SIZE, socket.MSG_WAITALL)

    def sample() -> None:
        end.sendall(message)
        end.recv(SIZE, socket.MSG_WAITALL)

    return sample_of(call, burn) if kind == GAPS else sample


def pong(end: socket.socket) -> None:
    while message := end.recv(SIZE, socket.MSG_WAITALL):
        (seconds,) = _SECONDS.unpack_from(message)
        if seconds:
            burn(seconds)
        end.sendall(message)


def burn(seconds: float) -> None:
    """Keep the core busy for this time."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _connected(kind: str) -> socket.socket:
    """Start the process that answers; return our end of the connection to it."""
    if kind != "tcp":
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        for end in (ours, theirs):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with theirs:
        # it ends when our end is closed
        subprocess.Popen([sys.executable, "-m", "bench.floor_side", str(theirs.fileno())], pass_fds=[theirs.fileno()])
    return ours


def main() -> None:
    if len(sys.argv) > 1:
        os.close(0)  # the commands are for the driver
        with socket.socket(fileno=int(sys.argv[1])) as end:
            pong(end)
    else:
        serve(ping, take_stdout())


if __name__ == "__main__":
    main()
