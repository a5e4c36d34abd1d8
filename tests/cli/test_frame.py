"""The frame of the command line: help, versions, errors, exit codes."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

import farprop
from farprop.cli import version
from farprop.cli.main import INCOMPLETE, OK, USAGE, main
from farprop.errors import ConnectionLostError


def _help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *command: str) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == OK
    return capsys.readouterr().out


def test_help_has_sections(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = _help(capsys, monkeypatch)
    assert text.startswith("usage: farprop [--debug] COMMAND ...\n")
    sections = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert sections == ["options:", "start:", "look into a running job:", "check:", "examples:"]
    assert "exit codes: 0 done; 1 something failed" in text


@pytest.mark.parametrize("command", ["demo", "doctor", "bench", "version"])
def test_help_of_a_command_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = _help(capsys, monkeypatch, command)
    assert f"usage: farprop {command}" in text
    assert f"  farprop {command}" in text[text.index("example") :]
    assert max(map(len, text.splitlines())) <= 80


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"farprop", "torch", "python", "platform"}
    assert (found["farprop"], found["torch"]) == (farprop.__version__, str(torch.__version__))
    assert main(["version"]) == OK
    assert f"torch     {found['torch']}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionLostError("worker1 is gone"), "farprop: worker1 is gone\n"),
        (KeyError("a"), "farprop: KeyError: 'a'. `farprop --debug` before the command shows where.\n"),
    ],
)
def test_error_is_a_line_and_with_debug_a_stack_trace(
    error: Exception, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(version, "_run", fail)
    assert main(["version"]) == INCOMPLETE
    assert capsys.readouterr().err == text
    assert main(["--debug", "version"]) == INCOMPLETE
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):\n")
    assert "in fail" in shown


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["doctor", "--rank", "0"], "--rank and --world-size need --store"),
        (["doctor", "--store", "node1:29500"], "--store HOST:PORT, --rank and --world-size are all needed"),
        (["doctor", "--store", "node1", "--rank", "0", "--world-size", "1"], "--store 'node1' is no address"),
        (["doctor", "--store", "127.0.0.1:1", "--rank", "2", "--world-size", "2"], "--rank 2 must be from 0 to"),
        (["bench", "--rounds", "0"], "--rounds 0 must be 1 or more"),
    ],
)
def test_wrong_usage(command: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == USAGE
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["--debug"]])
def test_no_command_shows_the_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "look into a running job:" in shown.err
