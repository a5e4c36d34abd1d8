"""The leak check: the resources that a process holds, and which of them are new.

``before = snapshot()``, run something, then ``left_behind(before)`` names each thread, child process, file
descriptor (sockets are these too), ``/dev/shm`` entry of this run, farprop file and farprop memory mapping that is
still there and was not before. If nothing is new, that costs one more snapshot, less than a millisecond; new
resources have ``GRACE`` seconds to go away.

Linux only: all of it is read from ``/proc``.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, fields
from multiprocessing import process
from typing import Any

GRACE = 5.0

# A mapping outlives the descriptor it was made from, so only the maps tell that shared memory is still held.
_MAPPING = re.compile(rb"^(\S+) .*?(/memfd:farprop[^\n]*)$", re.MULTILINE)

# Resources that the harness itself keeps for the whole run. `exempt` adds to these.
_exempt_pids: set[int] = set()
_exempt_fds: set[int] = set()
_parents: set[int] = set()


@dataclass(frozen=True)
class Snapshot:
    """The resources of the process at one moment."""

    threads: frozenset[threading.Thread]
    processes: frozenset[int]
    descriptors: frozenset[tuple[int, str]]
    shared_memory: frozenset[str]
    files: frozenset[str]
    mappings: frozenset[str]

    def since(self, before: Snapshot) -> Snapshot:
        """The resources that are not in ``before``."""
        return Snapshot(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self))

    def describe(self) -> list[str]:
        """A line or more for each resource, with details that help to find its creator."""
        return [
            *(_describe_thread(t) for t in sorted(self.threads, key=lambda t: t.name)),
            *(_describe_process(pid) for pid in sorted(self.processes)),
            *(_describe_descriptor(fd, target) for fd, target in sorted(self.descriptors)),
            *(f"shared memory /dev/shm/{name}" for name in sorted(self.shared_memory)),
            *(f"file {path}" for path in sorted(self.files)),
            *(f"memory mapping {text}" for text in sorted(self.mappings)),
        ]


def exempt(*, pid: int | None = None, fd: int | None = None) -> None:
    """Don't count this process or descriptor of ours: it is meant to stay. Its child processes do count."""
    if pid is not None:
        _exempt_pids.add(pid)
        _parents.add(pid)
    if fd is not None:
        _exempt_fds.add(fd)


def count_again(*, pid: int | None = None, fd: int | None = None) -> None:
    """Undo ``exempt``; the number may soon be reused."""
    _exempt_pids.discard(pid or -1)
    _parents.discard(pid or -1)
    _exempt_fds.discard(-1 if fd is None else fd)


def snapshot() -> Snapshot:
    """The resources that count, now."""
    helper_pids, helper_fds = _python_helpers()
    return Snapshot(
        threads=frozenset(t for t in threading.enumerate() if _counts(t)),
        processes=_processes() - helper_pids,
        descriptors=frozenset(d for d in _descriptors() if d[0] not in helper_fds),
        shared_memory=frozenset(name for name in os.listdir("/dev/shm") if _may_be_ours(name)),
        files=frozenset(_files()),
        mappings=frozenset(_mappings()),
    )


def left_behind(before: Snapshot, grace: float | None = None) -> list[str]:
    """Descriptions of what is new since ``before`` and does not go away within ``grace`` seconds."""
    if not snapshot().since(before):
        return []
    _drop_what_farprop_keeps()
    # Only now: a collection costs far more than all the rest. Cycles, such as those that a caught exception
    # makes, keep sockets open until then.
    gc.collect()
    deadline = time.monotonic() + (GRACE if grace is None else grace)
    pause = 0.001
    while new := _without_strangers(snapshot().since(before)):
        if time.monotonic() >= deadline:
            return new.describe()
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        if pause == 0.05:
            gc.collect()
    return []


def warm_up() -> None:
    """Let torch create now the resources that it creates once and keeps: the first store leaves a pipe of libuv."""
    from torch.distributed import TCPStore

    TCPStore("127.0.0.1", 0, is_master=True)


def mark_semaphores() -> None:
    """Have multiprocessing name the semaphores of this process, and of its children, after this run of the tests."""
    process.current_process()._config["semprefix"] = f"/{_run()}"  # type: ignore[attr-defined]


@functools.cache
def _run() -> str:
    """A name of this run of the tests: its directory for temporary files, which all of its processes share."""
    return os.path.basename(tempfile.gettempdir())


def _may_be_ours(name: str) -> bool:
    """Whether an entry of ``/dev/shm`` can be of this run. Nothing tells who made an entry but its name.

    The semaphores of other programs come and go at any time, and those of a program that was killed stay. Programs
    that a test starts by their command lines are not marked: their semaphores don't count either.
    """
    return not name.startswith("sem.") or name.startswith(f"sem.{_run()}-")


