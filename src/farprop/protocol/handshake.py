"""The handshake of a new connection: both ends prove that they know the job's key, and say who they are.

::

    dialer                                             listener
    HELLO: magic, version, nonce                 -->
                                                 <--   CHALLENGE: magic, version, nonce
    PROOF: MAC, its identity, its target         -->
                                                 <--   WELCOME: MAC, decision, its identity or a reason

A MAC is HMAC-SHA256 over the handshake so far, including the message that holds it, the label of its direction, the
version, and the *channel binding*: the listener's TLS certificate as this end sees it. A relay in the middle of a TLS
connection shows each end another certificate, so the MACs differ. Rules that hold here:

- The states are ``HELLO -> CHALLENGE -> PROVEN -> READY`` (the dialer skips ``PROVEN``), and ``REFUSED`` from any of
  them. ``READY`` and ``REFUSED`` are final.
- The dialer proves itself first. A dialer that does not know the key gets a nonce, and nothing that depends on the key.
- At most ``MAX_UNPROVEN`` bytes are held, and only fields of fixed size are parsed before the peer is authenticated.
- Any input yields bytes to send, or raises ``ProtocolError`` or ``AuthenticationError``.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from farprop.errors import AuthenticationError, ProtocolError

VERSION = 9
MAX_UNPROVEN = 2048
MAX_IDENTITY = 512
_MAGIC = b"FARPROP\n"
_HELLO = struct.Struct("<8sH32s")
_PREFIX = struct.Struct("<8sH")
_PROOF = struct.Struct("<32sHH")
_WELCOME = struct.Struct("<32sBH")

HELLO, CHALLENGE, PROVEN, READY, REFUSED = "hello", "challenge", "proven", "ready", "refused"
_ACCEPTED, _DENIED, _WRONG_TARGET = 0, 1, 2


class IdentityMismatchError(AuthenticationError):
    """The worker that answered belongs to the job, but is not the one that was dialled."""


class RefusedError(AuthenticationError):
    """The worker that was dialled belongs to the job, and refuses this one."""


def _check_prefix(data: bytes) -> None:
    """Refuse a wrong magic or version at once, without waiting for more bytes."""
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
    """Join parts with their lengths, so that no byte can be moved from one part to the next."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class _End:
    """One end of a handshake.

    Args:
        key: the key that both ends must know.
        identity: the identity of this end.
        channel: the channel binding, as this end sees it.
        nonce: 32 fresh random bytes.
    """

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
        """Process bytes from the peer; returns the bytes to send next."""
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

    def _mac(self, label: bytes, dialer_nonce: bytes, listener_nonce: bytes, *said: bytes) -> bytes:
        version = VERSION.to_bytes(2, "little")
        whole = _joined(b"farprop", version, label, self._channel, dialer_nonce, listener_nonce, *said)
        return hmac.digest(self._key, whole, hashlib.sha256)

    def validate(self) -> None:
        assert self.state in (HELLO, CHALLENGE, PROVEN, READY, REFUSED)
        assert len(self._held) <= MAX_UNPROVEN or self.state == REFUSED
        assert self.state not in (PROVEN, READY) or self.peer_identity


class DialerHandshake(_End):
    """The dialer's end. ``target`` is the identity of the worker that it dials. Done when ``state`` is READY."""

    def __init__(self, key: bytes, identity: bytes, target: bytes, channel: bytes, nonce: bytes) -> None:
        super().__init__(key, identity, channel, nonce)
        self._target = target
        self._proof = b""

    def start(self) -> bytes:
        return _HELLO.pack(_MAGIC, VERSION, self._nonce)

    @property
    def wanted(self) -> int:
        """How many bytes to read next, at most. What comes after the handshake is not the handshake's: a listener may
        send messages as soon as it has sent its welcome.
        """
        held = len(self._held)
        if self.state == HELLO:
            return _HELLO.size - held
        if held < _WELCOME.size:
            return _WELCOME.size - held
        length: int = _WELCOME.unpack_from(self._held)[2]  # not too long: ``receive`` has checked it
        return _WELCOME.size + length - held

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
            self._proof = self._mac(b"dialer", *self._nonces, self._identity, self._target)
            head = _PROOF.pack(self._proof, len(self._identity), len(self._target))
            return head + self._identity + self._target
        if len(self._held) < _WELCOME.size:
            return b""
        mac, decision, length = _WELCOME.unpack_from(self._held)
        if length > MAX_IDENTITY:
            raise ProtocolError("the peer's identity is too long")
        if len(self._held) < _WELCOME.size + length:
            return b""
        said = self._held[_WELCOME.size : _WELCOME.size + length]
        if not hmac.compare_digest(mac, self._mac(b"listener", *self._nonces, self._proof, bytes([decision]), said)):
            raise AuthenticationError(
                "The worker we dialled does not know this job's secret. All workers need the same FARPROP_SECRET (or "
                "FARPROP_SECRET_FILE)."
            )
        if len(self._held) > _WELCOME.size + length:
            raise ProtocolError("the peer sent more than the handshake allows")
        if decision == _WRONG_TARGET:
            raise IdentityMismatchError(f"its address belongs to {said.decode(errors='replace')} now")
        if decision != _ACCEPTED:
            raise RefusedError(f"The worker we dialled refuses us: {said.decode(errors='replace')}")
        if said != self._target:
            raise IdentityMismatchError(f"{said.decode(errors='replace')} answers in its place")
        self.peer_identity = said
        self.state = READY
        self._held = b""
        return b""


class ListenerHandshake(_End):
    """The listener's end. In state PROVEN the peer is authenticated, and the owner decides: ``welcome`` and ``refuse``
    return the bytes to send.
    """

    def _step(self) -> bytes:
        _check_prefix(self._held)
        if len(self._held) < _HELLO.size:
            return b""
        if self.state == HELLO:
            if len(self._held) > _HELLO.size:
                raise ProtocolError("the peer sent more than the handshake allows")
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
        if not hmac.compare_digest(self._proof, self._mac(b"dialer", *self._nonces, identity, target)):
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
        """Accept the peer, unless its target is another worker."""
        if self._target != self._identity:
            self.state = REFUSED
            return self._pack_decision(_WRONG_TARGET, self._identity)
        self.state = READY
        self._held = b""
        return self._pack_decision(_ACCEPTED, self._identity)

    def refuse(self, why: str) -> bytes:
        self.state = REFUSED
        return self._pack_decision(_DENIED, why.encode()[:MAX_IDENTITY])

    def _pack_decision(self, decision: int, said: bytes) -> bytes:
        mac = self._mac(b"listener", *self._nonces, self._proof, bytes([decision]), said)
        return _WELCOME.pack(mac, decision, len(said)) + said
