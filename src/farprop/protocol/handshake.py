"""Both ends of a new connection prove that they know the job's key, and who they are.

::

    dialler                                            listener
    HELLO: magic, version, nonce                 -->
                                                 <--   CHALLENGE: magic, version, nonce
    PROOF: MAC, its identity, whom it means      -->
                                                 <--   WELCOME: MAC, verdict, its identity or why not

A MAC is HMAC-SHA256 over all that was said before it and with it, the label of its direction, the version, and the
*channel*: what both ends see of the connection itself. A relay in the middle of a TLS connection shows each end another
certificate, so the channels differ and with them the MACs. Rules that hold here:

- The states go ``HELLO -> CHALLENGE -> PROVEN -> READY`` (the dialler leaves out ``PROVEN``), or to ``REFUSED`` from
  anywhere; nothing leaves ``READY`` or ``REFUSED``.
- The dialler proves itself first: somebody who does not know the key gets a nonce, and nothing that depends on the key.
- No more than ``MAX_UNPROVEN`` bytes are ever held, and nothing is interpreted but fixed fields.
- Whatever comes in, the outcome is bytes to send, or ``ProtocolError`` or ``AuthenticationError``.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from farprop.errors import AuthenticationError, ProtocolError

VERSION = 2
MAX_UNPROVEN = 2048
MAX_IDENTITY = 512
_MAGIC = b"FARPROP\n"
_HELLO = struct.Struct("<8sH32s")
_PREFIX = struct.Struct("<8sH")
_PROOF = struct.Struct("<32sHH")
_WELCOME = struct.Struct("<32sBH")

HELLO, CHALLENGE, PROVEN, READY, REFUSED = "hello", "challenge", "proven", "ready", "refused"
_LET_IN, _SAY_WHY, _NOT_ME = 0, 1, 2


class SomebodyElseError(AuthenticationError):
    """A worker of the job answered that is not the one that was dialled."""


def _check_prefix(data: bytes) -> None:
    """Refuse early: garbage must not be waited for."""
    magic = data[: len(_MAGIC)]
    if not _MAGIC.startswith(magic):
        raise ProtocolError("the peer does not speak farprop's protocol, or speaks it without TLS (FARPROP_TLS)")
    if len(data) >= _PREFIX.size:
        version = _PREFIX.unpack_from(data)[1]
        if version != VERSION:
            raise ProtocolError(
                f"the peer speaks version {version} of farprop's protocol, this worker version {VERSION}: "
                "install the same farprop on every worker"
            )


def _joined(*parts: bytes) -> bytes:
    """With their lengths, so that nothing can be moved from one to the next."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class _End:
    """``identity`` is who this end is; ``channel`` what it sees of the connection."""

    def __init__(self, key: bytes, identity: bytes, channel: bytes, nonce: bytes) -> None:
        if len(nonce) != 32 or len(identity) > MAX_IDENTITY:
            raise ValueError(f"a nonce has 32 bytes and an identity at most {MAX_IDENTITY}")
        self.state = HELLO
        self.peer_identity = b""
        self._key = key
        self._identity = identity
        self._channel = channel
        self._nonce = nonce
        self._held = b""

    def receive(self, data: bytes) -> bytes:
        """What to send next."""
        if self.state not in (HELLO, CHALLENGE):
            self.state = REFUSED
            raise ProtocolError("bytes after the end of the handshake")
        self._held += data
        try:
            if len(self._held) > MAX_UNPROVEN:
                raise ProtocolError("too many bytes before the peer proved itself")
            return self._step()
        except (ProtocolError, AuthenticationError):
            self.state = REFUSED
            raise

    def _step(self) -> bytes:
        raise NotImplementedError

    def _mac(self, label: bytes, dialler_nonce: bytes, listener_nonce: bytes, *said: bytes) -> bytes:
        version = VERSION.to_bytes(2, "little")
        whole = _joined(b"farprop", version, label, self._channel, dialler_nonce, listener_nonce, *said)
        return hmac.digest(self._key, whole, hashlib.sha256)

    def validate(self) -> None:
        assert self.state in (HELLO, CHALLENGE, PROVEN, READY, REFUSED)
        assert len(self._held) <= MAX_UNPROVEN or self.state == REFUSED
        assert self.state not in (PROVEN, READY) or self.peer_identity


