"""The job's secret, given or found, and the keys that sign values in the store."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farprop.config import Settings
from farprop.errors import UsageError
from farprop.protocol.signing import CALLS, GROUP, Keys, Unsigned
from farprop.runtime import secret as found_secret
from farprop.runtime.secret import FoundSecret, check_settings, find_secret


def own_proposal(_: str, value: str) -> str:
    """An ``agree`` for a single worker: it gets its own proposal."""
    return value


def test_found_secret_is_shared_private_and_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with closing(FoundSecret("job", own_proposal)) as first, closing(FoundSecret("job", own_proposal)) as second:
        assert first.text == second.text
        assert first.file.stat().st_mode & 0o777 == 0o600
        assert first.file.parent.stat().st_mode & 0o777 == 0o700
        with closing(FoundSecret("other job", own_proposal)) as other:
            assert other.text != first.text
            assert len(os.listdir(first.file.parent)) == 2
        first.remove()
        assert not first.file.exists()
        with closing(FoundSecret("job", own_proposal)) as renewed:
            assert renewed.text != first.text
    assert os.listdir(first.file.parent) == []  # the last user of a secret removes it


def test_unused_secrets_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    left_over = FoundSecret("a job whose workers were killed", own_proposal)
    os.close(left_over._descriptor)  # as the kernel does when a process is killed
    left_over._descriptor = -1
    assert left_over.file.exists()
    (left_over.file.parent / "half.secret.123.abc").write_text("made by a worker that was killed a moment later")
    with closing(FoundSecret("job", own_proposal)) as used, closing(FoundSecret("another", own_proposal)) as newer:
        assert sorted(left_over.file.parent.iterdir()) == sorted([used.file, newer.file])


def test_stale_secret_replaced_by_another_worker_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one worker examines a left-over file, another replaces and locks it. The new file must stay."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    left_over = FoundSecret("job", own_proposal)
    os.close(left_over._descriptor)
    left_over._descriptor = -1
    flock, others = fcntl.flock, list[FoundSecret]()

    def after_the_other(descriptor: int, how: int) -> None:
        if how & fcntl.LOCK_EX and not others:
            monkeypatch.setattr(fcntl, "flock", flock)
            others.append(FoundSecret("job", own_proposal))
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", after_the_other)
    with closing(FoundSecret("job", own_proposal)) as own, closing(others[0]) as other:
        assert own.text == other.text != left_over.text


def test_given_secrets(tmp_path: Path) -> None:
    # Any bytes are allowed.
    find_secret(Settings(secret=os.fsdecode(os.urandom(40).replace(b"\0", b"x"))), "job", own_proposal)
    good = "5f2e" + "0123456789abcdef" * 2 + "77"
    a = find_secret(Settings(secret=good), "job", own_proposal)
    assert a.key == find_secret(Settings(secret=good + "\n"), "another job", own_proposal).key
    assert not a.was_found
    insecure = Settings(insecure=True)
    assert find_secret(insecure, "j", own_proposal).key == find_secret(insecure, "k", own_proposal).key != a.key
    assert good not in repr(a) + repr(Settings(secret=good))
    file = tmp_path / "secret"
    file.write_text(good)
    file.chmod(0o600)
    assert find_secret(Settings(secret_file=str(file)), "job", own_proposal).key == a.key
    with pytest.raises(UsageError, match="is not a file"):
        find_secret(Settings(secret_file="/dev/null"), "job", own_proposal)


@pytest.mark.parametrize(
    "weak",
    [
        "short",
        "a" * 16,
        "a" * 64,
        "0123456789abcdef" * 2,
        "1234567890" * 4,
        "secret" * 10,
        "password-password",
        "12" * 30,
    ],
)
def test_guessable_secrets_are_refused(weak: str) -> None:
    with pytest.raises(UsageError, match="FARPROP_SECRET can be guessed.*token_hex"):
        find_secret(Settings(secret=weak), "job", own_proposal)


def test_random_secrets_are_not_refused() -> None:
    for _ in range(2000):
        for made in (
            secrets.token_hex(16),
            secrets.token_hex(32),
            secrets.token_urlsafe(32),
            secrets.token_urlsafe(22),
        ):
            check_settings(Settings(secret=made))


@pytest.mark.parametrize("place", ["missing", "file"])
def test_unusable_runtime_directory_falls_back_to_the_temporary_one(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "file":
        (tmp_path / place).touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / place))
    with closing(FoundSecret("job", own_proposal)) as found:
        assert str(found.file).startswith(tempfile.gettempdir())


def test_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker makes another directory and publishes its name. Others use it only if they alone own it."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # So the files that this user makes seem to belong to another user.
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    (tmp_path / f"farprop-{os.geteuid()}").mkdir()
    monkeypatch.setattr(found_secret, "is_usable", lambda path: path.name != f"farprop-{os.geteuid()}")
    with closing(FoundSecret("job", own_proposal)) as first:
        said = first.file.parent.name
        with closing(FoundSecret("job", lambda *_: said)) as second:
            assert second.text == first.text
            assert second.file == first.file
        for lie in ("../elsewhere", "farprop-0-x", f"farprop-{os.geteuid()}-", f"farprop-{os.geteuid()}-missing"):
            with pytest.raises(UsageError, match="belongs to another user.*Set FARPROP_SECRET"):
                FoundSecret("job", lambda *_, lie=lie: lie)  # type: ignore[misc]
        first.remove()
    assert os.listdir(tmp_path) == [f"farprop-{os.geteuid()}"]


KEYS = Keys(b"k" * 32, "job", CALLS)


def test_signed_value_is_read_only_with_its_own_key_and_name() -> None:
    value = KEYS.sign("worker/1", "text").encode()
    assert KEYS.read("worker/1", value) == b"text"
    assert KEYS.read("e", KEYS.sign("e", "").encode()) == b""
    others = [Keys(b"x" * 32, "job", CALLS), Keys(b"k" * 32, "another", CALLS), Keys(b"k" * 32, "job", GROUP)]
    for keys, name in [(KEYS, "worker/2"), *((other, "worker/1") for other in others)]:
        with pytest.raises(Unsigned, match=f"'{name}' in the store is not signed"):
            keys.read(name, value)
    assert repr(KEYS) == "<Keys>"


@settings(max_examples=300, deadline=None)
@given(value=st.binary(max_size=200), at=st.integers(0, 100), bit=st.integers(0, 7))
def test_garbage_and_altered_values_are_unsigned(value: bytes, at: int, bit: int) -> None:
    altered = bytearray(KEYS.sign("worker/1", "some text, signed").encode())
    altered[at % len(altered)] ^= 1 << bit
    for wrong in (value, bytes(altered)):
        with pytest.raises(Unsigned):
            KEYS.read("worker/1", wrong)
