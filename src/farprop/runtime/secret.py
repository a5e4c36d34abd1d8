"""The job's secret: given by the user, or found by the workers of one user on one host.

The found one is 32 random bytes in a file named after the job, in a directory that only its user can enter. The first
worker makes it, the others read it, and it is removed when all have joined.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from farprop.config import Settings
from farprop.errors import UsageError

_MIN_LENGTH = 16
_BYTES = 32
_ADVICE = 'Make one with: python -c "import secrets; print(secrets.token_hex(32))"'


@dataclass(frozen=True)
class Secret:
    """``key`` proves membership; ``file`` is set when we found it by ourselves."""

    key: bytes
    file: Path | None = None

    @property
    def fingerprint(self) -> str:
        """Equal for equal keys, and says nothing about them: safe to publish."""
        return hmac.digest(self.key, b"farprop fingerprint", hashlib.sha256).hex()[:32]

    def remove_file(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def check_settings(settings: Settings) -> None:
    """Find out what is wrong with the settings before anything is started."""
    if settings.secret is None and settings.secret_file is None and not settings.insecure:
        _directory()
    else:
        find_secret(settings, "")


def find_secret(settings: Settings, job: str) -> Secret:
    """``job`` names the job on this host: equal for its workers, different for other jobs."""
    if settings.secret is not None:
        return Secret(_key(settings.secret.encode(), "FARPROP_SECRET"))
    if settings.secret_file is not None:
        return Secret(_key(_read_given_file(settings.secret_file), "FARPROP_SECRET_FILE"))
    if settings.insecure:
        return Secret(hashlib.sha256(b"farprop: anyone may join").digest())
    file = _directory() / f"{hashlib.sha256(job.encode()).hexdigest()[:32]}.secret"
    return Secret(_key(_read_or_make(file), str(file)), file)


def _key(text: bytes, source: str) -> bytes:
    text = text.strip()
    if len(text) < _MIN_LENGTH:
        raise UsageError(f"{source} holds fewer than {_MIN_LENGTH} characters, which can be guessed. {_ADVICE}")
    return hashlib.sha256(b"farprop key\0" + text).digest()


def _read_given_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"FARPROP_SECRET_FILE {path} can be read by others. Run: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise UsageError(f"FARPROP_SECRET_FILE can't be read: {error}. {_ADVICE}") from error


def _directory() -> Path:
    """A directory of this user alone; one that somebody else prepared is refused."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(runtime, "farprop") if runtime else Path(tempfile.gettempdir(), f"farprop-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    facts = directory.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise UsageError(
            f"{directory} is not a directory of this user alone, so the job's secret can't be kept there. Remove it, "
            "or set FARPROP_SECRET."
        )
    return directory


def _read_or_make(path: Path) -> bytes:
    """Whoever comes first makes the file; it appears whole, so nobody reads half of one."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(_BYTES).encode())
    finally:
        os.close(descriptor)
    try:
        while True:
            try:
                os.link(fresh, path)
            except FileExistsError:
                pass
            try:
                return path.read_bytes()
            except FileNotFoundError:
                continue  # removed between the two: the job before us has just come together
    finally:
        fresh.unlink()
