"""Signatures of values in the store, with keys derived from the job's key.

The store does not authenticate its writers, so each value carries a MAC over its text and its name. Rules that hold
here:

- A key is for one job, one plane (calls, or a process group) and one use. A value can't be replayed in another.
- A value is not interpreted before its MAC is verified.
- Any value yields its text, or raises ``Unsigned``.
"""

from __future__ import annotations

import hashlib
import hmac

from farprop.errors import RendezvousError

CALLS, GROUP, INSPECT = "calls", "group", "inspect"
_MAC_CHARACTERS = 64
_MAX_VALUE = 64 << 20  # the roster of a job of 100,000 workers


class Unsigned(RendezvousError):
    """A value in the store is not signed with this job's key, or was altered."""


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
        """Return the signed value to put into the store under ``name``."""
        return f"{self._mac(name, text.encode())} {text}"

    def read(self, name: str, value: bytes) -> bytes:
        """Verify the value stored under ``name``, and return its text; raises ``Unsigned``."""
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
    """The text of a value without verification. Only for error texts."""
    return value[_MAC_CHARACTERS + 1 :]
