"""The handshake: who knows the key gets in, nobody else, and garbage is refused early."""

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
    Dialler,
    Listener,
    SomebodyElseError,
)

KEY = b"k" * 32


def ends(
    dialler_key: bytes = KEY,
    listener_key: bytes = KEY,
    target: bytes = b"worker1",
    channels: tuple[bytes, bytes] = (b"unix", b"unix"),
) -> tuple[Dialler, Listener]:
    return (
        Dialler(dialler_key, b"worker0", target, channels[0], os.urandom(32)),
        Listener(listener_key, b"worker1", channels[1], os.urandom(32)),
    )


def talk(dialler: Dialler, listener: Listener, piece: int = 1000, refuse: str | None = None) -> None:
    """Carry bytes between the two until both are done."""
    to_listener, to_dialler = dialler.start(), b""
    while to_listener or to_dialler:
        now, to_listener = to_listener[:piece], to_listener[piece:]
        if now:
            to_dialler += listener.receive(now)
            if listener.state == PROVEN:
                to_dialler += listener.welcome() if refuse is None else listener.refuse(refuse)
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"dialler_key": b"x" * 32},
        {"listener_key": b"x" * 32},
        {"channels": (b"tls one certificate", b"tls another")},
        {"channels": (b"tcp", b"tls another")},
        {"channels": (b"unix", b"tcp")},
    ],
)
def test_another_key_or_channel_is_refused_by_the_listener(wrong: dict[str, bytes]) -> None:
    dialler, listener = ends(**wrong)  # type: ignore[arg-type]
    with pytest.raises(AuthenticationError, match="does not know this job's secret, or what it sent was changed"):
        talk(dialler, listener)
    assert listener.state == REFUSED
    assert dialler.state != READY


def test_a_stranger_learns_nothing_that_depends_on_the_key() -> None:
    """So what a listener says before it is proved anything is the same with every key."""
    nonce = os.urandom(32)
    answers = {
        Listener(key, b"worker1", b"unix", nonce).receive(Dialler(b"", b"a", b"b", b"c", bytes(32)).start())
        for key in (KEY, b"x" * 32)
    }
    assert len(answers) == 1


def test_who_looks_for_somebody_else_is_told_who_is_here() -> None:
    dialler, listener = ends(target=b"worker7")
    with pytest.raises(SomebodyElseError, match="belongs to worker1 now"):
        talk(dialler, listener)
    assert (dialler.state, listener.state) == (REFUSED, REFUSED)


def test_who_is_refused_is_told_why() -> None:
    dialler, listener = ends()
    with pytest.raises(AuthenticationError, match="refuses us: it was taken for dead"):
        talk(dialler, listener, refuse="it was taken for dead" + "!" * 1000)
    assert (dialler.state, listener.state) == (REFUSED, REFUSED)


def test_a_dialler_that_goes_on_without_the_key_is_refused() -> None:
    hello, listener = ends()
    listener.receive(hello.start())
    with pytest.raises(AuthenticationError):
        listener.receive(b"\0" * 32 + b"\x07\x00\x07\x00" + b"worker0worker1")
    assert listener.state == REFUSED


def test_a_listener_without_the_key_is_refused() -> None:
    dialler, listener = ends()
    proof = dialler.receive(listener.receive(dialler.start()))
    for forged in (proof[:32], b"\0" * 32):
        again = Dialler.__new__(Dialler)
        again.__dict__.update(dialler.__dict__)
        with pytest.raises(AuthenticationError, match="FARPROP_SECRET"):
            again.receive(forged + b"\x00\x07\x00worker1")


def test_a_proof_sent_back_to_its_maker_is_refused() -> None:
    """Somebody who dials a worker that dials him, and gives each what the other says."""
    first, _ = ends()
    _, second = ends()
    challenge = second.receive(first.start())
    reflected = Listener(KEY, b"worker0", b"unix", challenge[10:42])
    reflected.receive(first.start())
    proof = first.receive(challenge)
    reflected.receive(proof)
    assert reflected.welcome()[32] != 0  # worker0 is not the one that was meant
    with pytest.raises(ProtocolError):
        second.receive(proof)
        second.receive(proof)


def test_a_recorded_dialogue_is_worth_nothing_later() -> None:
    dialler, listener = ends()
    hello = dialler.start()
    challenge = listener.receive(hello)
    proof = dialler.receive(challenge)
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
def test_a_changed_identity_is_refused(what: bytes) -> None:
    dialler, listener = ends()
    proof = dialler.receive(listener.receive(dialler.start()))
    with pytest.raises(AuthenticationError):
        listener.receive(proof.replace(what, b"worker9"))


def test_every_bit_of_the_proofs_counts() -> None:
    dialler, listener = ends()
    proof = dialler.receive(listener.receive(dialler.start()))
    for at in range(len(proof)):
        again = Listener.__new__(Listener)
        again.__dict__.update(listener.__dict__)
        with pytest.raises((AuthenticationError, ProtocolError)):
            again.receive(bytes(byte ^ (i == at) for i, byte in enumerate(proof)))
            again.receive(b"\0" * 600)
    listener.receive(proof)
    welcome = listener.welcome()
    for at in range(len(welcome)):
        once_more = Dialler.__new__(Dialler)
        once_more.__dict__.update(dialler.__dict__)
        with pytest.raises((AuthenticationError, ProtocolError)):
            once_more.receive(bytes(byte ^ (i == at) for i, byte in enumerate(welcome)))
            once_more.receive(b"\0" * 600)


def test_another_version_is_named() -> None:
    dialler, listener = ends()
    hello = bytearray(dialler.start())
    hello[8] = 1
    with pytest.raises(ProtocolError, match="version 1 .* version 2"):
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
    with pytest.raises((ProtocolError, AuthenticationError)):
        for _ in range(100):
            listener.receive(b"\x01" * 36)  # identities of 257 bytes that never end
            listener.receive(b"\xff" * 100)
            assert len(listener._held) <= MAX_UNPROVEN
    with pytest.raises(ValueError, match="at most"):
        Listener(KEY, b"x" * (MAX_IDENTITY + 1), b"unix", os.urandom(32))


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(st.binary(max_size=100), max_size=12), start=st.integers(0, 2))
def test_whatever_comes_the_outcome_is_bytes_or_the_two_errors(pieces: list[bytes], start: int) -> None:
    dialler, listener = ends()
    hello = dialler.start()
    for end in (dialler, listener):
        try:
            if start >= 1:
                end.receive(hello)  # its size and prefix are those of a challenge, too
            for piece in pieces:
                assert isinstance(end.receive(piece), bytes)
                end.validate()
        except (ProtocolError, AuthenticationError):
            assert end.state == REFUSED
        assert end.state not in (PROVEN, READY)
