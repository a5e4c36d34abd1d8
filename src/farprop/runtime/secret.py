"""The job's secret: given by the user, or made and shared by the workers of one user on one host."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import math
import os
import re
import secrets
import stat
import string
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from farprop.config import Settings
from farprop.errors import UsageError

_BITS = 128
_MIN_DISTINCT = 8
_ADVICE = 'Make one with: python -c "import secrets; print(secrets.token_hex(32))"'
# Sets of characters, the smallest first. An attacker has to try each character of the set.
_ALPHABETS = [
    string.digits,
    string.hexdigits[:16],
    string.ascii_lowercase,
    string.ascii_lowercase + string.digits,
    string.ascii_letters,
    string.ascii_letters + string.digits,
    string.ascii_letters + string.digits + "+/-_=",
    string.printable[:95],
]


class Secret:
    """The secret of a job. ``key`` proves membership. ``was_found`` is true if the workers of this host made it."""

    def __init__(self, key: bytes, found: FoundSecret | None = None) -> None:
        self.key = key
        self.found = found

    def __repr__(self) -> str:
        return "<Secret, found>" if self.found else "<Secret, given>"

    @property
    def was_found(self) -> bool:
        return self.found is not None

    def remove_file(self) -> None:
        """All workers have the secret: remove its file."""
        if self.found is not None:
            self.found.remove()

    def let_go(self) -> None:
        """This worker does not need the file any more; others may still read it."""
        if self.found is not None:
            self.found.close()

    def abandon(self) -> None:
        """In a forked child, let the parent alone use the file."""
        if self.found is not None:
            self.found.abandon()


def check_settings(settings: Settings) -> None:
    """Raise ``UsageError`` for bad settings, before anything is started."""
    given = _given(settings)
    if given is not None:
        _check_strength(*given)
    elif not settings.insecure:
        check_directory()


def given_secret(settings: Settings) -> Secret:
    """The secret that the user gave.

    Raises:
        UsageError: there is none, or it can't be used.
    """
    given = _given(settings)
    if given is not None:
        _check_strength(*given)
        return Secret(_slow_key(given[0]))
    if settings.insecure:
        return Secret(hashlib.sha256(b"farprop: anyone may join").digest())
    raise UsageError(f"There is no secret: set FARPROP_SECRET_FILE or FARPROP_SECRET on every host. {_ADVICE}")


def find_secret(settings: Settings, job: str, agree: Callable[[str, str], str]) -> Secret:
    """Find the secret of a job.

    Args:
        settings: the settings of this process.
        job: the random name of the job, the same on all of its workers.
        agree: ``agree(name, value)`` returns the value that the first worker proposed under the name.

    Raises:
        UsageError: the user's secret can't be used, or the workers can't share one.
    """
    if _given(settings) is not None or settings.insecure:
        return given_secret(settings)
    found = FoundSecret(job, agree)
    return Secret(hashlib.sha256(b"farprop found key\0" + found.text).digest(), found)


def _given(settings: Settings) -> tuple[bytes, str] | None:
    if settings.secret is not None:
        return os.fsencode(settings.secret).strip(), "FARPROP_SECRET"
    if settings.secret_file is not None:
        return _read_given_file(settings.secret_file).strip(), "FARPROP_SECRET_FILE"
    return None


@functools.lru_cache(maxsize=1)
def _slow_key(text: bytes) -> bytes:
    """Derive the key, once per process. This takes about 50 ms and 16 MB on purpose, and so does each guess."""
    return hashlib.scrypt(text, salt=b"farprop given key", n=1 << 14, r=8, p=1, dklen=32)


def _check_strength(text: bytes, source: str) -> None:
    """Raise for a secret that was obviously not made at random. This catches mistakes; it is no proof of strength."""
    characters = set(text.decode("latin-1"))
    size = next((len(alphabet) for alphabet in _ALPHABETS if characters.issubset(alphabet)), 256)
    if len(text) * math.log2(size) < _BITS:
        needed = math.ceil(_BITS / math.log2(size))
        raise UsageError(
            f"{source} can be guessed: it has {len(text)} characters of {size} kinds, and {_BITS} bits need {needed} "
            f"of those. {_ADVICE}"
        )
    if len(characters) < _MIN_DISTINCT or text in (text + text)[1:-1]:
        raise UsageError(f"{source} can be guessed: it repeats itself. {_ADVICE}")


def _read_given_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise UsageError(f"FARPROP_SECRET_FILE {path} is not a file.")
            if facts.st_uid not in (os.geteuid(), 0):
                raise UsageError(
                    f"FARPROP_SECRET_FILE {path} belongs to another user (uid {facts.st_uid}), who knows what is in "
                    "it. Make one of your own."
                )
            # Root may let a group read it. So Kubernetes mounts secrets for containers of other users (fsGroup).
            group = stat.S_IRWXG & ~stat.S_IRGRP if facts.st_uid == 0 else stat.S_IRWXG
            if facts.st_mode & (group | stat.S_IRWXO):
                raise UsageError(
                    f"FARPROP_SECRET_FILE {path} can be read by others. Run: chmod 600 {path} (in Kubernetes, the "
                    "volume needs defaultMode: 0400)"
                )
            return file.read(1 << 16)
    except OSError as error:
        raise UsageError(f"FARPROP_SECRET_FILE can't be read: {error}. {_ADVICE}") from error


_BYTES = 32
_SUFFIX = ".secret"


class FoundSecret:
    """A secret that the workers of one user on one host find by themselves. ``text`` is the secret.

    It is 32 random bytes in a file named after the job, in a directory that only its user can enter. The first worker
    makes the file, the others read it, and it is removed when all have joined or the last one leaves. Each user of the
    file holds a lock on it until ``close`` or ``remove``. The system releases the lock when the process ends, however
    it ends: a file that nobody has locked is left over, and the next job to start removes it. Children that a worker
    forks have its lock, too, and must ``abandon`` it.

    Somebody else may have taken the directory's name where all can write. Then the first worker makes a directory with
    a random name and publishes the name in the store. The others use it only if it belongs to their user alone, so a
    forged name does no harm.
    """

    def __init__(self, job: str, agree: Callable[[str, str], str]) -> None:
        directory = _directory(agree)
        _remove_left_over(directory)
        self.file = directory / f"{hashlib.sha256(job.encode()).hexdigest()[:32]}{_SUFFIX}"
        try:
            self._descriptor, self.text = _read_or_make(self.file)
        except OSError as error:
            raise _unkept(directory, error) from error

    def remove(self) -> None:
        """Remove the file: all workers have the secret."""
        self._unlink()
        self.close()

    def close(self) -> None:
        """Release the lock; the last user of the file removes it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(self.file)):
                self._unlink()
        except OSError:
            pass  # other workers use it, or it was removed
        finally:
            os.close(descriptor)

    def abandon(self) -> None:
        """In a forked child, close the descriptor. The parent keeps the lock, and the child does not keep it longer."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _unlink(self) -> None:
        self.file.unlink(missing_ok=True)
        if self.file.parent != user_directory():
            with suppress(OSError):
                self.file.parent.rmdir()  # its name is random, so no other job uses it


def check_directory() -> None:
    """Raise ``UsageError`` if the directory for secrets can't be used, before anything is started."""
    is_usable(user_directory())


