"""Farprop with an unknown torch: missing names, hooks with another signature, another version."""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.nn

from tests.support.forkserver import WITHOUT_FARPROP
from tests.support.hidden_names import WHOLE_MODULES, Outcome
from tests.support.workers import run_workers

_PLAIN = {WITHOUT_FARPROP: "1"}  # what is tested happens when farprop is imported

# Only functions import farprop here: the workers that run them have to import it themselves.
ROOT = Path(__file__).parents[1]

# Names that a feature needs, with the use of tests.support.hidden_names that fails without them.
NEEDED = {
    "torch.autograd.Variable._execution_engine.queue_callback": "train",
    "torch.distributed.remote_device._remote_device": "remote_module",
    "torch.distributed.remote_device": "remote_module",
}
# Modules that farprop replaces, so does not need.
NOT_MISSED = ("torch.distributed.nn", "torch.distributed.rpc")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """The outcome of farprop without each name."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.hidden_names", str(first), "2"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for first in range(2)
    ]
    found: dict[str, Outcome] = {}
    for process in running:
        out, err = process.communicate()
        assert process.returncode == 0, err
        for line in out.splitlines():
            outcome = Outcome(**json.loads(line))
            found[outcome.name] = outcome
    return found


def test_farprop_imports_without_any_one_name_and_warns_once(outcomes: dict[str, Outcome]) -> None:
    from farprop import _torch

    assert outcomes.keys() == {*_torch.names, *WHOLE_MODULES}
    for name, outcome in outcomes.items():
        if name in NOT_MISSED:
            assert outcome.warnings == [], name
            continue
        ((category, text),) = outcome.warnings
        assert category == "TorchVersionWarning"
        assert name in text
        assert torch.__version__ in text
        if name in _torch.names:
            assert _torch.names[name] in text


def test_features_fail_only_if_they_need_the_missing_name(outcomes: dict[str, Outcome]) -> None:
    for name, outcome in outcomes.items():
        failed = {use: error for use, error in outcome.uses.items() if error}
        assert list(failed) == ([NEEDED[name]] if name in NEEDED else []), (name, failed)
        for error in failed.values():
            assert error.startswith("TorchVersionError: ")
            assert name in error
            assert torch.__version__ in error


def _warnings_of(run: Callable[[], object]) -> list[tuple[str, str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [(warning.category.__name__, str(warning.message)) for warning in seen]


def _import_all() -> None:
    import farprop.compat
    import farprop.jit
    import farprop.rpc

    farprop.compat.install()


def _with_version(_: int, version: str) -> list[tuple[str, str]]:
    torch.__version__ = version  # type: ignore[assignment]
    return _warnings_of(_import_all)


def test_untested_torch_version_warns_once_with_the_tested_versions() -> None:
    from farprop import _torch

    (((category, text),),) = run_workers(_with_version, 1, ("2.99.1+cpu",), _PLAIN)
    assert category == "TorchVersionWarning"
    for version in (*_torch.TRIED, "2.99.1+cpu"):
        assert version in text
    # 2.130 is not 2.13.
    ((_,),) = run_workers(_with_version, 1, ("2.130.0",), _PLAIN)


def test_tested_torch_version_does_not_warn() -> None:
    from farprop import _torch

    for version in _torch.TRIED:
        assert run_workers(_with_version, 1, (version + ".1",), _PLAIN) == [[]]


# Hooks


def _with_hook_of_other_arguments(_: int) -> list[tuple[str, str]]:
    from torch.jit import _recursive, frontend

    frontend.parse_def = changed = lambda function, flavour: None
    seen = _warnings_of(_import_all)
    assert frontend.parse_def is changed
    assert not hasattr(_recursive._add_script_class, "func"), "a hook was put in, but not all can be"
    return seen


def test_hook_with_another_signature_leaves_torchscript_unchanged() -> None:
    (((category, text),),) = run_workers(_with_hook_of_other_arguments, 1, env=_PLAIN)
    assert category == "TorchVersionWarning"
    assert "torch.jit.frontend.parse_def" in text


class _State:
    """All modules of torch with their attributes, and the import hooks."""

    def __init__(self) -> None:
        self._finders = list(sys.meta_path)
        self._modules = _modules_of_torch()
        self._attributes = {name: dict(vars(module)) for name, module in self._modules.items()}

    def differences(self) -> list[str]:
        """The differences between then and now."""
        found = [] if self._finders == sys.meta_path else ["sys.meta_path"]
        now = _modules_of_torch()
        found += [name for name in now.keys() | self._modules.keys() if now.get(name) is not self._modules.get(name)]
        for name, old in self._attributes.items():
            new = vars(self._modules[name])
            changed = [attribute for attribute, value in old.items() if new.get(attribute) is not value]
            found += [f"{name}.{attribute}" for attribute in (*changed, *(new.keys() - old.keys()))]
        # Farprop's own operators are listed there once farprop is imported.
        return [name for name in found if name != "torch.ops.farprop"]


def _modules_of_torch() -> dict[str, types.ModuleType]:
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType)
    }


class _Injected(Exception):
    pass


def _fail_at_each_change(_: int) -> int:
    import farprop.compat
    import farprop.rpc  # puts a function of its own into torch.utils.checkpoint

    changes = farprop.compat._Changes
    made = changes._on_undo
    before = _State()
    for failing in itertools.count():
        count = itertools.count()

        def failing_made(self: Any, undo: Any, failing: int = failing, count: Any = count) -> None:
            made(self, undo)
            if next(count) == failing:
                raise _Injected

        changes._on_undo = failing_made
        try:
            farprop.compat.install()
        except _Injected:
            changed = before.differences()
            assert not changed, f"after a failure at change {failing}: {changed}"
        else:
            changes._on_undo = made
            _check_installed()
            return failing
    raise AssertionError


def _check_installed() -> None:
    import torch.distributed.rpc as rpc

    import farprop.rpc

    assert rpc is farprop.rpc
    from tests.jit.functions import add_elsewhere  # TorchScript compiles it, with a call in it

    assert isinstance(add_elsewhere._wrapped_async_rpc_function, torch.jit.ScriptFunction)


def test_failed_install_restores_torch_and_can_be_retried() -> None:
    (changes,) = run_workers(_fail_at_each_change, 1, env=_PLAIN, timeout=110)
    assert changes > 20


def _fail_at_each_hook(_: int) -> int:
    import farprop.compat
    import farprop.rpc as rpc
    from farprop import _torch
    from farprop.jit import hooks

    hooks.uninstall()
    torchs = [getattr(hook.owner, hook.name) for hook in _torch.script_hooks.values()]
    wraps = functools.wraps
    for failing in range(len(torchs)):
        count = itertools.count()

        def failing_wraps(theirs: Any, failing: int = failing, count: Any = count) -> Any:
            if next(count) == failing:
                raise _Injected
            return wraps(theirs)

        hooks.functools = types.SimpleNamespace(wraps=failing_wraps, partial=functools.partial)  # type: ignore[attr-defined]
        farprop.compat._installed = False
        ((category, text),) = _warnings_of(farprop.compat.install)
        assert category == "TorchVersionWarning"
        assert "TorchScript" in text
        assert [getattr(hook.owner, hook.name) for hook in _torch.script_hooks.values()] == torchs
        assert torch.distributed.rpc is rpc
    return len(torchs)


def test_failing_torchscript_hooks_warn_and_the_rest_is_installed() -> None:
    assert run_workers(_fail_at_each_hook, 1, env=_PLAIN) == [9]
