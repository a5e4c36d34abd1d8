"""One program of a job fails: the errors of the others say which, and with what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farprop.errors import ConnectionLostError, RankLostError, renewed
from farprop.protocol import first_failure as protocol
from farprop.protocol.first_failure import FirstFailure
from farprop.runtime.first_failure import explained, last_words, told
from tests.inspection.failing_program import FAILS, SIZE, step
from tests.support.workers import free_port

pytestmark = pytest.mark.one_transport


def _run(kind: str, directory: Path) -> list[str]:
    """What each rank has written."""
    subprocess.run(
        [sys.executable, "-m", "tests.inspection.failing_program", kind, str(directory)],
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        timeout=120,
        check=True,
    )
    return [(directory / str(rank)).read_text() for rank in range(SIZE)]


@pytest.mark.parametrize(
    ("kind", "who", "error"),
    [
        ("call", "worker2", "ConnectionLostError"),
        ("child", "worker2", "ConnectionLostError"),
        ("shutdown", "worker2", "ConnectionLostError"),
        ("in_finally", "worker2", "ConnectionLostError"),
        ("collective", "rank 2", "RankLostError"),
        ("ddp", "rank 2", "RankLostError"),
    ],
)
def test_others_name_the_program_that_failed_first(kind: str, who: str, error: str, tmp_path: Path) -> None:
    said = f"{who} failed first: ValueError: bad batch (failing_program.py:{step.__code__.co_firstlineno + 2} in step)."
    for rank, text in enumerate(_run(kind, tmp_path)):
        if rank == FAILS:
            assert "ValueError: bad\n" in text
            assert "Error in" not in text  # atexit callbacks that raise say so
            assert "failed first" not in text
        else:
            last = text.rstrip().splitlines()[-1]
            assert error in last
            assert last.endswith(said)


@pytest.mark.parametrize("kind", ["killed", "exits"])
def test_who_has_not_failed_with_an_exception_is_not_blamed(kind: str, tmp_path: Path) -> None:
    texts = _run(kind, tmp_path)
    for rank in set(range(SIZE)) - {FAILS}:
        assert "ConnectionLostError" in texts[rank]
        assert "failed first" not in texts[rank]


def test_the_first_is_kept_for_a_while() -> None:
    first = FirstFailure()
    assert first.known(5.0) == ""
    first.told("w1 failed first: A", 5.0)
    first.told("w2 failed first: B", 6.0)
    assert first.known(64.9) == "w1 failed first: A"
    assert first.known(65.1) == ""
    first.told("w2 failed first: B", 66.0)
    assert first.known(67.0) == "w2 failed first: B"


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_last_words() -> None:
    def words(error: BaseException, discreet: bool = False) -> str:
        return last_words(_raised(error), "w1", discreet)

    place = f"(test_first_failure.py:{_raised.__code__.co_firstlineno + 2} in _raised)"
    assert words(ValueError("no")) == f"w1 failed first: ValueError: no {place}"
    assert words(ValueError("no"), discreet=True) == "w1 failed first: ValueError"
    assert words(KeyboardInterrupt()) == f"w1 failed first: KeyboardInterrupt {place}"
    assert words(ValueError("x" * 10_000)).endswith(place)
    assert "\x1b" not in words(ValueError("\x1b[31mred"))
    assert words(SystemExit(0)) == words(SystemExit()) == ""
    assert words(SystemExit("no data")) == f"w1 failed first: SystemExit: no data {place}"
    hides = SystemExit(1)
    hides.__context__ = _raised(KeyError("a"))
    assert last_words(hides, "w1") == f"w1 failed first: KeyError: 'a' {place}"


def test_an_echo_is_no_first_failure() -> None:
    echo = RankLostError("lost rank 0")
    assert last_words(echo, "w1") == ""
    after = ValueError("because of it")
    after.__context__ = echo
    assert last_words(after, "w1") == ""
    echo.first_failure = "rank 0 failed first: ValueError"
    assert last_words(after, "w1") == "rank 0 failed first: ValueError"
    renewed_echo = renewed(echo)
    assert last_words(renewed_echo, "w1") == "rank 0 failed first: ValueError"


def test_an_error_is_explained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farprop.runtime.first_failure._first", FirstFailure())
    assert str(explained(ConnectionLostError("Lost w1."))) == "Lost w1."
    told("w1 failed first: ValueError\x00\n: no" + "x" * 10_000)
    error = explained(explained(ConnectionLostError("Lost w1.")))
    assert str(error).startswith("Lost w1. w1 failed first: ValueError? : no")
    assert len(str(error)) < protocol.MAX_TEXT + 20
    again = explained(ConnectionLostError(f"w0 gave up: {error}"))
    assert str(again).count("failed first") == 1
    assert again.first_failure == error.first_failure
