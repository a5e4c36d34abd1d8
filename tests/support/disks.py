"""A small disk, which a test can fill: file systems in memory, in a mount namespace that only its workers see.

A worker is in the namespace if its environment says so (see ``SmallDisk.environment`` and ``child``). All of it goes
away with the process that keeps the namespace.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import shutil
import subprocess
from pathlib import Path

NAMESPACE = "TESTS_MOUNT_NAMESPACE"
_CLONE_NEWNS = 0x00020000
_SIZES = "size=256k,nr_inodes=64"
_BALLAST = "ballast"
# It ends with its input.
_KEEPER = 'for place; do mount -t tmpfs -o "$SIZES" small-disk "$place" || exit; done; echo ready; read -r _'


class NotAllowedError(Exception):
    """This machine does not let us mount anything. The text says why."""


class SmallDisk:
    """A context manager: a file system of 256 KiB on a directory, and another one on ``/dev/shm``."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._keeper: subprocess.Popen[str] | None = None

    def __enter__(self) -> SmallDisk:
        if shutil.which("unshare") is None:
            raise NotAllowedError("there is no `unshare` here (Debian: util-linux)")
        os.makedirs(self.directory, exist_ok=True)
        keep = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _KEEPER, "sh"]
        self._keeper = subprocess.Popen(
            [*keep, self.directory, "/dev/shm"],
            env={**os.environ, "SIZES": _SIZES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline().strip() != "ready":
            _, why = self._keeper.communicate()
            raise NotAllowedError(f"nothing can be mounted here: {why.strip()}")
        os.chmod(self._seen_from_here(self.directory), 0o700)
        return self

    def __exit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.communicate()
            self._keeper = None

    @property
    def environment(self) -> dict[str, str]:
        """For a worker that has this disk, also for its temporary files."""
        return {NAMESPACE: f"/proc/{self._pid}/ns/mnt", "TMPDIR": self.directory}

    def fill(self, with_files: bool) -> None:
        """Let no byte more be written; or let no file more be made, too."""
        for place in map(self._seen_from_here, (self.directory, "/dev/shm")):
            for name in (f"{_BALLAST}{number}" for number in itertools.count()):
                try:
                    with open(place / name, "wb", buffering=0) as file:
                        while not with_files:
                            file.write(bytes(4096))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    break

    def free(self) -> None:
        """Make room again."""
        for place in map(self._seen_from_here, (self.directory, "/dev/shm")):
            for path in place.glob(f"{_BALLAST}*"):
                path.unlink()

    @property
    def _pid(self) -> int:
        assert self._keeper is not None
        return self._keeper.pid

    def _seen_from_here(self, path: str) -> Path:
        return Path(f"/proc/{self._pid}/root{path}")


def enter(namespace: str) -> None:
    """Move this process, which must have one thread, into a mount namespace."""
    with open(namespace) as opened:
        if ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), _CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), f"can't enter {namespace}")
