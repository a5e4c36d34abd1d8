"""Threads that decode JSON for the first time, all at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys, threading
from farprop.protocol import inspection, roster

sys.setswitchinterval(1e-6)
reply = inspection.to_json(inspection.Reply([], []))
identity = roster.Identity("worker0", 0, "x", 1).to_bytes()
together = threading.Barrier(8)

def decode():
    together.wait()
    assert inspection.from_json(reply, inspection.Reply) == inspection.Reply([], [])
    assert roster.Identity.from_bytes(identity).name == "worker0"

threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done")
"""


@pytest.mark.parametrize("_", range(3))
def test_threads_may_decode_the_same_class_for_the_first_time(_: int) -> None:
    """Msgspec crashed in five of six such processes."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
