"""What ``farprop run`` says when workers have failed: which was first, its traceback, what became of the others."""

from __future__ import annotations

import signal
from typing import Any, NamedTuple

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from farprop.protocol.foreign_text import one_line
from farprop.protocol.waits import listed

_MAX_TEXT = 300  # characters of an error, for workers that were not first
_NOTES = {
    signal.SIGKILL: "Somebody killed it, or the system was out of memory (see dmesg).",
    signal.SIGSEGV: "It crashed in native code.",
    signal.SIGABRT: "It aborted in native code; its output says why.",
}


class Failure(NamedTuple):
    """How one worker ended. ``order`` is smaller for those that failed earlier."""

    rank: int
    pid: int
    code: int
    order: tuple[int, float]
    summary: str
    traceback: str


def report(error: ChildFailedError) -> tuple[int, str]:
    """The exit code of the launcher, and what it says.

    Args:
        error: what the elastic agent says.
    """
    failures = sorted((_failure(rank, found) for rank, found in error.failures.items()), key=lambda one: one.order)
    first, *others = failures
    lines = [f"farprop run: worker{first.rank} (process {first.pid}) failed: {_how(first)}"]
    if first.traceback:
        lines.append(first.traceback.rstrip())
    lines += [f"farprop run: then worker{one.rank} failed: {_how(one)}" for one in others if not _was_ended(one)]
    ended = [f"worker{one.rank}" for one in others if _was_ended(one)]
    if ended:
        lines.append(f"farprop run: then it ended {listed(ended, 8)}.")
    return first.code if first.code > 0 else 128 - first.code, "\n".join(lines)


def _was_ended(failure: Failure) -> bool:
    """Whether the launcher has ended it, because another had failed."""
    return failure.code == -signal.SIGTERM and not failure.summary


def _failure(rank: int, found: ProcessFailure) -> Failure:
    data: Any = found.error_file_data
    message = data.get("message")
    if not isinstance(message, dict):
        # It has written nothing: it was killed, or called sys.exit. Those that we have ended ourselves come last.
        last = 2 if found.exitcode == -signal.SIGTERM else 0
        return Failure(rank, found.pid, found.exitcode, (last, float(found.timestamp)), "", "")
    known = data.get("farprop", {})
    order = (int(known.get("is_consequence", False)), float(known.get("time", found.timestamp)))
    return Failure(rank, found.pid, found.exitcode, order, message["message"], message["extraInfo"]["py_callstack"])


def _how(failure: Failure) -> str:
    if failure.summary:
        return one_line(failure.summary, _MAX_TEXT)
    if failure.code >= 0:
        return f"it ended with exit code {failure.code}."
    name = signal.Signals(-failure.code)
    return f"it was ended by signal {-failure.code} ({name.name}). {_NOTES.get(name, '')}".rstrip()
