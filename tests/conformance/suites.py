"""The test classes, composed as in PyTorch, but with ranks that are forked, not spawned.

``load()`` must run before anything else has imported PyTorch's test modules. It leaves the process with one
thread, so that tests can be forked from it, and their ranks from them: ``import torch`` is paid for once.
"""

import ast
import gc
import importlib
import importlib.util
import sys
import traceback
import types
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.conformance.collectives import CollectivesSuite
from tests.conformance.ranks import fork_ranks

_RPC_UTILS = "torch.testing._internal.distributed.rpc_utils"
_IMPORT_ERROR = "_conformance_import_error"
_FIXTURES = "torch.testing._internal.distributed.rpc"


class Suite(Protocol):
    """One of PyTorch's test classes."""

    @property
    def names(self) -> list[str]: ...

    @property
    def import_error(self) -> str | None:
        """The traceback of the import of the class's module, if that failed."""

    def build(self) -> type[unittest.TestCase]:
        """The class to run. Call it in the process of the test."""


@dataclass(frozen=True)
class RpcSuite:
    """A class of tests of the RPC, to be mixed with the fixture of an agent."""

    tests: type
    fixture_module: str
    fixture: str

    @property
    def names(self) -> list[str]:
        return list(unittest.TestLoader().getTestCaseNames(self.tests))

    @property
    def import_error(self) -> str | None:
        return getattr(self.tests, _IMPORT_ERROR, None)

    def build(self) -> type[unittest.TestCase]:
        """In the process of the test.

        The faulty agent's fixture registers a backend when it is imported, and that replaces the
        ``BackendType`` that other tests compare with. PyTorch, too, runs the faulty agent's tests apart.
        """
        utils = importlib.import_module(_RPC_UTILS)
        fixture = getattr(importlib.import_module(self.fixture_module), self.fixture)
        (class_,) = utils.generate_tests("", fixture, [self.tests], __name__).values()
        class_._spawn_processes = fork_ranks
        # If a test sends a method of its class to another rank, pickle looks it up here.
        globals()[class_.__name__] = class_
        built: type[unittest.TestCase] = class_
        return built


def load(on: str) -> dict[str, Suite]:
    """Import the tests, on ``"farprop"`` or ``"torch"``, and return the test classes by name."""
    if on == "farprop":
        importlib.import_module("farprop.compat").install()
    # All test modules need it. If the import fails (it needs the package expecttest), no test can run.
    importlib.import_module("torch.testing._internal.common_distributed")
    _stand_in_for_broken_modules()
    utils = importlib.import_module(_RPC_UTILS)
    importlib.import_module(_FIXTURES + ".tensorpipe_rpc_agent_test_fixture")
    suites: dict[str, Suite] = {
        tests.__name__: RpcSuite(tests, f"{_FIXTURES}.{agent}_rpc_agent_test_fixture", fixture)
        for agent, fixture, group in (
            ("tensorpipe", "TensorPipeRpcAgentTestFixture", utils.GENERIC_TESTS + utils.TENSORPIPE_TESTS),
            ("faulty", "FaultyRpcAgentTestFixture", utils.FAULTY_AGENT_TESTS),
        )
        for tests in group
    }
    suites["DistributedTest"] = CollectivesSuite(on)
    # Exclude existing objects from garbage collection, so that their pages stay shared with the children.
    gc.collect()
    gc.freeze()
    return suites


def _stand_in_for_broken_modules() -> None:
    """Replace test modules that can't be imported by modules with tests that fail.

    ``rpc_utils`` imports all of them, so otherwise no test would run. Modules that compile TorchScript when they are
    imported are the most likely to fail.
    """
    for module_name, names in _test_modules():
        try:
            importlib.import_module(module_name)
        except Exception:
            error = traceback.format_exc()
            tests = _tests_by_class(_source(module_name))
            sys.modules[module_name] = module = types.ModuleType(module_name)
            for name in names:
                members: dict[str, Any] = dict.fromkeys(tests.get(name, ()), _not_imported)
                setattr(module, name, type(name, (), members | {_IMPORT_ERROR: error}))


def _not_imported(self: object) -> None:
    raise AssertionError("never run: the runner reports the import's error")


def _test_modules() -> Iterator[tuple[str, list[str]]]:
    """The modules that ``rpc_utils`` takes test classes from, with the names it takes."""
    for node in ast.parse(_source(_RPC_UTILS)).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.endswith(("_test", "_test_faulty")):
            yield node.module, [alias.name for alias in node.names]


def _source(module_name: str) -> str:
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None:
        raise ImportError(f"torch has no {module_name}")
    return Path(spec.origin).read_text()


def _tests_by_class(source: str) -> dict[str, set[str]]:
    """The test methods of each class, including those of bases in the same file."""
    tests: dict[str, set[str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            own = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            bases = [tests.get(base.id, set()) for base in node.bases if isinstance(base, ast.Name)]
            tests[node.name] = {name for name in own if name.startswith("test")}.union(*bases)
    return tests
