"""Coroutines of called functions, at the end of their worker."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from farprop.errors import CallCancelledError
from farprop.runtime.async_results import AsyncResults


async def _one() -> int:
    return 1


def _has_thread() -> bool:
    return any(thread.name == "farprop-async-ending" for thread in threading.enumerate())


@pytest.mark.parametrize("has_run_others", [False, True])
def test_coroutine_that_comes_after_the_end_does_not_run(has_run_others: bool) -> None:
    """A request that a thread of the pool runs while the worker shuts down."""
    results = AsyncResults(SimpleNamespace(), "ending")  # type: ignore[arg-type]
    request: Any = SimpleNamespace(is_cancelled=False, stop_with=lambda stop: False)
    if has_run_others:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        results.on_unfinished(_one(), None, answers.put, answers.put, request)  # type: ignore[arg-type]
        assert answers.get(timeout=30) == 1
    results.close()
    failed: list[BaseException] = []
    results.on_unfinished(_one(), None, failed.append, failed.append, request)  # type: ignore[arg-type]
    assert [type(error) for error in failed] == [CallCancelledError]
    assert not _has_thread()
