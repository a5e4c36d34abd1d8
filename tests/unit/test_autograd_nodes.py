"""Sending tensors that other threads are using."""

from __future__ import annotations

import subprocess
import sys

_THREADS = """
import threading
import torch
from farprop.runtime.autograd.nodes import SendRpcBackward

torch.set_num_threads(1)
turn = threading.Barrier(2)
shared = []


def run_both(*targets):
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("both are done")
"""

_VIEW = """
def use():
    for _ in range(5000):
        base = torch.ones(4, requires_grad=True) * 2
        view = base[:2]
        base.mul_(3)  # the next access, on any thread, rebuilds the view's node
        shared.append(view)
        turn.wait()
        view + view
        turn.wait()


def send():
    for _ in range(5000):
        turn.wait()
        ((node, _),) = SendRpcBackward([shared.pop()]).next_functions
        assert node is not None
        turn.wait()


run_both(use, send)
"""

_LEAF = """
class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return None  # an operator would let other threads run


def use():
    for _ in range(50):
        leaves = [torch.ones(2, requires_grad=True) for _ in range(300)]
        sent = SendRpcBackward(leaves)
        assert all(node.variable is leaf for (node, _), leaf in zip(sent.next_functions, leaves, strict=True))
        shared.append(leaves)
        turn.wait()
        torch._foreach_neg(leaves)  # looks up their nodes one after the other, without the interpreter's lock
        turn.wait()


def apply():
    for _ in range(50):
        turn.wait()
        for leaf in reversed(shared.pop()):
            Nothing.apply(leaf)
        turn.wait()


run_both(use, apply)
"""


def _run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _THREADS + program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "both are done\n", done.stderr


def test_view_in_use_by_another_thread_can_be_sent() -> None:
    _run(_VIEW)


def test_sent_leaf_can_be_used_by_two_threads_at_once() -> None:
    _run(_LEAF)
