"""The job's secret: given by the user, or found by the workers of one user on one host (``found_secret.py``)."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import stat
import string
from collections.abc import Callable

from farprop.config import Settings
from farprop.errors import UsageError
from farprop.runtime.found_secret import FoundSecret, check_directory

_BITS = 128
_MIN_DISTINCT = 8
_ADVICE = 'Make one with: python -c "import secrets; print(secrets.token_hex(32))"'
# From the smallest: what somebody who guesses has to try for each character.
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
    """``key`` proves membership; ``was_found`` says that the workers of this host found it by themselves."""

    def __init__(self, key: bytes, found: FoundSecret | None = None) -> None:
        self.key = key
        self.found = found

    def __repr__(self) -> str:
        return "<Secret, found>" if self.found else "<Secret, given>"

    @property
    def was_found(self) -> bool:
        return self.found is not None

    def remove_file(self) -> None:
        """Nobody else is to find it any more."""
        if self.found is not None:
            self.found.remove()

    def let_go(self) -> None:
        """This worker needs it no longer; others may still find it."""
        if self.found is not None:
            self.found.close()


def check_settings(settings: Settings) -> None:
    """Find out what is wrong with the settings before anything is started."""
    given = _given(settings)
    if given is not None:
        _check_strength(*given)
    elif not settings.insecure:
        check_directory()


def find_secret(settings: Settings, job: str, agree: Callable[[str, str], str]) -> Secret:
    """``job`` names the job on this host: equal for its workers, different for other jobs. ``agree(name, value)`` is
    what the first of them said under that name.
    """
    given = _given(settings)
    if given is not None:
        _check_strength(*given)
        return Secret(_slow_key(given[0]))
    if settings.insecure:
        return Secret(hashlib.sha256(b"farprop: anyone may join").digest())
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
    """Once a process: it takes some 50 ms and 16 MB on purpose, and so does each guess."""
    return hashlib.scrypt(text, salt=b"farprop given key", n=1 << 14, r=8, p=1, dklen=32)


def _check_strength(text: bytes, source: str) -> None:
    """Refuse what was not made at random. This finds mistakes; it can't measure what somebody had in mind."""
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
            if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"FARPROP_SECRET_FILE {path} can be read by others. Run: chmod 600 {path}")
            return file.read(1 << 16)
    except OSError as error:
        raise UsageError(f"FARPROP_SECRET_FILE can't be read: {error}. {_ADVICE}") from error
