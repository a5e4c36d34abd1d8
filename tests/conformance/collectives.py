"""PyTorch's tests of process groups and DistributedDataParallel, on the backend ``farprop`` or on Gloo.

They choose what to run by the name of the backend, mostly when their module is imported. So it is imported for Gloo,
and what ran on Gloo then runs on farprop.
"""

import importlib
import os
import unittest
from typing import Any
from unittest import mock

from tests.conformance.ranks import fork_ranks

_MODULE = "torch.testing._internal.distributed.distributed_test"
_UTILS = "torch.testing._internal.common_distributed"
# Enough for sub-groups with ranks outside of them; some tests require exactly four, or an even number.
_WORLD_SIZE = "4"


class CollectivesSuite:
    """``DistributedTest``, put together as PyTorch's ``test_distributed_spawn`` does."""

    import_error = None

    def __init__(self, on: str) -> None:
        self._environment = {"BACKEND": "gloo", "WORLD_SIZE": _WORLD_SIZE, "MASTER_ADDR": "localhost"}
        _run_on_few_ranks()
        # Only during the import, because of the other suites' tests. Ranks meet in a file: each test chooses its own,
        # but the scheme decides which tests the module defines.
        with mock.patch.dict(os.environ, self._environment, INIT_METHOD="file://"):
            self._module: Any = importlib.import_module(_MODULE)
        self._tests = self._module.DistributedTest._DistTestBase
        _run_without_mpi(self._tests, self.names)
        if on == "farprop":
            self._module.BACKEND = _ActsAsGloo("farprop")
            self._environment["BACKEND"] = "farprop"

    @property
    def names(self) -> list[str]:
        return list(unittest.TestLoader().getTestCaseNames(self._tests))

    def build(self) -> type[unittest.TestCase]:
        """The class to run. Call it in the process of the test."""
        os.environ.update(self._environment)
        module = self._module

        class DistributedTest(module.TestDistBackend, self._tests):  # type: ignore[misc, name-defined]
            def setUp(self) -> None:
                super().setUp()
                # A rank that is spawned reads it when it imports the module.
                module.INIT_METHOD = os.environ["INIT_METHOD"]
                fork_ranks(self)

        return DistributedTest


class _ActsAsGloo(str):
    """The name of a backend for which tests do what they do for Gloo."""

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    __hash__ = str.__hash__


def _run_on_few_ranks() -> None:
    """Run tests of sub-groups, which PyTorch skips on fewer than eight ranks because its machines have few GPUs."""
    utils: Any = importlib.import_module(_UTILS)
    utils.skip_if_small_worldsize = lambda test: test


def _run_without_mpi(tests: type, names: list[str]) -> None:
    """Run the tests of ``all_to_all``, which PyTorch runs only on MPI, although Gloo supports it by now."""
    for name in names:
        test = getattr(tests, name)
        if getattr(test, "__unittest_skip_why__", "").startswith("Only MPI supports"):
            del test.__unittest_skip__, test.__unittest_skip_why__