class Dialler(_End):
    """The end that opened the connection, to reach ``target``. Stop when ``state`` is READY."""

    def __init__(self, key: bytes, identity: bytes, target: bytes, channel: bytes, nonce: bytes) -> None:
        super().__init__(key, identity, channel, nonce)
        self._target = target
        self._proof = b""

    def start(self) -> bytes:
        return _HELLO.pack(_MAGIC, VERSION, self._nonce)

    def _step(self) -> bytes:
        if self.state == HELLO:
            _check_prefix(self._held)
            if len(self._held) < _HELLO.size:
                return b""
            if len(self._held) > _HELLO.size:
                raise ProtocolError("the peer answered before it was asked")
            self._nonces = self._nonce, _HELLO.unpack(self._held)[2]
            self._held = b""
            self.state = CHALLENGE
            self._proof = self._mac(b"dialler", *self._nonces, self._identity, self._target)
            head = _PROOF.pack(self._proof, len(self._identity), len(self._target))
            return head + self._identity + self._target
        if len(self._held) < _WELCOME.size:
            return b""
        mac, verdict, length = _WELCOME.unpack_from(self._held)
        if length > MAX_IDENTITY:
            raise ProtocolError("the peer's identity is too long")
        if len(self._held) < _WELCOME.size + length:
            return b""
        said = self._held[_WELCOME.size : _WELCOME.size + length]
        if not hmac.compare_digest(mac, self._mac(b"listener", *self._nonces, self._proof, bytes([verdict]), said)):
            raise AuthenticationError(
                "The worker we dialled does not know this job's secret. All workers need the same FARPROP_SECRET (or "
                "FARPROP_SECRET_FILE)."
            )
        if len(self._held) > _WELCOME.size + length:
            raise ProtocolError("the peer went on before it was asked")
        if verdict == _NOT_ME:
            raise SomebodyElseError(f"its address belongs to {said.decode(errors='replace')} now")
        if verdict != _LET_IN:
            raise AuthenticationError(f"The worker we dialled refuses us: {said.decode(errors='replace')}")
        if said != self._target:
            raise SomebodyElseError(f"{said.decode(errors='replace')} answers in its place")
        self.peer_identity = said
        self.state = READY
        self._held = b""
        return b""


class Listener(_End):
    """The end that accepted the connection. In state PROVEN the peer is who it says, and it is to be decided whether it
    may come in: ``welcome`` and ``refuse`` return what to send.
    """

    def _step(self) -> bytes:
        _check_prefix(self._held)
        if len(self._held) < _HELLO.size:
            return b""
        if self.state == HELLO:
            if len(self._held) > _HELLO.size:
                raise ProtocolError("the peer went on before it was asked")
            self._nonces = _HELLO.unpack(self._held)[2], self._nonce
            self.state = CHALLENGE
            return _HELLO.pack(_MAGIC, VERSION, self._nonce)
        start = _HELLO.size + _PROOF.size
        if len(self._held) < start:
            return b""
        self._proof, identity_length, target_length = _PROOF.unpack_from(self._held, _HELLO.size)
        if identity_length > MAX_IDENTITY or target_length > MAX_IDENTITY:
            raise ProtocolError("the peer's identity is too long")
        if len(self._held) < start + identity_length + target_length:
            return b""
        identity = self._held[start : start + identity_length]
        target = self._held[start + identity_length : start + identity_length + target_length]
        if not hmac.compare_digest(self._proof, self._mac(b"dialler", *self._nonces, identity, target)):
            raise AuthenticationError(
                "a peer that dialled this worker does not know this job's secret, or what it sent was changed or "
                "relayed on its way"
            )
        if len(self._held) > start + identity_length + target_length or not identity:
            raise ProtocolError("the peer went on before it was accepted")
        self._target = target
        self.peer_identity = identity
        self.state = PROVEN
        return b""

    def welcome(self) -> bytes:
        """Let the peer in, unless it looks for somebody else."""
        if self._target != self._identity:
            self.state = REFUSED
            return self._verdict(_NOT_ME, self._identity)
        self.state = READY
        self._held = b""
        return self._verdict(_LET_IN, self._identity)

    def refuse(self, why: str) -> bytes:
        self.state = REFUSED
        return self._verdict(_SAY_WHY, why.encode()[:MAX_IDENTITY])

    def _verdict(self, verdict: int, said: bytes) -> bytes:
        mac = self._mac(b"listener", *self._nonces, self._proof, bytes([verdict]), said)
        return _WELCOME.pack(mac, verdict, len(said)) + said
