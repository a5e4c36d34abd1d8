"""What is shown of the output of workers."""

from __future__ import annotations

import io
import os
from pathlib import Path

from farprop.launch.output import Output
from farprop.launch.run import _Pipes


def _shown(*chunks: bytes, colours: bool = False) -> str:
    shown = io.StringIO()
    output = Output(colours)
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    output.add(ours, 1, shown)
    for chunk in chunks:
        os.write(theirs, chunk)
    os.close(theirs)
    output.finish()
    return shown.getvalue()


def test_lines_have_the_workers_name() -> None:
    assert _shown(b"one\ntw", b"o\nno end of line") == "worker1 | one\nworker1 | two\nworker1 | no end of line\n"
    assert _shown("\u00b5".encode()[:1], "\u00b5".encode()[1:]) == "worker1 | \u00b5\n"
    assert _shown(b"one\n", colours=True) == "\033[33mworker1 | \033[0mone\n"


def test_of_a_progress_bar_the_last_state_is_shown() -> None:
    assert _shown(b"\r 10%", b"\r 50%\r100%\n", b"next\r\n") == "worker1 | 100%\nworker1 | next\n"


def test_a_start_that_is_no_new_attempt_of_the_agents(tmp_path: Path) -> None:
    """A host has joined: the agent starts all again, and does not count it."""
    output = Output(False)
    pipes = _Pipes(output, tmp_path, str(tmp_path / "logs"))
    counts = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}
    first, second = (pipes.reify({0: {**counts, "RANK": "0"}}) for _ in range(2))
    assert first.stdouts != second.stdouts
    output.finish()
    assert len(list((tmp_path / "logs").glob("*/worker0.stdout"))) == 2
