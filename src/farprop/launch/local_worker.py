"""The program of a local worker, run as a script. Until it knows the driver's ``sys.path``, it imports no farprop."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import IO

END_SECONDS = 5.0  # that a worker has to end


class _DriverPipe:
    """The pipe from the driver. It has one line, and ends with the driver or when the driver stops the pool."""

    def __init__(self) -> None:
        self._file: IO[bytes] = os.fdopen(os.dup(0), "rb")
        # What the worker starts must not inherit the pipe as its input.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self.ended = threading.Event()
        self.has_joined = False

    def read_line(self) -> bytes:
        return self._file.readline()

    def watch(self) -> None:
        threading.Thread(target=self._watch, name="farprop-driver-pipe", daemon=True).start()

    def _watch(self) -> None:
        self._file.read()
        if not self.has_joined:
            os._exit(1)
        self.ended.set()


def main() -> None:
    pipe = _DriverPipe()
    line = pipe.read_line()
    if not line.endswith(b"\n"):
        return  # the driver has died
    given = json.loads(line)
    sys.path[:] = given["path"]
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    pipe.watch()

    import farprop.rpc as rpc
    from farprop.launch.spec import WorkerSpec, join

    join(WorkerSpec(**given["spec"]), pipe.ended.set)
    pipe.has_joined = True
    pipe.ended.wait()
    threading.Thread(target=_exit_late, name="farprop-exit", daemon=True).start()
    rpc.shutdown(graceful=False)


def _exit_late() -> None:
    """End the process if it does not end by itself: it waits for threads of the program's, for example."""
    time.sleep(END_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
