"""``farprop.workers``: calls, ``map``, interrupts, output, and who can join."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import Context
from pathlib import Path

import pytest
import torch

import farprop
import farprop.autograd as dist_autograd
import farprop.inspect
import farprop.rpc as rpc
from farprop.errors import UsageError
from farprop.launch.local import LocalWorkers
from farprop.launch.tasks import Tasks, _Task
from farprop.rpc.functions import async_execution
from tests.launch.interrupting import ctrl_c_when, make_fifo
from tests.support import leaks
from tests.support.openmp import threads_for_operators


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalWorkers]:
    """The pool of all tests here, which leaves nothing behind."""
    before = leaks.snapshot()
    with farprop.workers(2, timeout=100) as started:
        yield started
    assert not leaks.left_behind(before)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Not after each test: the pool makes threads and connections when it needs them, and keeps them."""


# What runs on workers. These travel by name: a worker has the sys.path of the driver.


def _raise(text: str) -> None:
    raise ValueError(text)


def _square(x: int) -> int:
    return x * x


def _print(text: str) -> None:
    print(text)
    print(text, file=sys.stderr)


async def _answer() -> int:
    return 42


@async_execution
def _answer_in_a_future() -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(43)
    return future


def _start_another_pool() -> None:
    farprop.workers(1).start()


def _loop(ready: str, interrupted: str) -> None:
    """Run until an interrupt, and say so."""
    try:
        Path(ready).write_text("ready")  # the interrupt may come before this returns
        while True:
            time.sleep(0.001)
    except KeyboardInterrupt:
        Path(interrupted).write_text("interrupted")
        raise


def _loop_or_raise(x: int, ready: str, interrupted: str) -> None:
    if x:
        Path(ready).read_text()
        raise ValueError("as soon as the other one runs")
    _loop(ready, interrupted)


def _name(_: int) -> str:
    return rpc.get_worker_info().name


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def _hold(ready: str, let_go: str) -> None:
    Path(ready).write_text("")
    Path(let_go).read_text()


# Calls


def test_calls_of_all_kinds(pool: LocalWorkers) -> None:
    first, second = pool
    assert (len(pool), first.name, pool[-1], pool[:1]) == (2, "worker0", second, [first])
    assert first.call(torch.add, torch.ones(2), torch.ones(2), alpha=3).tolist() == [4, 4]
    assert first.call_async(_square, 3).wait() == 9
    assert first.call(_answer) == 42
    assert first.call(_answer_in_a_future) == 43
    assert second.call(_name, 0) == "worker1"
    offset = 5
    assert second.call(lambda x: x + offset, 1) == 6
    assert rpc.get_worker_info().name == "driver"
    assert rpc.rpc_sync("worker1", _square, (4,)) == 16


def test_errors_of_functions_keep_their_type(pool: LocalWorkers) -> None:
    with pytest.raises(ValueError, match="three in the morning") as caught:
        pool[1].call(_raise, "three in the morning")
    assert "Raised on worker1" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="is not a function"):
        pool[0].call(3)  # type: ignore[arg-type]


def test_functions_are_shown_by_their_names(pool: LocalWorkers, tmp_path: Path) -> None:
    ready, let_go = make_fifo(tmp_path, "ready"), make_fifo(tmp_path, "let_go")
    future = pool[0].call_async(_hold, ready, let_go)
    Path(ready).read_text()
    job = farprop.inspect.job()
    Path(let_go).write_text("")
    future.wait()
    assert [call.function for call in job.calls] == [f"{__name__}:_hold"]


def test_references(pool: LocalWorkers) -> None:
    model = pool[0].remote(Model)
    assert model.owner_name() == "worker0"
    assert model.rpc_sync().forward(torch.tensor(2.0)).item() == 6
    assert pool[1].call(lambda there: there.rpc_sync().forward(torch.tensor(5.0)), model).item() == 15


def test_gradients(pool: LocalWorkers) -> None:
    x = torch.tensor(2.0, requires_grad=True)
    with dist_autograd.context() as context:
        loss = pool[0].call(torch.mul, x, x) + pool[1].call(lambda: torch.ones(1)).sum()
        dist_autograd.backward(context, [loss])
        assert dist_autograd.get_gradients(context)[x].item() == 4


def test_map(pool: LocalWorkers) -> None:
    assert pool.map(_square, range(20)) == [x * x for x in range(20)]
    assert pool.map(_square, (x for x in (3, 1, 2))) == [9, 1, 4]
    assert pool.map(_square, []) == []
    assert set(pool.map(_name, range(8))) == {"worker0", "worker1"}