def user_directory() -> Path:
    """The directory for the files of this user's jobs. It may not exist, or belong to somebody else."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # After `su` or `sudo -E` it may belong to another user, and in a container it may not exist.
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime, "farprop")
    return Path(_temporary_directory(), f"farprop-{os.geteuid()}")


def _temporary_directory() -> str:
    """As ``tempfile.gettempdir``, but it is the same on all workers, also if the disk is full for a while.

    That function tries to write a file. If it can't, it takes another directory, and keeps to it: then the workers of a
    job would look for their secret in different places.
    """
    named = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    places = [place for place in (*named, "/tmp", "/var/tmp") if os.path.isdir(place)]
    return next((place for place in places if os.access(place, os.W_OK | os.X_OK)), "/tmp")


def _unkept(directory: Path, error: OSError) -> UsageError:
    return UsageError(f"The job's secret can't be kept in {directory}: {error}. Set FARPROP_SECRET.")


def is_usable(directory: Path) -> bool:
    """Make the directory if it does not exist; False if it belongs to another user, raises if others can enter it."""
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        facts = directory.lstat()
    except OSError as error:
        raise _unkept(directory, error) from error
    if facts.st_uid != os.geteuid():
        return False
    if not stat.S_ISDIR(facts.st_mode) or facts.st_mode & 0o077:
        raise UsageError(
            f"{directory} is not a directory of this user alone, so the job's secret can't be kept there. Remove it, "
            "or set FARPROP_SECRET."
        )
    return True


def _directory(agree: Callable[[str, str], str]) -> Path:
    usual = user_directory()
    if is_usable(usual):
        return usual
    prefix = f"farprop-{os.geteuid()}-"
    try:
        own = Path(tempfile.mkdtemp(prefix=prefix, dir=usual.parent))
    except OSError as error:
        raise _unkept(usual.parent, error) from error
    said = agree("directory of the secret", own.name)
    if said == own.name:
        return own
    own.rmdir()
    # The store is not trusted: accept only a name with our prefix, without a path.
    if re.fullmatch(re.escape(prefix) + r"\w+", said):
        directory = own.with_name(said)
        with suppress(OSError, UsageError):
            if directory.exists() and is_usable(directory):
                return directory
    raise UsageError(
        f"{usual} belongs to another user, and the workers of this job can't agree on another directory for its "
        "secret: they are on different hosts, or belong to different users. Set FARPROP_SECRET to the same long random "
        'text on every worker, such as the output of: python -c "import secrets; print(secrets.token_hex(32))"'
    )


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[list[int]]:
    """Open a file. The descriptor is in a list, and is closed at the end unless the caller has removed it."""
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
            # Another worker may have removed the file meanwhile, and a new one may have its name.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                path.unlink()


def _read_or_make(path: Path) -> tuple[int, bytes]:
    """Read the file, or make it. A new file appears complete and locked: no worker reads half of it or removes it."""
    while True:
        with suppress(FileNotFoundError):
            with _opened(path, os.O_RDONLY) as held:
                fcntl.flock(held[0], fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(held[0]), os.stat(path)):
                    text = os.read(held[0], 1024)
                    return held.pop(), text
            continue  # it was removed meanwhile
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
