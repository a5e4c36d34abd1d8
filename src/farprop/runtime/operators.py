"""Records torch's operators of all threads of this process, through Kineto, while a recording runs."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from typing import Any

import msgspec
import torch

from farprop._torch import is_profiled_process, profile_of_all_threads
from farprop.protocol.recording import Operator
from farprop.runtime import profiling

_log = logging.getLogger(__name__)

_MARK = "farprop: clock "  # events of ours whose times we know; a number follows
_MARKS = 20
MAX_SECONDS = 60.0  # Kineto keeps all that it records in memory, without a limit
_OPERATOR = "cpu_op"


class _TraceEvent(msgspec.Struct, gc=False):
    name: str = ""
    cat: str = ""
    ph: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0


class _Trace(msgspec.Struct):
    traceEvents: list[_TraceEvent]  # noqa: N815


_decoder = msgspec.json.Decoder(_Trace)


class OperatorRecording:
    """Records from ``start`` to ``stop``, on a thread of its own: to begin and to end takes up to seconds.

    ``problem`` says why nothing, or not all, was recorded.
    """

    def __init__(self, worker: str, max_operators: int) -> None:
        self.operators: list[Operator] = []
        self.dropped = 0
        self.problem = ""
        self._max = max_operators
        self._started = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"farprop-operators-{worker}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_started(self) -> bool:
        return self._started.is_set()

    def stop(self) -> None:
        """Stop, and read what was recorded."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._record()
        except Exception as error:
            _log.warning("farprop could not record torch's operators", exc_info=error)
            self.problem = f"torch's operators: {type(error).__name__}: {error}"
        finally:
            self._started.set()

    def _record(self) -> None:
        if is_profiled_process():
            self.problem = "torch's operators: another profile of torch's runs in this process"
            return
        profile = profile_of_all_threads()
        if profile is None:
            self.problem = "torch's operators: this torch has no Kineto that records all threads"
            return
        profile.__enter__()
        try:
            profiling.is_farprops_own = True
            marked = [_mark(number) for number in range(_MARKS)]
            self._started.set()
            if not self._stopping.wait(MAX_SECONDS):
                self.problem = f"torch's operators after the first {MAX_SECONDS:.0f} s"
        finally:
            profiling.is_farprops_own = False
            profile.__exit__(None, None, None)
        self._read(profile, marked)

    def _read(self, profile: Any, marked: list[float]) -> None:
        descriptor, path = tempfile.mkstemp(prefix="farprop-operators-", suffix=".json")
        try:
            os.close(descriptor)
            profile.export_chrome_trace(path)
            with open(path, "rb") as file:
                trace = _decoder.decode(file.read())
        finally:
            os.unlink(path)
        marks = [event for event in trace.traceEvents if event.name.startswith(_MARK)]
        if not marks:
            self.problem = "torch's operators: their clock is not known"
            return
        # Our clock was read inside of the event. So its middle is off by less than half of the shortest: microseconds.
        mark = min(marks, key=lambda event: event.dur)
        ahead = (mark.ts + mark.dur / 2) / 1e6 - marked[int(mark.name.removeprefix(_MARK))]
        found = [event for event in trace.traceEvents if event.cat == _OPERATOR and event.ph == "X"]
        self.dropped = max(0, len(found) - self._max)
        self.operators = [
            Operator(event.name, int(event.tid), event.ts / 1e6 - ahead, (event.ts + event.dur) / 1e6 - ahead)
            for event in found[: self._max]
        ]


def _mark(number: int) -> float:
    with torch.autograd.profiler.record_function(f"{_MARK}{number}"):
        return time.monotonic()
