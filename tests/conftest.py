"""What holds for every test: nothing is left behind, and runs on one machine don't see each other's files."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack

import pytest

from tests.support import forkserver, leaks, lock_order
from tests.support.hosts import Hosts, NotAllowedError

_failed = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    lock_order.install()  # before any test imports what makes locks
    # A shell has what it starts in the background ignore Ctrl-C, and so would the programs that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Farprop's files must be this run's own, or the check would find those of another run. Pytest's own
    # directories stay where people look for them.
    private = tempfile.mkdtemp(prefix="tests-")
    patch = pytest.MonkeyPatch()
    if "PYTEST_DEBUG_TEMPROOT" not in os.environ:
        patch.setenv("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    patch.setenv("TMPDIR", private)
    patch.delenv("XDG_RUNTIME_DIR", raising=False)
    patch.setattr(tempfile, "tempdir", private)
    leaks.mark_semaphores()

    def undo() -> None:
        patch.undo()
        shutil.rmtree(private, ignore_errors=True)

    config.add_cleanup(undo)


def pytest_collection_finish(session: pytest.Session) -> None:
    if "torch.distributed" in sys.modules:
        leaks.warm_up()
    # Torch takes seconds to import: let the fork server do it while the first tests run.
    if "tests.support.workers" in sys.modules and session.items and not session.config.option.collectonly:
        forkserver.server()
        session.config.add_cleanup(forkserver.stop_servers)


def pytest_runtest_protocol(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function):
        forkserver.test_module = item.module.__name__
        leaks.mark_semaphores()  # again: a test may have run what sets multiprocessing up anew


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads, processes, descriptors, shared memory or files behind."""
    before = leaks.snapshot()
    yield
    # A failed test's traceback keeps its variables alive, and with them what they hold.
    if not request.node.stash.get(_failed, False) and (left := leaks.left_behind(before)):
        pytest.fail("left behind:\n" + "\n".join(f"- {text}" for text in left), pytrace=False)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Three hosts, which are network namespaces."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts(3))
        except NotAllowedError as error:
            pytest.skip(str(error))
        yield made
