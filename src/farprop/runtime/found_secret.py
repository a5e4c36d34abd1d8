"""A secret that the workers of one user on one host find by themselves.

It is 32 random bytes in a file named after the job, in a directory that only its user can enter. The first worker makes
it, the others read it, and it is removed when all have joined or the last one leaves. Whoever uses it holds a lock on
it, which the system lets go when the process ends, however it ends: a file that nobody has locked is left over, and the
next job to start removes it.

Somebody else may have taken the directory's name in a place where all can write. Then the first worker makes one with a
random name and says it in the store. Others believe it only if it is theirs alone, so it does no harm if that was not
said by a worker.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from farprop.errors import UsageError

_BYTES = 32
_SUFFIX = ".secret"


class FoundSecret:
    """``text`` is the secret. Its file is locked until ``close`` or ``remove``."""

    def __init__(self, job: str, agree: Callable[[str, str], str]) -> None:
        directory = _directory(agree)
        _remove_left_over(directory)
        self.file = directory / f"{hashlib.sha256(job.encode()).hexdigest()[:32]}{_SUFFIX}"
        self._descriptor, self.text = _read_or_make(self.file)

    def remove(self) -> None:
        """Nobody else is to find it."""
        self._unlink()
        self.close()

    def close(self) -> None:
        """The last one to use it removes it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(self.file)):
                self._unlink()
        except OSError:
            pass  # others use it, or it was removed
        finally:
            os.close(descriptor)

    def _unlink(self) -> None:
        self.file.unlink(missing_ok=True)
        if self.file.parent != _usual_directory():
            with suppress(OSError):
                self.file.parent.rmdir()  # of a random name, so no other job uses it


def check_directory() -> None:
    """Find out what is wrong with the place for secrets before anything is started."""
    _usable(_usual_directory())


def _usual_directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # After `su` or `sudo -E` it may be another user's, and in a container it may not be there.
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime, "farprop")
    return Path(tempfile.gettempdir(), f"farprop-{os.geteuid()}")


def _usable(directory: Path) -> bool:
    """Whether this is a directory of this user alone; it is made if there is none. False if somebody else has it."""
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        facts = directory.lstat()
    except OSError as error:
        raise UsageError(f"The job's secret can't be kept in {directory}: {error}. Set FARPROP_SECRET.") from error
    if facts.st_uid != os.geteuid():
        return False
    if not stat.S_ISDIR(facts.st_mode) or facts.st_mode & 0o077:
        raise UsageError(
            f"{directory} is not a directory of this user alone, so the job's secret can't be kept there. Remove it, "
            "or set FARPROP_SECRET."
        )
    return True


def _directory(agree: Callable[[str, str], str]) -> Path:
    usual = _usual_directory()
    if _usable(usual):
        return usual
    prefix = f"farprop-{os.geteuid()}-"
    own = Path(tempfile.mkdtemp(prefix=prefix))
    said = agree("directory of the secret", own.name)
    if said == own.name:
        return own
    own.rmdir()
    # Only a name, and one of ours: what the store says must not lead us anywhere else.
    if re.fullmatch(re.escape(prefix) + r"\w+", said):
        directory = own.with_name(said)
        with suppress(OSError, UsageError):
            if directory.exists() and _usable(directory):
                return directory
    raise UsageError(
        f"{usual} belongs to another user, and the workers of this job can't agree on another directory for its "
        "secret: they are on different hosts, or belong to different users. Set FARPROP_SECRET to the same long random "
        'text on every worker, such as the output of: python -c "import secrets; print(secrets.token_hex(32))"'
    )


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[list[int]]:
    """A descriptor in a list; it is closed unless it was taken out."""
    held = [os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)]
    try:
        yield held
    finally:
        for descriptor in held:
            os.close(descriptor)


def _remove_left_over(directory: Path) -> None:
    """Remove the secrets of jobs whose workers have all ended."""
    for path in directory.glob(f"*{_SUFFIX}*"):
        with suppress(OSError), _opened(path, os.O_RDONLY) as (descriptor,):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another worker may have removed it meanwhile, and made the one that has its name now.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                path.unlink()


def _read_or_make(path: Path) -> tuple[int, bytes]:
    """Whoever comes first makes the file; it appears whole and locked, so nobody reads half of one or removes it."""
    while True:
        with suppress(FileNotFoundError):
            with _opened(path, os.O_RDONLY) as held:
                fcntl.flock(held[0], fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(held[0]), os.stat(path)):
                    text = os.read(held[0], 1024)
                    return held.pop(), text
            continue  # removed meanwhile
        fresh = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with suppress(FileNotFoundError, FileExistsError), _opened(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as held:
            fcntl.flock(held[0], fcntl.LOCK_SH)
            text = secrets.token_hex(_BYTES).encode()
            os.write(held[0], text)
            try:
                os.link(fresh, path)
            finally:
                fresh.unlink(missing_ok=True)
            return held.pop(), text
