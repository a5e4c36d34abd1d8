"""Farprop has torch's names, so that changing the import is the whole migration."""

from __future__ import annotations

import inspect

import torch.distributed.rpc as theirs

import farprop.rpc as ours

# Remote references are the next step.
REFERENCES = {"RRef", "method_factory", "new_method"}


def test_every_public_name_of_torch_rpc_is_here() -> None:
    assert [name for name in theirs.__all__ if name not in REFERENCES and not hasattr(ours, name)] == []
    for module in ("api", "backend_registry", "constants", "functions", "internal", "options"):
        assert hasattr(ours, module)


def test_the_arguments_are_torchs() -> None:
    for name in ("init_rpc", "shutdown", "rpc_sync", "rpc_async", "get_worker_info"):
        mine, torchs = inspect.signature(getattr(ours, name)), inspect.signature(getattr(theirs, name))
        assert list(mine.parameters) == list(torchs.parameters), name
        for argument in mine.parameters:
            assert mine.parameters[argument].default == torchs.parameters[argument].default, (name, argument)
    mine, torchs = (inspect.signature(rpc.TensorPipeRpcBackendOptions.__init__) for rpc in (ours, theirs))
    assert list(mine.parameters) == list(torchs.parameters)


def test_the_constants_are_torchs() -> None:
    for name in dir(theirs.constants):
        if name.startswith("DEFAULT") and name != "DEFAULT_PROCESS_GROUP_TIMEOUT":
            assert getattr(ours.constants, name) == getattr(theirs.constants, name), name
