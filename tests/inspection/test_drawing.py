"""The drawing of an autograd context."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.autograd.drawing import Drawing
from farprop.errors import UsageError
from farprop.protocol.inspection import GraphPart, GraphSend, Silence
from farprop.runtime.recorder import recorder
from tests.references.looking import wait_until
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
    assert '1 node, 1 leaf<br/>1 gradient"]' in after.mermaid
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


def _listen(stop: bool = False) -> None:
    if stop:
        _listening.pop()()
    else:
        _listening.append(recorder.subscribe(lambda event: None))


_listening: list[Any] = []


def _send_twice() -> Drawing:
    with dist_autograd.context() as context:
        for _ in range(2):
            rpc.rpc_sync("worker1", double, (torch.ones(1000, requires_grad=True),))
        return dist_autograd.draw(context)


def test_arrows_have_bytes_and_times_if_somebody_listened() -> None:
    with cluster(2) as job:
        assert [arrow.nbytes for arrow in job.run(0, _send_twice).arrows] == [None, None]
        job.run(0, _listen)
        assert [arrow.nbytes for arrow in job.run(0, _send_twice).arrows] == [None, None]  # the other end does not
        job.run(1, _listen)
        drawing = job.run(0, _send_twice)
        for arrow in drawing.arrows:
            assert (arrow.messages, arrow.tensors, arrow.nbytes) == (2, 2, 8000)
            assert arrow.seconds is not None
            assert 0 < arrow.seconds < 60
            assert arrow.error == 0.0  # the same host has the same clock
        for text in (drawing.svg, drawing.mermaid, drawing.dot):
            assert text.count("7.8 KiB, ") == 2
            assert text.count(" each") == 2
        for rank in (0, 1):
            job.run(rank, _listen, True)


def test_arrows_don_t_lie_on_each_other() -> None:
    names = [f"w{n}" for n in range(4)]
    came = {"w1": ["w0"], "w2": ["w0", "w1"], "w3": ["w0", "w1", "w2"], "w0": ["w3", "w0"]}
    parts = [GraphPart(name, 1, 1, [], {sender: [1] for sender in came[name]}, 0) for name in names]
    drawing = Drawing(1, parts)
    at = {(arrow.sender, arrow.receiver): level for arrow, level in zip(drawing.arrows, drawing._levels(), strict=True)}
    assert at["w0", "w1"] == at["w1", "w2"] == at["w2", "w3"]
    assert len({at["w0", "w2"], at["w1", "w3"], at["w0", "w1"], at["w0", "w3"]}) == 4
    assert at["w3", "w0"] == 1
    ElementTree.fromstring(drawing.svg)


def test_times_between_hosts_count_the_clocks() -> None:
    sent = GraphPart("w0", 1, 1, [GraphSend(7, 1, 1, 1, [], 100, 50.0)], {}, 0)
    got = GraphPart("w1", 1, 1, [], {"w0": [7]}, 0, {7: 1050.5}, clock_ahead=1000.0, clock_error=0.1)
    (arrow,) = Drawing(1, [sent, got]).arrows
    assert arrow.seconds == pytest.approx(0.5)
    assert arrow.lines[1] == "100 B, 500.0 ms"
    (arrow,) = Drawing(1, [sent, replace(got, clock_error=0.9)]).arrows
    assert arrow.lines[1] == "100 B, under 900.0 ms"


def _is_stopped(pid: int) -> bool:
    """Whether all threads are: they go on for a moment after the signal."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def _draw_with_a_stopped_worker(pid: int) -> Any:
    import os

    with dist_autograd.context() as context:
        rpc.rpc_sync("worker1", double, (torch.ones(2, requires_grad=True),))
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: _is_stopped(pid))
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
