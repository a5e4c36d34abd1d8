"""What workers call on each other during backward passes, found by name. They run on threads of the pool."""

from __future__ import annotations

from typing import Any

from farprop.protocol.passes import PassId
from farprop.runtime.gradients.space import GradientSpace
from farprop.runtime.loop import loop_of_this_thread
from farprop.wire.codec import Encoded


def _space() -> GradientSpace:
    loop = loop_of_this_thread()
    assert loop is not None, "this runs on threads of the pool only"
    return loop.home.gradients  # type: ignore[no-any-return]


def propagate(sender: int, head: bytes, *gradients: Any) -> Encoded:
    return _space().propagate(sender, head, gradients)


def give_back(head: bytes) -> None:
    _space().give_back(head)


def release(head: bytes, *used: int) -> None:
    _space().release_sources(head, used)


def survey(head: bytes, pairs: list[int]) -> Encoded:
    return _space().survey(head, pairs)


def failed(origin: int, number: int, failure: bytes) -> None:
    """Another worker says that a pass of ours failed."""
    _space().failures.hear(PassId(origin, number), failure)


def abort(context_id: int, origin: int, number: int) -> Encoded:
    return _space().failures.abort(context_id, PassId(origin, number))


def exists(context_id: int, asker: int) -> Encoded:
    return _space().exists(context_id, asker)
