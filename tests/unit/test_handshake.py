"""The handshake: who knows the key gets in, nobody else, and garbage is refused early."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farprop.errors import AuthenticationError, ProtocolError
from farprop.protocol import handshake
from farprop.protocol.handshake import MAX_UNPROVEN, READY, REFUSED, Dialler, Listener

KEY = b"k" * 32


def ends(dialler_key: bytes = KEY, listener_key: bytes = KEY) -> tuple[Dialler, Listener]:
    return (
        Dialler(dialler_key, b"worker0", os.urandom(32)),
        Listener(listener_key, b"worker1", os.urandom(32)),
    )


def talk(dialler: Dialler, listener: Listener, piece: int = 1000) -> None:
    """Carry bytes between the two until both are done."""
    to_listener, to_dialler = dialler.start(), b""
    while to_listener or to_dialler:
        now, to_listener = to_listener[:piece], to_listener[piece:]
        if now:
            to_dialler += listener.receive(now)
        now, to_dialler = to_dialler[:piece], to_dialler[piece:]
        if now:
            to_listener += dialler.receive(now)
        dialler.validate()
        listener.validate()


@pytest.mark.parametrize("piece", [1, 2, 41, 42, 43, 1000])
def test_both_get_in_and_know_who_the_other_is(piece: int) -> None:
    dialler, listener = ends()
    talk(dialler, listener, piece)
    assert (dialler.state, listener.state) == (READY, READY)
    assert (dialler.peer_identity, listener.peer_identity) == (b"worker1", b"worker0")


def test_a_dialler_without_the_key_learns_it_from_the_listeners_proof() -> None:
    dialler, listener = ends(dialler_key=b"x" * 32)
    with pytest.raises(AuthenticationError, match="FARPROP_SECRET"):
        talk(dialler, listener)
    assert dialler.state == REFUSED


def test_a_dialler_that_goes_on_without_the_key_is_refused() -> None:
    """An attacker does not check the listener's proof, and sends any proof of its own."""
    _, listener = ends()
    hello, _ = ends()
    listener.receive(hello.start())
    with pytest.raises(AuthenticationError):
        listener.receive(b"\0" * 32 + b"\x07\x00" + b"worker0")
    assert listener.state == REFUSED


def test_the_listeners_own_proof_sent_back_is_refused() -> None:
    dialler, listener = ends()
    challenge = listener.receive(dialler.start())
    with pytest.raises(AuthenticationError):
        listener.receive(challenge[42:])


def test_a_recorded_dialogue_is_worth_nothing_later() -> None:
    dialler, listener = ends()
    hello = dialler.start()
    proof = dialler.receive(listener.receive(hello))
    _, later = ends()
    later.receive(hello)
    with pytest.raises(AuthenticationError):
        later.receive(proof)


def test_a_changed_identity_is_refused() -> None:
    dialler, listener = ends()
    proof = dialler.receive(listener.receive(dialler.start()))
    with pytest.raises(AuthenticationError):
        listener.receive(proof.replace(b"worker0", b"worker9"))


def test_another_version_is_named() -> None:
    dialler, listener = ends()
    hello = bytearray(dialler.start())
    hello[8] = 2
    with pytest.raises(ProtocolError, match="version 2 .* version 1"):
        listener.receive(bytes(hello))


def test_garbage_is_refused_at_its_first_byte() -> None:
    _, listener = ends()
    with pytest.raises(ProtocolError):
        listener.receive(b"G")
    with pytest.raises(ProtocolError):
        listener.receive(b"ET / HTTP/1.1")


def test_silence_and_floods_hold_little() -> None:
    dialler, listener = ends()
    listener.receive(dialler.start())
    with pytest.raises(ProtocolError):
        for _ in range(100):
            listener.receive(b"\x01" * 30)  # an identity of 257 bytes that never ends
            listener.receive(b"\xff" * 100)
            assert len(listener._held) <= MAX_UNPROVEN


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(st.binary(max_size=100), max_size=12), start=st.integers(0, 2))
def test_whatever_comes_the_outcome_is_bytes_or_the_two_errors(pieces: list[bytes], start: int) -> None:
    dialler, listener = ends()
    hello = dialler.start()
    for end in (dialler, listener):
        try:
            if start >= 1 and end is listener:
                listener.receive(hello)
            for piece in pieces:
                assert isinstance(end.receive(piece), bytes)
                end.validate()
        except (ProtocolError, AuthenticationError):
            assert end.state == REFUSED or end.state == READY
        assert end.state != READY


def test_labels_of_the_two_directions_differ() -> None:
    nonce = b"n" * 32
    assert handshake._proof(KEY, b"dialler", nonce, nonce, b"a") != handshake._proof(
        KEY, b"listener", nonce, nonce, b"a"
    )
