"""How ``farprop stacks`` puts workers side by side."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from farprop.cli.stacks import blocks_of, layout
from farprop.inspect.job import Job
from farprop.protocol.inspection import Answer, CallId, Frame, Member, Silence, Snapshot, Thread

_SOLVE = Frame("/home/somebody/projects/a-long-directory-name/another-one/train.py", 88, "solve", "x = lock.acquire()")
_STEP = Frame("/home/somebody/train.py", 12, "step", "")


def _worker(number: int, frames: Sequence[Frame], pool: bool = True) -> Snapshot:
    name = f"w{number}"
    threads = [Thread("MainThread", 100 + number, False, None, None, None, [_STEP])]
    if pool:
        serves, waits_for = CallId("boss", name, 7 + number), CallId(name, "w9", number)
        threads.append(Thread(f"farprop-{name}", 200 + number, True, serves, waits_for, None, list(frames)))
        threads.append(Thread(f"farprop-{name}", 300 + number, False, None, None, None, [_STEP]))  # idle
    return Snapshot(
        Member(name, number, "host", 100 + number, "net"), "job", False, 0.0, 16, 1, False, [], [], 0, threads=threads
    )


def _shown(workers: Sequence[Answer], width: int) -> str:
    job = Job("job", {worker.name: worker for worker in workers})
    return layout(blocks_of(job, workers, whole=False), width)


def test_workers_with_the_same_stacks_are_one_block() -> None:
    text = _shown([_worker(0, [_SOLVE]), _worker(1, [_SOLVE]), _worker(2, [_STEP]), _worker(3, [_SOLVE])], 0)
    assert text.count("train.py:88 in solve") == 1
    same, other = text.split("\n\n")
    assert same.startswith("w0, w1, w3: 3 workers with the same stacks\n")
    assert "#" not in same  # ids of calls differ
    assert "  farprop computing\n    runs a function for boss\n    waits for w9.a function\n" in same
    assert other.startswith("w2 (rank 2, pid 102)\n")
    assert "runs a function for boss, call boss>w2#9" in other
    assert "(302)" not in other  # idle


def test_workers_that_wait_for_others_are_not_the_same() -> None:
    text = _shown([_worker(0, [_SOLVE]), _worker(1, [_SOLVE], pool=False)], 0)
    assert "the same" not in text


@pytest.mark.parametrize(("width", "columns"), [(0, 1), (80, 1), (122, 1), (123, 2), (130, 2), (190, 3), (400, 3)])
def test_as_many_columns_as_fit(width: int, columns: int) -> None:
    text = _shown([_worker(0, [_SOLVE]), _worker(1, [_STEP]), _worker(2, [_SOLVE, _STEP])], width)
    first = text.splitlines()[0]
    assert first.count("│") == columns - 1
    assert [name for name in ("w0", "w1", "w2") if f"{name} (rank" in first] == [f"w{n}" for n in range(columns)]
    if columns > 1:
        assert max(map(len, text.splitlines())) <= width
    words = "".join(text.split())
    assert words.count("x=lock.acquire()") == 2
    assert "train.py:88 in solve" in text  # of a long path the end stays


def test_a_silent_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farprop.cli.stacks.dump", lambda member: "  Thread 1 (idle)\n    read (file.py:3)")
    silent = [Silence(Member(f"w{n}", n, "host", 1, "net"), "answers nothing: it is stopped") for n in range(2)]
    text = _shown(silent, 140)
    assert text.count("answers nothing: it is stopped") == 2
    assert text.count("read (file.py:3)") == 2
