"""The handshake: only peers that know the key are accepted, and garbage is refused early."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farprop.errors import AuthenticationError, ProtocolError
from farprop.protocol.handshake import (
    MAX_IDENTITY,
    MAX_UNPROVEN,
    PROVEN,
    READY,
    REFUSED,
    VERSION,
    DialerHandshake,
    IdentityMismatchError,
    ListenerHandshake,
)

KEY = b"k" * 32


def ends(
    dialer_key: bytes = KEY,
    listener_key: bytes = KEY,
    target: bytes = b"worker1",
    channels: tuple[bytes, bytes] = (b"unix", b"unix"),
) -> tuple[DialerHandshake, ListenerHandshake]:
    return (
        DialerHandshake(dialer_key, b"worker0", target, channels[0], os.urandom(32)),
        ListenerHandshake(listener_key, b"worker1", channels[1], os.urandom(32)),
    )


def talk(dialer: DialerHandshake, listener: ListenerHandshake, piece: int = 1000, refuse: str | None = None) -> None:
    """Carry bytes between both ends until they are done."""
    to_listener, to_dialer = dialer.start(), b""
    while to_listener or to_dialer:
        now, to_listener = to_listener[:piece], to_listener[piece:]
        if now:
            to_dialer += listener.receive(now)
            if listener.state == PROVEN:
                to_dialer += listener.welcome() if refuse is None else listener.refuse(refuse)
        now, to_dialer = to_dialer[:piece], to_dialer[piece:]
        if now:
            to_listener += dialer.receive(now)
        dialer.validate()
        listener.validate()


@pytest.mark.parametrize("piece", [1, 2, 41, 42, 43, 1000])
def test_both_ends_are_ready_and_know_the_identity_of_the_other(piece: int) -> None:
    dialer, listener = ends()
    talk(dialer, listener, piece)
    assert (dialer.state, listener.state) == (READY, READY)
    assert (dialer.peer_identity, listener.peer_identity) == (b"worker1", b"worker0")


@pytest.mark.parametrize(
    "wrong",
    [
        {"dialer_key": b"x" * 32},
        {"listener_key": b"x" * 32},
        {"channels": (b"tls one certificate", b"tls another")},
        {"channels": (b"tcp", b"tls another")},
        {"channels": (b"unix", b"tcp")},
    ],
)
def test_listener_refuses_another_key_or_channel(wrong: dict[str, bytes]) -> None:
    dialer, listener = ends(**wrong)  # type: ignore[arg-type]
    with pytest.raises(AuthenticationError, match="does not know this job's secret, or what it sent was changed"):
        talk(dialer, listener)
    assert listener.state == REFUSED
    assert dialer.state != READY


def test_listener_sends_nothing_that_depends_on_the_key_before_the_proof() -> None:
    """Before the dialer's proof, a listener sends the same bytes with every key."""
    nonce = os.urandom(32)
    answers = {
        ListenerHandshake(key, b"worker1", b"unix", nonce).receive(
            DialerHandshake(b"", b"a", b"b", b"c", bytes(32)).start()
        )
        for key in (KEY, b"x" * 32)
    }
    assert len(answers) == 1


def test_dialer_of_a_wrong_target_is_told_the_listener_identity() -> None:
    dialer, listener = ends(target=b"worker7")
    with pytest.raises(IdentityMismatchError, match="belongs to worker1 now"):
        talk(dialer, listener)
    assert (dialer.state, listener.state) == (REFUSED, REFUSED)


def test_refused_dialer_is_told_the_reason() -> None:
    dialer, listener = ends()
    with pytest.raises(AuthenticationError, match="refuses us: it was taken for dead"):
        talk(dialer, listener, refuse="it was taken for dead" + "!" * 1000)
    assert (dialer.state, listener.state) == (REFUSED, REFUSED)


def test_dialer_without_the_key_is_refused() -> None:
    hello, listener = ends()
    listener.receive(hello.start())
    with pytest.raises(AuthenticationError):
        listener.receive(b"\0" * 32 + b"\x07\x00\x07\x00" + b"worker0worker1")
    assert listener.state == REFUSED


def test_listener_without_the_key_is_refused() -> None:
    dialer, listener = ends()
    proof = dialer.receive(listener.receive(dialer.start()))
    for forged in (proof[:32], b"\0" * 32):
        again = DialerHandshake.__new__(DialerHandshake)
        again.__dict__.update(dialer.__dict__)
        with pytest.raises(AuthenticationError, match="FARPROP_SECRET"):
            again.receive(forged + b"\x00\x07\x00worker1")


