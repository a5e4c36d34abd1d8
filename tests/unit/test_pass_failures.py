"""Failing passes on a network that loses messages: who undoes, who is asked, what is said again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farprop.errors import ConnectionLostError, FarpropError
from farprop.protocol.credit import Credit
from farprop.protocol.passes import PassId, Share
from farprop.runtime.gradients.contexts import Context, Contexts
from farprop.runtime.gradients.failing import Failures
from farprop.runtime.gradients.local import LocalPass
from farprop.runtime.gradients.origins import Origins
from farprop.runtime.gradients.post import answer
from farprop.wire.codec import decode_call
from farprop.wire.dialect import PICKLES
from farprop.wire.frames import ANSWER, Frame

ME = 1


class Network:
    """Workers 0 to 4. Calls to those in ``broken`` are lost so many times."""

    rpc_timeout = 60.0
    dialect = PICKLES

    def __init__(self) -> None:
        self.broken: dict[int, int] = {}
        self.knows: dict[int, list[int]] = {}
        self.calls: list[tuple[int, str]] = []

    def name_of_rank(self, rank: int) -> str:
        return f"worker{rank}"

    def ranks(self) -> list[int]:
        return list(range(5))

    def _reach(self, rank: int, name: bytes) -> None:
        self.calls.append((rank, name.decode().rpartition(":")[2]))
        if self.broken.get(rank, 0):
            self.broken[rank] -= 1
            raise ConnectionLostError("cut")

    def call_own(self, rank: int, name: bytes, encoded: Any, timeout: float, system: bool) -> Frame:
        self._reach(rank, name)
        made = answer(PICKLES, self.knows.get(rank, []))
        return Frame(ANSWER, made.flags, 1, 0.0, b"", made.meta, (), [])

    def send_own(self, rank: int, name: bytes, encoded: Any, call: Any, system: bool) -> None:
        self._reach(rank, name)

    def submit(self, function: Any, *args: Any) -> None:
        function(*args)


class Worker:
    def __init__(self, origin: int) -> None:
        self.network = Network()
        contexts = Contexts(ME)
        self.origins = Origins()
        self.failures = Failures(ME, self.network, contexts, self.origins)  # type: ignore[arg-type]
        self.context: Context = contexts.new()
        self.leaf = torch.ones(2, requires_grad=True)
        self.context.gradients[self.leaf] = torch.full((2,), 5.0)
        self.id = PassId(origin, 1)
        self.local = self.run(self.id)

    def run(self, pass_id: PassId) -> LocalPass:
        """A pass that has added to the gradient here."""
        pair = self.context._new_pair()
        self.context.send(2, lambda graph: _noted(graph, self.leaf * 2))
        ((pair, _),) = list(self.context.sends.items())[-1:]
        local = LocalPass(self.context, ME, pass_id, fast=False, keep_graph=True, anomaly=False)
        self.context.passes[pass_id] = local
        local.bring(pair, [torch.ones(2)])
        (run,) = local.machine.come(pair, Share(Credit(1, 1), {}))
        local.execute(run)  # type: ignore[arg-type]
        local.machine.ran(run)  # type: ignore[arg-type]
        return local

    @property
    def gradient(self) -> list[float]:
        return self.context.gradients[self.leaf].tolist()


def _noted(graph: Any, tensor: torch.Tensor) -> Any:
    graph.append(tensor)
    return answer(PICKLES, None)


def test_who_notices_does_not_undo_what_may_have_ended() -> None:
    worker = Worker(origin=0)
    worker.failures.fail(worker.local, ConnectionLostError("the partner is gone"))
    assert worker.gradient == [7.0, 7.0]
    assert worker.network.calls == [(0, "failed")]
    (known,), _ = _decoded(worker.failures.abort(worker.context.id, worker.id))
    assert worker.gradient == [5.0, 5.0]
    assert known == [2]
    # Asked again, because its answer was lost, it says the same.
    assert _decoded(worker.failures.abort(worker.context.id, worker.id))[0] == ([2],)
    assert worker.gradient == [5.0, 5.0]


def _decoded(encoded: Any) -> Any:
    return decode_call(encoded.meta, encoded.buffers, encoded.flags)


def test_a_failure_is_told_again() -> None:
    worker = Worker(origin=0)
    worker.network.broken[0] = 2
    worker.failures.fail(worker.local, ValueError("no"))
    assert worker.network.calls == [(0, "failed")] * 3
    worker.failures.fail(worker.local, ValueError("no"))  # no news
    assert len(worker.network.calls) == 3


def test_the_origin_asks_who_can_be_reached_and_whom_they_know() -> None:
    worker = Worker(origin=ME)
    worker.network.knows = {2: [1, 3], 3: [2]}
    worker.network.broken[2] = 1
    worker.failures.abort_everywhere(worker.local)
    assert worker.network.calls == [(2, "abort"), (2, "abort"), (3, "abort")]
    assert worker.gradient == [5.0, 5.0]


def test_whom_a_dead_worker_knew_is_found_by_asking_everybody() -> None:
    worker = Worker(origin=ME)
    worker.network.broken[2] = 99
    worker.failures.abort_everywhere(worker.local)
    assert {rank for rank, _ in worker.network.calls} == {0, 2, 3, 4}


def test_a_failure_at_the_origin_is_its_error() -> None:
    worker = Worker(origin=ME)
    origin = worker.origins.start(worker.id, 1.0)
    worker.failures.fail(worker.local, FarpropError("first"))
    worker.failures.fail(worker.local, FarpropError("second"))
    with pytest.raises(FarpropError, match="first"):
        origin.next(lambda: None)
    assert worker.network.calls == []
