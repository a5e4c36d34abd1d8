"""The child's side: a process that measures when its parent asks, and otherwise sleeps in a read.

It reads commands from stdin and writes one reply to each to the former stdout, one JSON object per line. End of file
means stop. It uses the standard library only, because the peers' venvs import it, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Sample = Callable[[], object]


class Measured(float):
    """What a sample that measures itself returns: its time in µs."""


@dataclass(frozen=True)
class Staged:
    """A sample with a part before it that is not timed, such as waiting for other ranks."""

    before: Callable[[], object]
    run: Callable[[], object]

    def __call__(self) -> None:
        self.before()
        self.run()


def serve(prepare: Callable[[str], Sample], reply_fd: int) -> None:
    """Answer commands until stdin ends. `prepare` makes the sample function of a case, once per case."""
    prepared: dict[str, Sample] = {}
    with os.fdopen(reply_fd, "w") as replies:

        def reply(message: dict[str, Any]) -> None:
            replies.write(json.dumps(message) + "\n")
            replies.flush()

        reply({"ready": os.getpid()})
        for line in sys.stdin:
            try:
                reply(_answer(json.loads(line), prepare, prepared))
            except Exception as error:  # the table says what failed; the other cases go on
                reply({"error": f"{type(error).__name__}: {error}"})


def _answer(command: dict[str, Any], prepare: Callable[[str], Sample], prepared: dict[str, Sample]) -> dict[str, Any]:
    name = command["case"]
    warmup = command["warmup"]
    if name not in prepared:
        prepared[name] = prepare(name)
        # the first round also fills caches and pools
        warmup += max(1, command["samples"] // 5)
    sample = prepared[name]
    for _ in range(warmup):
        sample()
    if command.get("untimed"):
        # a list of times would look like a leak
        for _ in range(command["samples"]):
            sample()
        return {"us": []}
    return {"us": _timed(sample, command["samples"], command["seconds"])}


def _timed(sample: Sample, count: int, seconds: float) -> list[float]:
    """Times of up to `count` samples, in µs. There are fewer, but at least one, if they take longer than `seconds`."""
    clock = time.perf_counter
    end = clock() + seconds
    taken: list[float] = []
    before = None
    if isinstance(sample, Staged):
        before, sample = sample.before, sample.run
    while len(taken) < count:
        if before is not None:
            before()
        start = clock()
        result = sample()
        now = clock()
        taken.append(float(result) if isinstance(result, Measured) else (now - start) * 1e6)
        if now > end:
            break
    return taken


def die_with_parent() -> None:
    """End this process with its parent. A frozen child would not see the end of its stdin."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def take_stdout() -> int:
    """Keep stdout for replies; everything else that is printed goes to stderr. Call it before other imports print."""
    reply_fd = os.dup(1)
    os.dup2(2, 1)
    return reply_fd
