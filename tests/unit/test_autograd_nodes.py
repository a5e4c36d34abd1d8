"""Sending a tensor that another thread is using."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import threading
import torch
from farprop.runtime.autograd.nodes import SendRpcBackward

torch.set_num_threads(1)
turn = threading.Barrier(2)
views = []


def use():
    for _ in range(5000):
        base = torch.ones(4, requires_grad=True) * 2
        view = base[:2]
        base.mul_(3)  # the view's node has to be made anew, by whoever wants it first
        views.append(view)
        turn.wait()
        view + view
        turn.wait()


def send():
    for _ in range(5000):
        turn.wait()
        ((node, _),) = SendRpcBackward([views.pop()]).next_functions
        assert node is not None
        turn.wait()


threads = [threading.Thread(target=target) for target in (use, send)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("both are done")
"""


def test_a_view_that_another_thread_uses_can_be_sent() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "both are done\n", done.stderr