def test_reflected_proof_is_refused() -> None:
    """An attacker sends the bytes of a worker that dials it back to that worker."""
    first, _ = ends()
    _, second = ends()
    challenge = second.receive(first.start())
    reflected = ListenerHandshake(KEY, b"worker0", b"unix", challenge[10:42])
    reflected.receive(first.start())
    proof = first.receive(challenge)
    reflected.receive(proof)
    assert reflected.welcome()[32] != 0  # worker0 is not the target of the proof
    with pytest.raises(ProtocolError):
        second.receive(proof)
        second.receive(proof)


def test_replayed_handshake_is_refused() -> None:
    dialer, listener = ends()
    hello = dialer.start()
    challenge = listener.receive(hello)
    proof = dialer.receive(challenge)
    listener.receive(proof)
    welcome = listener.welcome()
    _, later = ends()
    later.receive(hello)
    with pytest.raises(AuthenticationError):
        later.receive(proof)
    another, _ = ends()
    another.start()
    another.receive(challenge)
    with pytest.raises(AuthenticationError):
        another.receive(welcome)


@pytest.mark.parametrize("what", [b"worker0", b"worker1"])
def test_altered_identity_is_refused(what: bytes) -> None:
    dialer, listener = ends()
    proof = dialer.receive(listener.receive(dialer.start()))
    with pytest.raises(AuthenticationError):
        listener.receive(proof.replace(what, b"worker9"))


def test_altering_any_byte_of_a_proof_is_detected() -> None:
    dialer, listener = ends()
    proof = dialer.receive(listener.receive(dialer.start()))
    for at in range(len(proof)):
        again = ListenerHandshake.__new__(ListenerHandshake)
        again.__dict__.update(listener.__dict__)
        with pytest.raises((AuthenticationError, ProtocolError)):
            again.receive(bytes(byte ^ (i == at) for i, byte in enumerate(proof)))
            again.receive(b"\0" * 600)
    listener.receive(proof)
    welcome = listener.welcome()
    for at in range(len(welcome)):
        once_more = DialerHandshake.__new__(DialerHandshake)
        once_more.__dict__.update(dialer.__dict__)
        with pytest.raises((AuthenticationError, ProtocolError)):
            once_more.receive(bytes(byte ^ (i == at) for i, byte in enumerate(welcome)))
            once_more.receive(b"\0" * 600)


def test_version_mismatch_names_both_versions() -> None:
    dialer, listener = ends()
    hello = bytearray(dialer.start())
    hello[8] = 1
    with pytest.raises(ProtocolError, match=f"version 1 .* version {VERSION}"):
        listener.receive(bytes(hello))


def test_garbage_is_refused_at_its_first_byte() -> None:
    _, listener = ends()
    with pytest.raises(ProtocolError):
        listener.receive(b"G")
    with pytest.raises(ProtocolError):
        listener.receive(b"ET / HTTP/1.1")


def test_unproven_peer_can_buffer_only_little() -> None:
    dialer, listener = ends()
    listener.receive(dialer.start())
    with pytest.raises((ProtocolError, AuthenticationError)):
        for _ in range(100):
            listener.receive(b"\x01" * 36)  # identities of 257 bytes that never end
            listener.receive(b"\xff" * 100)
            assert len(listener._held) <= MAX_UNPROVEN
    with pytest.raises(ValueError, match="at most"):
        ListenerHandshake(KEY, b"x" * (MAX_IDENTITY + 1), b"unix", os.urandom(32))


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(st.binary(max_size=100), max_size=12), start=st.integers(0, 2))
def test_any_input_gives_bytes_or_one_of_two_errors(pieces: list[bytes], start: int) -> None:
    dialer, listener = ends()
    hello = dialer.start()
    for end in (dialer, listener):
        try:
            if start >= 1:
                end.receive(hello)  # its size and prefix are those of a challenge, too
            for piece in pieces:
                assert isinstance(end.receive(piece), bytes)
                end.validate()
        except (ProtocolError, AuthenticationError):
            assert end.state == REFUSED
        assert end.state not in (PROVEN, READY)


@pytest.mark.parametrize("piece", [1, 41, 1000])
def test_the_dialer_reads_nothing_that_comes_after_the_handshake(piece: int) -> None:
    """A listener that fails says its last words at once, maybe in the same packet as its welcome."""
    dialer, listener = ends()
    to_dialer = listener.receive(dialer.start())
    while dialer.state != READY:
        count = min(piece, dialer.wanted)
        assert count > 0
        now, to_dialer = to_dialer[:count], to_dialer[count:]
        to_listener = dialer.receive(now)
        if to_listener:
            listener.receive(to_listener)
            to_dialer += listener.welcome() + b"last words"
    assert to_dialer == b"last words"