def test_map_shows_its_progress(pool: LocalWorkers, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # no thread that stays
    pool.map(_square, range(3))
    assert capsys.readouterr().err == ""  # no terminal
    pool.map(_square, range(3), progress=True)
    assert "3/3" in capsys.readouterr().err


def test_the_first_error_ends_a_map(pool: LocalWorkers, tmp_path: Path) -> None:
    ready, interrupted = make_fifo(tmp_path, "ready"), make_fifo(tmp_path, "interrupted")
    taken = []

    def items() -> Iterator[int]:
        for x in (0, 1, 2, 3):
            taken.append(x)
            yield x

    with pytest.raises(ValueError, match="as soon as"):
        pool.map(lambda x: _loop_or_raise(x, ready, interrupted), items())
    assert Path(interrupted).read_text() == "interrupted"
    assert taken == [0, 1]
    assert pool.map(_square, range(3)) == [0, 1, 4]


def test_an_error_of_the_items_ends_a_map(pool: LocalWorkers) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.map(_square, (1 // (2 - x) for x in range(4)))
    assert pool.map(_square, range(3)) == [0, 1, 4]


def test_output_appears_here_before_the_result(pool: LocalWorkers, capsys: pytest.CaptureFixture[str]) -> None:
    pool[1].call(_print, "one\ntwo")
    assert capsys.readouterr() == ("worker1 | one\nworker1 | two\n", "worker1 | one\nworker1 | two\n")


# Interrupts


def test_ctrl_c_interrupts_a_call(pool: LocalWorkers, tmp_path: Path) -> None:
    ready, interrupted = make_fifo(tmp_path, "ready"), make_fifo(tmp_path, "interrupted")
    with ctrl_c_when(ready):
        pool[0].call(_loop, ready, interrupted)
    assert Path(interrupted).read_text() == "interrupted"
    assert pool[0].call(_square, 3) == 9


def test_ctrl_c_interrupts_a_map(pool: LocalWorkers, tmp_path: Path) -> None:
    ready = [make_fifo(tmp_path, f"ready{index}") for index in range(2)]
    interrupted = [make_fifo(tmp_path, f"interrupted{index}") for index in range(2)]
    relay = make_fifo(tmp_path, "both")

    def wait_for_both() -> None:
        for path in ready:
            Path(path).read_text()
        Path(relay).write_text("ready")

    thread = threading.Thread(target=wait_for_both)
    thread.start()
    with ctrl_c_when(relay):
        pool.map(lambda pair: _loop(*pair), zip(ready, interrupted, strict=True))
    thread.join()
    assert [Path(path).read_text() for path in interrupted] == ["interrupted"] * 2
    assert pool.map(_square, range(3)) == [0, 1, 4]


def _interrupt_many_tasks() -> bool:
    """Interrupt short tasks around their ends; returns whether all threads bore it."""
    tasks = Tasks()
    for number in range(300):
        done, begun = threading.Event(), threading.Event()

        def work(begun: threading.Event = begun, loops: int = number % 50) -> None:
            begun.set()
            for _ in range(loops):
                pass

        task = _Task(number, work, Context())
        task.subscribe(done.set)
        tasks.start(task)
        begun.wait()
        tasks.interrupt(number)
        if not done.wait(10):  # an interrupt outside of a function has ended the thread
            return False
    return True


def test_an_interrupt_never_comes_after_its_function(pool: LocalWorkers) -> None:
    assert pool[0].call(_interrupt_many_tasks)


def _threads_for_operators_of_a_task() -> int:
    torch.set_num_threads(3)
    found: list[int] = []
    done = threading.Event()
    task = _Task(0, lambda: found.append(threads_for_operators()), Context())
    task.subscribe(done.set)
    Tasks().start(task)
    assert done.wait(30)
    return found[0]


def test_operators_use_the_threads_that_torch_was_told_to_use(pool: LocalWorkers) -> None:
    before = pool[0].call(torch.get_num_threads)
    assert pool[0].call(_threads_for_operators_of_a_task) == 3
    pool[0].call(torch.set_num_threads, before)


# Wrong use


def test_a_second_pool_is_refused(pool: LocalWorkers) -> None:
    with pytest.raises(UsageError, match="This process is a worker already"):
        farprop.workers(1).start()
    with pytest.raises(UsageError, match="This process is a worker already"):
        pool[0].call(_start_another_pool)
    with pytest.raises(UsageError, match="belongs to"):
        pool[0].call(len, pool)
    with pytest.raises(UsageError, match="one worker or more"):
        farprop.workers(0)


# Secrets


def test_the_secret_is_in_no_command_line_and_no_environment(pool: LocalWorkers) -> None:
    secret = pool._agent._settings.secret.encode()  # type: ignore[union-attr]
    assert len(secret) == 64
    for worker in pool:
        process = Path(f"/proc/{worker.call(os.getpid)}")
        assert secret not in (process / "cmdline").read_bytes() + (process / "environ").read_bytes()


def test_the_store_listens_on_loopback_alone(pool: LocalWorkers) -> None:
    port = f":{pool._store.port:04X}"  # type: ignore[union-attr]
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listening = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(port)]
    assert listening == [f"0100007F{port}"]
