"""``farprop top`` on a terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest
from rich.console import Console

import farprop.rpc as rpc
from farprop.cli import top
from farprop.dashboard.sources import Outside
from tests.dashboard.test_page import _call_evil
from tests.inspection import functions as f
from tests.support.workers import Cluster, cluster

pytestmark = pytest.mark.one_transport
_ENV = {"FARPROP_JOB_NAME": "top"}


def _shown(job: Cluster, width: int, looks: int = 2) -> str:
    written = io.StringIO()
    console = Console(file=written, width=width, height=40, force_terminal=False, highlight=False)
    assert top.run(Outside("top"), 0.01, looks, console)
    return written.getvalue()


def test_top_shows_workers_rates_and_why() -> None:
    with cluster(2, env=_ENV) as job:
        waiting = job.start(0, rpc.rpc_sync, "worker1", f.wait_here, (), {}, 0)
        job.run(0, f.is_running, "wait_here")
        wide, narrow = _shown(job, 160), _shown(job, 80)
        for text in (wide, narrow):
            assert "job top   2 workers" in text
            assert "SERVED/s" in text
            assert "wait_here" in text
        assert "MEMORY" in wide
        assert "MEMORY" not in narrow
        assert max(map(len, narrow.splitlines())) <= 80
        job.run(1, f.release)
        waiting.result()


def test_names_of_the_job_are_no_codes_for_the_terminal() -> None:
    shown = top._line("\x1b[2J[red]x[/red]\x07")
    assert shown.plain == "�[2J[red]x[/red]�"
    with cluster(2, env=_ENV) as job:
        _shown(job, 160, 1)  # from now on they take note
        job.run(0, _call_evil)
        shown = _shown(job, 160)
        assert "<img src=x onerror" in shown
        assert "?<script>document.title" in shown
        assert "\x1b" not in shown
        assert max(map(len, _shown(job, 80).splitlines())) <= 80


def test_command_uses_the_terminal_that_it_has() -> None:
    with cluster(1, env=_ENV):
        own, its = pty.openpty()
        command = [sys.executable, "-m", "farprop", "top", "top", "--count", "2", "--interval", "0.01"]
        process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env={**os.environ, "TERM": "xterm"})
        os.close(its)
        written = b""
        while True:
            try:
                more = os.read(own, 65536)
            except OSError:  # the other end is closed
                break
            written += more
        os.close(own)
        assert process.wait(60) == 0, written
        assert "SERVED/s" in written.decode()
        assert "\x1b[?1049h" in written.decode()  # a screen of its own, which leaves the old one as it was