def _drop_what_farprop_keeps() -> None:
    # On purpose, it keeps the store where workers met until the next init_rpc.
    rpc: Any = sys.modules.get("farprop.rpc")
    if rpc is not None and not rpc._is_current_rpc_agent_set():
        rpc.store._last = None


def _counts(thread: threading.Thread) -> bool:
    if not isinstance(thread, threading._DummyThread):
        return True
    # Python makes such an object for a thread that it did not start, and keeps it after that thread's end.
    # Torch's autograd threads are of this kind, and they are meant to stay.
    try:
        with open(f"/proc/self/task/{thread.native_id}/comm") as comm:
            return not comm.read().startswith("pt_")
    except OSError:
        return False


def _processes() -> frozenset[int]:
    pids = _children("self")
    for parent in tuple(_parents):
        pids |= _children(parent)
    return frozenset(pids - _exempt_pids)


def _children(pid: int | str) -> set[int]:
    found: set[int] = set()
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as children:
                found.update(map(int, children.read().split()))
        except (FileNotFoundError, ProcessLookupError):
            pass  # the thread has ended since it was listed
    return found


def _descriptors() -> set[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor that listed the directory, or one that another thread has closed since
        if int(name) not in _exempt_fds:
            found.add((int(name), target))
    return found


def _files() -> set[str]:
    """Farprop's files in the directory for temporary ones. A directory may stay, what is in it may not."""
    found = _found_files()
    if any(path.endswith(".job") for path in found):
        from farprop.runtime.job_files import find_files  # not before: workers of tests begin without farprop

        find_files()  # removes the files of workers that were killed, as the next job would
        found = _found_files()
    return found


def _found_files() -> set[str]:
    found: set[str] = set()
    for entry in os.scandir(tempfile.gettempdir()):
        if not entry.name.startswith(("farprop", ".farprop")):
            continue
        if entry.is_dir(follow_symlinks=False):
            for parent, _, names in os.walk(entry.path):
                found.update(os.path.join(parent, name) for name in names)
        else:
            found.add(entry.path)
    return found


def _mappings() -> list[str]:
    with open("/proc/self/maps", "rb", buffering=0) as maps:
        text = maps.read()
    if b"/memfd:farprop" not in text:
        return []
    return [f"{where.decode()} of {name.decode()}" for where, name in _MAPPING.findall(text)]


def _python_helpers() -> tuple[set[int], set[int]]:
    """Processes and descriptors that multiprocessing keeps until the end once it has made them."""
    pids: set[int] = set()
    fds: set[int] = set()
    if tracker := sys.modules.get("multiprocessing.resource_tracker"):
        pids.add(tracker._resource_tracker._pid)
        fds.add(tracker._resource_tracker._fd)
    if forkserver := sys.modules.get("multiprocessing.forkserver"):
        pids.add(forkserver._forkserver._forkserver_pid)
        fds.add(forkserver._forkserver._forkserver_alive_fd)
    return pids, fds


def _without_strangers(new: Snapshot) -> Snapshot:
    """Leave out shared memory that only unrelated processes hold: all processes share the directory."""
    if not new.shared_memory:
        return new
    ours = _descendants("self")
    held: set[int] = set()  # by inode: the C library makes a semaphore under another name than it has later
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) not in ours:
            try:
                with open(f"/proc/{pid}/maps", errors="replace") as maps:
                    held.update(map(int, re.findall(r" (\d+) +/dev/shm/", maps.read())))
            except OSError:
                pass  # it has ended, or is not ours to look at
    values = {f.name: getattr(new, f.name) for f in fields(new)}
    return Snapshot(**{**values, "shared_memory": frozenset(n for n in new.shared_memory if _inode(n) not in held)})


def _inode(name: str) -> int:
    """The inode of an entry of the directory; -1 if it is gone."""
    try:
        return os.stat(f"/dev/shm/{name}").st_ino
    except OSError:
        return -1


def _descendants(pid: int | str) -> set[int]:
    found = {os.getpid() if pid == "self" else int(pid)}
    for child in _children(pid):
        found |= _descendants(child)
    return found


def _describe_thread(thread: threading.Thread) -> str:
    text = f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"
    if frame := sys._current_frames().get(thread.ident or 0):
        stack = "".join(traceback.format_stack(frame, limit=8))
        text += ", now at\n" + stack.rstrip()
    return text


def _describe_process(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as cmdline:
            command = cmdline.read().replace("\0", " ").strip()
        with open(f"/proc/{pid}/stat") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return f"process {pid}"
    if state == "Z":
        return f"process {pid}: ended, but nobody has waited for it"
    return f"process {pid}: {command[:200]}"


def _describe_descriptor(fd: int, target: str) -> str:
    text = f"file descriptor {fd}: {target}"
    if target.startswith("socket:"):
        try:
            with socket.socket(fileno=os.dup(fd)) as copy:
                text += f" {copy.family.name} at {copy.getsockname()!r}"
                text += f" to {copy.getpeername()!r}"
        except OSError:
            pass  # closed meanwhile, or not connected
    return text
