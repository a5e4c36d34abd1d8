"""The drawing of an autograd context."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.autograd.drawing import Drawing
from farprop.errors import UsageError
from farprop.protocol.inspection import Silence
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def through_worker2(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", double, (x * 3,)) + 1  # type: ignore[no-any-return]


def _drawn() -> tuple[Drawing, Drawing]:
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("worker1", through_worker2, (torch.ones(2, requires_grad=True),)).sum()
        before = dist_autograd.draw(context)
        dist_autograd.backward(context, [loss])
        return before, dist_autograd.draw(context)


def test_arrows_are_the_messages_of_the_forward_pass(tmp_path: Path) -> None:
    with cluster(4) as job:
        before, after = job.run(0, _drawn)
    assert before.workers == ["worker0", "worker1", "worker2"]  # worker3 takes no part
    ends = {(arrow.sender, arrow.receiver): (arrow.messages, arrow.tensors) for arrow in before.arrows}
    pairs = [("worker0", "worker1"), ("worker1", "worker2"), ("worker2", "worker1"), ("worker1", "worker0")]
    assert ends == dict.fromkeys(pairs, (1, 1))
    assert after.parts[0].gradients == 1
    picture = ElementTree.fromstring(before.svg)
    space = {"svg": "http://www.w3.org/2000/svg"}
    assert len(picture.findall("svg:rect", space)) == 3
    assert len(picture.findall("svg:path", space)) == 4
    assert before._repr_svg_() == before.svg
    assert before.mermaid.count("-->") == before.dot.count("->") == 4
    for ending in (".svg", ".dot", ".mmd"):
        before.save(tmp_path / f"graph{ending}")
        assert "worker2" in (tmp_path / f"graph{ending}").read_text()
    with pytest.raises(ValueError, match="not as '.png'"):
        before.save(tmp_path / "graph.png")


def _draw_with_a_stopped_worker(pid: int) -> Any:
    import os

    with dist_autograd.context() as context:
        rpc.rpc_sync("worker1", double, (torch.ones(2, requires_grad=True),))
        os.kill(pid, signal.SIGSTOP)
        try:
            return dist_autograd.draw(context, timeout=0.3)
        finally:
            os.kill(pid, signal.SIGCONT)


def _no_context() -> None:
    with pytest.raises(UsageError):
        dist_autograd.draw(1 << 20)


def test_worker_that_does_not_answer_is_drawn_with_the_reason() -> None:
    with cluster(2) as job:
        drawing = job.run(0, _draw_with_a_stopped_worker, job.pid(1))
        assert isinstance(drawing.parts[1], Silence)
        assert "answers nothing: it is stopped" in drawing.svg
        job.run(0, _no_context)
