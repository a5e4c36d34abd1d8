"""Coroutines whose steps run in a mode of the thread that their thread does not have in between."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any


async def in_steps(mode: Callable[[], AbstractContextManager[Any]], coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine, each of its steps in ``with mode():``; returns its result."""
    return await _stepped(mode, coroutine)


@types.coroutine
def _stepped(
    mode: Callable[[], AbstractContextManager[Any]], coroutine: Coroutine[Any, Any, Any]
) -> Generator[Any, Any, Any]:
    step: Callable[[], Any] = partial(coroutine.send, None)
    while True:
        with mode():
            try:
                awaited = step()
            except StopIteration as stop:
                return stop.value
        try:
            step = partial(coroutine.send, (yield awaited))
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:
            step = partial(coroutine.throw, error)
