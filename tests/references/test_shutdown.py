"""References during the shutdown of a job, a worker or a process."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import time
from typing import Any
from unittest import mock

import pytest
import torch

import farprop.rpc as rpc
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import become_empty, counts, owned, wait_until
from tests.support.workers import run_workers


def _start(rank: int, size: int = 2) -> str:
    """Start this worker; returns the name of the next one."""
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    return f"worker{(rank + 1) % size}"


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _leak(rank: int, ignored: bool) -> tuple[str, int]:
    other = _start(rank)
    line = sys._getframe().f_lineno + 1
    rref = rpc.remote(other, torch.add, args=(torch.ones(2, 2), 1))
    thing = rpc.remote(other, g.Thing)
    assert torch.equal(rref.to_here(), torch.full((2, 2), 2.0))
    assert thing.rpc_sync().plus(1) == 1
    heard = Warnings()
    logging.getLogger("farprop").addHandler(heard)
    # As torch's test does: keep the remaining references.
    with mock.patch.object(rpc.api, "_delete_all_user_and_unforked_owner_rrefs"):
        if ignored:
            rpc.api._ignore_rref_leak = True
            rpc.shutdown()
            (report,) = [text for text in heard.texts if "Leaking" in text]
        else:
            rpc.api._ignore_rref_leak = False
            with pytest.raises(RuntimeError, match="Leaking RRef") as caught:
                rpc.shutdown()
            report = str(caught.value)
    assert not rpc._is_current_rpc_agent_set()
    return report, line


@pytest.mark.parametrize("ignored", [False, True])
def test_the_leak_report_names_value_and_holder(ignored: bool) -> None:
    results = run_workers(_leak, 2, (ignored,))
    for rank, (report, line) in enumerate(results):
        other = f"worker{1 - rank}"
        assert f"values of worker{rank}" in report
        lines = report.splitlines()[1:]
        assert len(lines) == 2
        (of_tensor,) = [text for text in lines if "Tensor" in text]
        (of_thing,) = [text for text in lines if "Thing" in text]
        where = rf"\(made\), held by {other}, made by (\S+), created at {re.escape(__file__)}:(\d+)"
        name = r"  GloballyUniqueId\(created_on=\d, local_id=\d+\)"
        found = re.fullmatch(rf"{name}: a Tensor of 16 bytes {where}", of_tensor)
        assert found
        assert found.groups() == ("torch:add", str(line))
        found = re.fullmatch(rf"{name}: a Thing of \d+ bytes {where}", of_thing)
        assert found
        assert found.groups() == ("tests.references.functions:Thing", str(line + 1))


def _leak_found_late(rank: int) -> None:
    other = _start(rank)
    rref = rpc.remote(other, f.identity, args=(1,))
    assert rref.to_here() == 1
    report = rpc.api._report_leaks
    rpc.api._ignore_rref_leak = False

    def late(*args: Any) -> None:
        if rank == 0:
            wait_until(lambda: not owned())  # worker1 has left by then, and its reference is gone
        report(*args)

    with (
        mock.patch.object(rpc.api, "_delete_all_user_and_unforked_owner_rrefs"),
        mock.patch.object(rpc.api, "_report_leaks", late),
        pytest.raises(RuntimeError, match="Leaking RRef"),
    ):
        rpc.shutdown()


def test_a_leak_is_reported_even_if_its_holder_has_left() -> None:
    run_workers(_leak_found_late, 2)


def _use_after_shutdown(rank: int) -> None:
    other = _start(rank)
    kept = rpc.remote(other, f.add, args=(1,))
    failed = rpc.remote(other, f.raise_custom)
    assert kept.to_here() == 2
    mine = rpc.RRef(5)
    assert rpc.rpc_sync(other, g.to_here, args=(mine,)) == 5
    rpc.shutdown()
    for rref in (kept, failed):
        for use in (rref.to_here, rref.rpc_sync().plus, rref.rpc_async().plus, rref.remote().plus, rref._get_type):
            with pytest.raises(RuntimeError, match=r"has been deleted. Cannot call .* after deletion"):
                use()
        with pytest.raises(RuntimeError, match="Cannot call fork an UserRRef after deletion"):
            rref._serialize()
        with pytest.raises(RuntimeError, match="has not been initialized"):
            rpc.rpc_sync(other, f.identity, args=(rref,))
        assert str(rref).startswith("UserRRef(")
        assert rref.owner_name() == other
    assert mine.local_value() == 5
    assert mine.to_here() == 5


def test_references_after_shutdown() -> None:
    run_workers(_use_after_shutdown, 2)


def _keep_references_everywhere(rank: int) -> None:
    """Keep references in values, in globals, in a cycle through two workers, and to a pending value."""
    other = _start(rank)
    thing = rpc.remote(other, g.Thing, args=("end",))
    thing.rpc_sync().set_inner([rpc.RRef(g.Thing("cycle", thing)), thing])
    g.keep("thing", thing)
    rpc.rpc_sync(other, g.keep, args=("given", thing))
    g.keep("pending", rpc.remote(other, g.at_gate, args=("end",)))
    rpc.api._ignore_rref_leak = False
    rpc.rpc_sync(other, g.open_gate, args=("end",))
    rpc.shutdown()  # a leak would be an error
    g.kept.clear()


def test_graceful_shutdown_drops_all_references_including_cycles() -> None:
    run_workers(_keep_references_everywhere, 2)


class CallsInFinaliser:
    def __init__(self, other: str) -> None:
        self.other = other

    def __del__(self) -> None:
        try:
            rpc.rpc_sync(self.other, g.note, args=("called at the end",), timeout=5)
        except RuntimeError as error:
            g.note(str(error))


def _finaliser_during_shutdown(rank: int) -> tuple[list[Any], float]:
    other = _start(rank)
    g.keep("last", rpc.remote(other, CallsInFinaliser, args=(f"worker{rank}",)))
    g.kept["last"]._get_future().wait()
    began = time.monotonic()
    rpc.shutdown()
    return g.noted(), time.monotonic() - began


def test_finalisers_can_make_calls_during_shutdown() -> None:
    for noted, seconds in run_workers(_finaliser_during_shutdown, 2):
        assert noted == ["called at the end"]
        assert seconds < 20


def _ungraceful_shutdown(rank: int) -> list[str]:
    other = _start(rank)
    kept = rpc.remote(other, g.Thing)
    pending = rpc.remote(other, g.at_gate, args=("ungraceful",))
    assert kept.rpc_sync().plus(1) == 1
    rpc.rpc_sync(other, g.keep, args=("given", kept))
    if rank == 0:
        rpc.rpc_sync(other, g.open_gate, args=("go",))
        g.at_gate("go")
    else:
        g.at_gate("go")
        rpc.rpc_sync(other, g.open_gate, args=("go",))
    g.open_gate("ungraceful")
    began = time.monotonic()
    rpc.shutdown(graceful=False)
    assert time.monotonic() - began < 10
    texts = []
    for rref in (kept, pending, g.kept["given"]):
        try:
            rref.rpc_sync().plus(1)
        except RuntimeError as error:
            texts.append(str(error))
    del kept, pending, rref
    g.kept.clear()
    gc.collect()
    return texts


def test_ungraceful_shutdown_with_references() -> None:
    for texts in run_workers(_ungraceful_shutdown, 2, check=False):
        assert len(texts) == 3


def _init_three_times(rank: int) -> None:
    old: list[Any] = []
    for run in range(3):
        other = _start(rank)
        rref = rpc.remote(other, f.identity, args=((rank, run),))
        assert rref.to_here() == (rank, run)
        mine = rpc.RRef((rank, run))
        assert rpc.rpc_sync(other, g.to_here, args=(mine,)) == (rank, run)
        for earlier in old:
            # The ids of references start again, so the old ones could reach other values.
            with pytest.raises(RuntimeError):
                rpc.rpc_sync(other, g.to_here, args=(earlier,))
            if not earlier.is_owner():
                with pytest.raises(RuntimeError):
                    earlier.to_here()
        rpc.api._ignore_rref_leak = False
        if run != 1:
            old += [rref, mine]
            rpc.shutdown()
        else:
            del rref, mine, earlier
            old.clear()  # of the first run, dropped in the second
            become_empty()
            rpc.shutdown()


def test_references_of_an_earlier_init_raise() -> None:
    run_workers(_init_three_times, 2)


def _fork(rank: int) -> list[int]:
    other = _start(rank)
    codes = []
    if rank == 0:
        rref = rpc.remote(other, g.Thing, args=("forked",))
        mine = rpc.RRef(g.Thing("mine"))
        rpc.rpc_sync(other, g.keep, args=("mine", mine))
        wait_until(lambda: counts()["num_pending_forks"] == 0)
        before = counts()
        for use in (rref.to_here, rref.rpc_sync().plus, lambda: rpc.RRef(5), gc.collect):
            pid = os.fork()
            if pid == 0:
                code = 3
                try:
                    use()
                except RuntimeError as error:
                    code = 4 if "has not been initialized" in str(error) else 5
                rref = mine = use = None  # type: ignore[assignment]
                gc.collect()
                os._exit(code)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        # The child's references are copies that no owner lists.
        assert rref.rpc_sync().plus(1) == 1
        assert mine.local_value().plus(1) == 1
        assert counts() == before
        assert rpc.rpc_sync(other, owned) == 1
        del rref, mine, use
        rpc.rpc_sync(other, g.let_go, args=("mine",))
        wait_until(lambda: rpc.rpc_sync(other, g.things, args=("forked",)) == 0)
        become_empty()
    rpc.shutdown()
    return codes


def test_a_forked_child_does_not_release_references() -> None:
    assert run_workers(_fork, 2)[0] == [4, 4, 4, 3]


def _exit_with_references(rank: int) -> None:
    other = _start(rank)
    g.keep("one", rpc.remote(other, g.Thing))
    g.keep("two", rpc.RRef(g.Thing("two", g.kept["one"])))
    rpc.rpc_sync(other, g.keep, args=("three", g.kept["two"]))
    rpc.remote(other, g.at_gate, args=("never",))
    # Both workers reach this point before the first one exits.
    rpc.rpc_sync(other, g.open_gate, args=("exit",))
    g.at_gate("exit")
    # no shutdown


def test_exiting_with_references_neither_hangs_nor_crashes() -> None:
    run_workers(_exit_with_references, 2, check=False, full_exit=True)
