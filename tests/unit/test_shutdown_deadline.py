"""How ``shutdown`` divides its timeout among its stages, on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from farprop.errors import RpcTimeoutError
from farprop.ids import WorkerInfo
from farprop.rpc import api
from farprop.runtime.agent import last_seconds


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class StubAgent:
    """An idle worker. ``deadline`` is what its own shutdown gets."""

    idle = True
    is_static_group = True
    rpc_timeout = 60.0

    class peers:  # noqa: N801
        requests_sent = 0

    deadline: float | None = None

    def get_worker_info(self) -> WorkerInfo:
        return WorkerInfo("worker0", 0)

    def shutdown(self, deadline: float | None) -> None:
        self.deadline = deadline


class Stages:
    """A gather takes ``seconds``, or as long as it may, and then times out."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float) -> None:
        self.agent, self.clock, self.timeouts = StubAgent(), Clock(), list[float]()
        self._seconds = seconds
        patch.setattr(api, "current_agent", lambda: self.agent)
        patch.setattr(api, "_reset_current_rpc_agent", lambda: None)
        patch.setattr(api, "_delete_all_user_and_unforked_owner_rrefs", lambda: None)
        patch.setattr(api, "_note_owned", lambda leaks: None)
        patch.setattr(api, "time", self.clock)
        patch.setattr(api, "_gather", self._gather)

    def _gather(self, obj: Any, worker_names: Any, timeout: float, flags: int = 0) -> dict[str, Any]:
        self.timeouts.append(timeout)
        if timeout and timeout < self._seconds:
            self.clock.now += timeout
            raise RpcTimeoutError("late")
        self.clock.now += self._seconds
        return {"worker0": obj}


def test_all_stages_together_have_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, seconds=3.0)
    with pytest.raises(RpcTimeoutError):
        api.shutdown(timeout=4.0)
    assert stages.timeouts == pytest.approx([4.0, 1.0, 0.001])
    assert stages.clock.now == pytest.approx(104.001)
    assert stages.agent.deadline == pytest.approx(104.0)


def test_a_shutdown_without_a_timeout_has_none_in_any_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, seconds=50.0)
    api.shutdown()
    assert set(stages.timeouts) == {0.0}
    assert stages.agent.deadline is None


def test_the_last_steps_after_the_deadline_take_less_than_a_second() -> None:
    assert last_seconds(2.0, None, now=10.0) == 2.0
    assert last_seconds(2.0, 11.0, now=10.0) == 1.0
    assert last_seconds(2.0, 30.0, now=10.0) == 2.0
    assert 2 * last_seconds(2.0, 9.0, now=10.0) < 1.0
