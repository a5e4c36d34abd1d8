"""What ``farprop run`` says of workers that failed, from the files that they have written."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from farprop.errors import ConnectionLostError
from farprop.launch import script
from farprop.launch.failures import report


def _failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *ends: tuple[int, BaseException | None]) -> str:
    """Each worker ends with a code and an exception, in this order; returns the exit code and what is said."""
    failures = {}
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    for rank, (code, error) in enumerate(ends):
        path = tmp_path / f"{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        if error is not None:
            script._report(type(error), error, None)
        failures[rank] = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file=str(path))
    code, text = report(ChildFailedError("program", failures))
    return f"{code}: {text}"


def test_the_cause_comes_before_its_victims(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    victim = ConnectionLostError("worker1 is gone")
    assert _failures(monkeypatch, tmp_path, (1, victim), (1, KeyError("a")), (-signal.SIGTERM, None)) == (
        "1: farprop run: worker1 (process 101) failed: KeyError: 'a'\n"
        "KeyError: 'a'\n"
        "farprop run: then worker0 failed: farprop.errors.ConnectionLostError: worker1 is gone\n"
        "farprop run: then it ended worker2."
    )


def test_a_killed_worker_comes_before_its_victims(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    victim = ConnectionLostError("worker1 is gone")
    said = _failures(monkeypatch, tmp_path, (1, victim), (-signal.SIGSEGV, None))
    assert said.startswith(
        "139: farprop run: worker1 (process 101) failed: it was ended by signal 11 (SIGSEGV). It crash"
    )


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _failures(monkeypatch, tmp_path, (3, None)) == (
        "3: farprop run: worker0 (process 100) failed: it ended with exit code 3."
    )


def test_an_exception_that_cannot_be_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "failed: tests.launch.test_failures.test_an_exception" in _failures(monkeypatch, tmp_path, (1, Odd()))


def test_sys_exit_is_written_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher may end the process, because another failed by that, before it has come to its end."""
    path, program = tmp_path / "error.json", tmp_path / "program.py"
    program.write_text("import sys\nsys.exit(3)")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr(script, "_end_with_launcher", lambda: None)
    for name in ("argv", "path", "excepthook", "modules"):
        value = getattr(script.sys, name)
        monkeypatch.setattr(script.sys, name, value.copy() if name != "excepthook" else value)
    with pytest.raises(SystemExit):
        script.main([str(program)])
    failure = ProcessFailure(local_rank=0, pid=100, exitcode=-signal.SIGTERM, error_file=str(path))
    code, text = report(ChildFailedError("program", {0: failure}))
    assert text == "farprop run: worker0 (process 100) failed: sys.exit(3)"
    assert code == 128 + signal.SIGTERM
