"""Both ends of a new connection prove that they know the job's key.

::

    dialler                              listener
    HELLO: magic, version, nonce   -->
                                   <--   CHALLENGE: magic, version, nonce, proof, identity
    PROOF: proof, identity         -->
                                   <--   READY: one byte

A proof is HMAC-SHA256 over a label, both nonces and the prover's identity. The labels of the two directions differ,
so a proof can't be sent back to its maker. Rules that hold here:

- The states go ``HELLO -> CHALLENGE -> READY``, or to ``REFUSED`` from anywhere; nothing leaves ``READY`` or
  ``REFUSED``.
- No more than ``MAX_UNPROVEN`` bytes are ever held, and nothing is interpreted but fixed fields.
- Whatever comes in, the outcome is bytes to send, or ``ProtocolError`` or ``AuthenticationError``.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from farprop.errors import AuthenticationError, ProtocolError

VERSION = 1
MAX_UNPROVEN = 1024
_MAGIC = b"FARPROP\n"
_HELLO = struct.Struct("<8sH32s")
_PREFIX = struct.Struct("<8sH")
_PROOF_SIZE = 32
_LENGTH = struct.Struct("<H")
_MAX_IDENTITY = 512

HELLO, CHALLENGE, READY, REFUSED = "hello", "challenge", "ready", "refused"

_REFUSED_TEXT = (
    "{who} does not know this job's secret. All workers need the same FARPROP_SECRET (or FARPROP_SECRET_FILE)."
)


def _proof(key: bytes, label: bytes, dialler_nonce: bytes, listener_nonce: bytes, identity: bytes) -> bytes:
    return hmac.digest(key, b"farprop/1 " + label + dialler_nonce + listener_nonce + identity, hashlib.sha256)


def _check_prefix(data: bytes) -> None:
    """Refuse early: garbage must not be waited for."""
    magic = data[: len(_MAGIC)]
    if not _MAGIC.startswith(magic):
        raise ProtocolError("the peer does not speak farprop's protocol")
    if len(data) >= _PREFIX.size:
        version = _PREFIX.unpack_from(data)[1]
        if version != VERSION:
            raise ProtocolError(
                f"the peer speaks version {version} of farprop's protocol, this worker version {VERSION}: "
                "install the same farprop on every worker"
            )


class _End:
    def __init__(self, key: bytes, identity: bytes, nonce: bytes) -> None:
        if len(nonce) != 32 or len(identity) > _MAX_IDENTITY:
            raise ValueError("a nonce has 32 bytes and an identity at most 512")
        self.state = HELLO
        self.peer_identity = b""
        self._key = key
        self._identity = identity
        self._nonce = nonce
        self._held = b""

    def _take(self, data: bytes) -> None:
        if self.state in (READY, REFUSED):
            raise ProtocolError("bytes after the end of the handshake")
        self._held += data
        if len(self._held) > MAX_UNPROVEN:
            self.state = REFUSED
            raise ProtocolError("too many bytes before the peer proved itself")

    def _proof_and_identity(self, at: int, label: bytes, nonces: tuple[bytes, bytes], who: str) -> int | None:
        """Check the proof and identity that start at ``at``; the position after them, or None for 'not all here'."""
        start = at + _PROOF_SIZE + _LENGTH.size
        if len(self._held) < start:
            return None
        (length,) = _LENGTH.unpack_from(self._held, at + _PROOF_SIZE)
        if length > _MAX_IDENTITY:
            raise ProtocolError("the peer's identity is too long")
        if len(self._held) < start + length:
            return None
        identity = self._held[start : start + length]
        if not hmac.compare_digest(self._held[at : at + _PROOF_SIZE], _proof(self._key, label, *nonces, identity)):
            raise AuthenticationError(_REFUSED_TEXT.format(who=who))
        self.peer_identity = identity
        return int(start + length)

    def _prove(self, label: bytes, nonces: tuple[bytes, bytes]) -> bytes:
        proof = _proof(self._key, label, *nonces, self._identity)
        return proof + _LENGTH.pack(len(self._identity)) + self._identity

    def validate(self) -> None:
        assert self.state in (HELLO, CHALLENGE, READY, REFUSED)
        assert len(self._held) <= MAX_UNPROVEN
        assert self.state != READY or self.peer_identity


class Dialler(_End):
    """The end that opened the connection. ``receive`` returns what to send; stop when ``state`` is READY."""

    def start(self) -> bytes:
        self.state = CHALLENGE
        return _HELLO.pack(_MAGIC, VERSION, self._nonce)

    def receive(self, data: bytes) -> bytes:
        self._take(data)
        try:
            return self._step()
        except (ProtocolError, AuthenticationError):
            self.state = REFUSED
            raise

    def _step(self) -> bytes:
        if not self.peer_identity:
            _check_prefix(self._held)
            if len(self._held) < _HELLO.size:
                return b""
            nonces = self._nonce, _HELLO.unpack_from(self._held)[2]
            end = self._proof_and_identity(_HELLO.size, b"listener", nonces, "The worker we dialled")
            if end is None:
                return b""
            self._held = self._held[end:]
            reply = self._prove(b"dialler", nonces)
            if self._held:
                raise ProtocolError("the peer answered before it was asked")
            return reply
        if self._held != b"\x01":
            raise AuthenticationError("The worker we dialled refused our proof.")
        self.state = READY
        self._held = b""
        return b""


class Listener(_End):
    """The end that accepted the connection."""

    def receive(self, data: bytes) -> bytes:
        self._take(data)
        try:
            return self._step()
        except (ProtocolError, AuthenticationError):
            self.state = REFUSED
            raise

    def _step(self) -> bytes:
        _check_prefix(self._held)
        if len(self._held) < _HELLO.size:
            return b""
        nonces = _HELLO.unpack_from(self._held)[2], self._nonce
        if self.state == HELLO:
            self.state = CHALLENGE
            return _HELLO.pack(_MAGIC, VERSION, self._nonce) + self._prove(b"listener", nonces)
        end = self._proof_and_identity(_HELLO.size, b"dialler", nonces, "A peer that dialled this worker")
        if end is None:
            return b""
        if end != len(self._held):
            raise ProtocolError("the peer went on before it was accepted")
        self.state = READY
        self._held = b""
        return b"\x01"
