"""What the workers of a job sign for each other, with keys that are made of the job's key.

Nobody authenticates those who write to the store, so each value in it carries a MAC over itself and over the name under
which it stands. Rules that hold here:

- A key is for one job, one plane (calls, or a process group) and one use: nothing can be taken from one to another.
- Nothing of a value is interpreted before its MAC was found right.
- Whatever value comes in, the outcome is its text or ``Unsigned``.
"""

from __future__ import annotations

import hashlib
import hmac

from farprop.errors import RendezvousError

CALLS, GROUP = "calls", "group"
_MAC_CHARACTERS = 64
_MAX_VALUE = 64 << 20  # the roster of a job of 100,000 workers


class Unsigned(RendezvousError):
    """A value in the store that was not signed with this job's key, or was altered."""


class Keys:
    """The keys of one job and plane."""

    def __init__(self, key: bytes, job: str, plane: str) -> None:
        def derived(use: str) -> bytes:
            return hmac.digest(key, "\0".join(("farprop/2", use, plane, job)).encode(), hashlib.sha256)

        self.handshake = derived("handshake")
        self._store = derived("store")

    def __repr__(self) -> str:
        return "<Keys>"

    def sign(self, name: str, text: str) -> str:
        """The value to put into the store under ``name``."""
        return f"{self._mac(name, text.encode())} {text}"

    def read(self, name: str, value: bytes) -> bytes:
        """The text of a value that stands under ``name``."""
        mac, space, text = value[:_MAC_CHARACTERS], value[_MAC_CHARACTERS : _MAC_CHARACTERS + 1], unsigned_text(value)
        if len(value) > _MAX_VALUE or space != b" " or not hmac.compare_digest(mac, self._mac(name, text).encode()):
            raise Unsigned(
                f"{name!r} in the store is not signed with this job's secret: it was altered, or somebody else wrote "
                "it. Do all workers have the same FARPROP_SECRET, and who else can reach the store?"
            )
        return text

    def _mac(self, name: str, text: bytes) -> str:
        head = name.encode()
        return hmac.digest(self._store, len(head).to_bytes(4, "little") + head + text, hashlib.sha256).hex()


def unsigned_text(value: bytes) -> bytes:
    """What a value says, whoever wrote it: for the words of an error, and nothing else."""
    return value[_MAC_CHARACTERS + 1 :]
