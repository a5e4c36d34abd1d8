"""The queue of requests: callers take turns, and nothing is lost or run out of order."""

from __future__ import annotations

import random

import pytest

from farprop.runtime.request_queue import LONG, Request, RequestQueue


def _pop(queue: RequestQueue) -> tuple[int, int]:
    """Take the next request, as a thread of the pool does."""
    in_turn = queue.dealt or len(queue.waiting) > LONG
    caller, _, (number,) = queue.pop_sorted() if in_turn else queue.waiting.popleft()
    return caller, number


def _request(caller: int, number: int) -> Request:
    return caller, print, (number,)


@pytest.mark.parametrize("seed", range(300))
def test_each_request_runs_once_and_in_the_order_of_its_caller(seed: int) -> None:
    rng = random.Random(seed)
    queue = RequestQueue()
    arrived = 0
    taken: list[tuple[int, int]] = []
    for _ in range(200):
        for _ in range(rng.choice([0, 0, 1, 3, 30])):
            queue.waiting.append(_request(rng.choice([1, 1, 1, 2, 3]), arrived))
            arrived += 1
        for _ in range(min(len(queue), rng.choice([0, 1, 5, 20]))):
            taken.append(_pop(queue))
        assert len(queue) == arrived - len(taken)
        assert bool(queue.waiting) == (len(queue) > 0)  # threads look at it to see whether there is work
    while queue.waiting:
        taken.append(_pop(queue))
    assert sorted(number for _, number in taken) == list(range(arrived))
    for caller in (1, 2, 3):
        own = [number for by, number in taken if by == caller]
        assert own == sorted(own)


@pytest.mark.parametrize("callers", [1, 2, 5, 40])
def test_a_newcomer_waits_for_a_turn_of_each_other_caller_at_most(callers: int) -> None:
    queue = RequestQueue()
    for number in range(1000):
        for caller in range(callers):
            queue.waiting.append(_request(caller, number))
    for _ in range(17):
        _pop(queue)
    queue.waiting.append(_request(99, 0))
    before = 0
    while _pop(queue)[0] != 99:
        before += 1
    assert before <= 2 * max(LONG, callers)
