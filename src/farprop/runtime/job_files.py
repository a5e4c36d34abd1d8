"""The files by which a job is found from outside: one for each worker, in the directory of its user's jobs.

A worker holds a lock on its file while it lives. The system releases the lock when the process ends, however it ends: a
file that nobody has locked is left over, and who next looks or joins removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from farprop.errors import ProtocolError, UsageError
from farprop.protocol.inspection import JobFile, from_json, to_json
from farprop.runtime.secret import is_usable, user_directory

_SUFFIX = ".job"
_LARGEST = 1 << 16


class OwnJobFile:
    """The file of this worker; raises ``OSError`` or ``UsageError`` if there is no place for it."""

    def __init__(self, content: JobFile) -> None:
        directory = user_directory()
        if not is_usable(directory):
            raise UsageError(f"{directory} belongs to another user")
        find_files()  # removes what is left over
        job = hashlib.sha256(content.job.encode()).hexdigest()[:16]
        self.path = directory / f"{job}.{content.socket.rpartition('-')[2]}{_SUFFIX}"
        fresh = self.path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(fresh, flags, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            os.write(self._descriptor, to_json(content))
            os.rename(fresh, self.path)  # complete and locked when it appears
        except BaseException:
            fresh.unlink(missing_ok=True)
            self.abandon()
            raise

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: the file is the parent's."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def find_files() -> list[tuple[Path, JobFile]]:
    """The files of this user's workers on this host that live. Removes those of others."""
    found = []
    for path in sorted(user_directory().glob(f"*{_SUFFIX}")):
        with suppress(OSError, ProtocolError, UsageError):
            content = read_file(path)
            if content is not None:
                found.append((path, content))
    return found


def read_file(path: Path) -> JobFile | None:
    """Read a worker's file. Removes it, and returns None, if its worker has ended.

    Raises:
        UsageError: it belongs to another user, or others can read it.
        ProtocolError: it is none of these files.
        OSError: it can't be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        facts = os.fstat(descriptor)
        if facts.st_uid not in (os.geteuid(), 0) or facts.st_mode & 0o077 or not stat.S_ISREG(facts.st_mode):
            raise UsageError(f"{path} is not a file of this user alone.")
        content = from_json(os.read(descriptor, _LARGEST), JobFile)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return content
        path.unlink(missing_ok=True)
        return None
    finally:
        os.close(descriptor)
