"""``farprop.compat``: the redirection, each case in a process of its own, and its ``wait_all``."""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.futures import Future

from farprop.compat.torch_functions import wait_all


def run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_after_install(program: str, cwd: Path) -> None:
    script = cwd / "program.py"
    script.write_text("import farprop.compat\nfarprop.compat.install()\n" + textwrap.dedent(program))
    run(str(script), cwd=cwd)


def test_every_way_to_import_leads_to_the_same_modules(tmp_path: Path) -> None:
    run_after_install(
        """
        import sys
        import torch
        import torch.distributed.rpc as rpc
        import torch.distributed.rpc.api as api
        from torch.distributed import rpc as rpc2
        from torch.distributed.rpc import api as api2, rpc_sync
        import farprop.rpc.api

        assert rpc is rpc2 is torch.distributed.rpc is farprop.rpc
        assert api is api2 is farprop.rpc.api is sys.modules["torch.distributed.rpc.api"]
        assert rpc_sync is farprop.rpc.rpc_sync
        # The import system has not renamed our modules.
        assert farprop.rpc.api.__spec__.name == farprop.rpc.api.__name__ == "farprop.rpc.api"
        left = [m.__name__ for n, m in sys.modules.items() if n.startswith("torch.distributed.rpc")]
        assert all(name.startswith("farprop.rpc") for name in left), left
        """,
        tmp_path,
    )


def test_submodules_of_farprop_are_found_on_demand_and_loaded_once(tmp_path: Path) -> None:
    run_after_install(
        """
        import importlib, pkgutil
        import farprop.rpc

        for found in pkgutil.walk_packages(farprop.rpc.__path__, "farprop.rpc."):
            theirs = importlib.import_module("torch.distributed" + found.name.removeprefix("farprop"))
            ours = importlib.import_module(found.name)
            assert theirs is ours and ours.__spec__.name == found.name, found.name
        """,
        tmp_path,
    )


def test_submodule_that_farprop_lacks_is_not_found(tmp_path: Path) -> None:
    run_after_install(
        """
        try:
            import torch.distributed.rpc.no_such_module
        except ModuleNotFoundError as error:
            assert error.name == "torch.distributed.rpc.no_such_module"
        else:
            raise AssertionError
        """,
        tmp_path,
    )


def test_patching_through_torchs_name_reaches_farprop(tmp_path: Path) -> None:
    run_after_install(
        """
        from unittest import mock
        import torch
        import farprop.rpc.api

        with mock.patch.object(torch.distributed.rpc.api, "rpc_sync") as patched:
            assert farprop.rpc.api.rpc_sync is patched
        with mock.patch("torch.distributed.rpc.api.rpc_sync") as patched:
            assert farprop.rpc.api.rpc_sync is patched
        """,
        tmp_path,
    )


def test_installing_twice_changes_nothing(tmp_path: Path) -> None:
    run_after_install(
        """
        import sys
        import torch

        before = (dict(sys.modules), list(sys.meta_path), torch.futures.wait_all)
        farprop.compat.install()
        assert before == (dict(sys.modules), list(sys.meta_path), torch.futures.wait_all)
        assert torch.futures.wait_all.__module__ == "farprop.compat.torch_functions"
        """,
        tmp_path,
    )


def test_names_that_torch_imported_from_its_rpc_are_replaced_by_install(tmp_path: Path) -> None:
    # PyTorch's tests hold the RPC module itself; their helpers are imported before the redirection here.
    script = tmp_path / "late.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch.testing._internal.dist_utils as utils
            import torch.nn.parallel.distributed as parallel
            import farprop.compat, farprop.rpc
            farprop.compat.install()
            assert utils.rpc is farprop.rpc
            assert parallel.RRef is farprop.rpc.RRef
            """
        )
    )
    run(str(script), cwd=tmp_path)


@pytest.mark.parametrize("backend", ["farprop", "gloo"])
def test_monitored_barrier_works_on_python_groups(tmp_path: Path, backend: str) -> None:
    run_after_install(
        f"""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import monitored_barrier

        dist.init_process_group("{backend}", store=dist.HashStore(), rank=0, world_size=1)
        dist.monitored_barrier()
        monitored_barrier(dist.group.WORLD, 5.0, wait_all_ranks=True)
        dist.destroy_process_group()
        """,
        tmp_path,
    )


def test_optimizers_and_the_compiler_can_be_imported_after_install(tmp_path: Path) -> None:
    # Both import torch.distributed.nn, which takes private names from the RPC as it is imported.
    run_after_install(
        """
        import torch, torch._dynamo
        import torch.distributed.nn.api.remote_module as remote_module
        import farprop.rpc

        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.sum().backward()
        optimizer.step()
        assert remote_module.rpc is farprop.rpc
        """,
        tmp_path,
    )


def test_remote_modules_are_farprops_and_the_rest_of_their_package_is_torchs(tmp_path: Path) -> None:
    run_after_install(
        """
        import torch.distributed.nn
        import torch.distributed.nn.api.remote_module as remote_module
        from torch.distributed.nn import RemoteModule
        from torch.distributed.nn.api.remote_module import _RemoteModule
        import farprop.nn

        assert remote_module is farprop.nn.remote_module is torch.distributed.nn.api.remote_module
        assert RemoteModule is torch.distributed.nn.RemoteModule is farprop.nn.RemoteModule
        assert issubclass(RemoteModule, _RemoteModule)
        assert torch.distributed.nn.all_reduce.__module__ == "torch.distributed.nn.functional"
        """,
        tmp_path,
    )


# A user's program, which does not know farprop. Children and grandchildren report what they import.
PROGRAM = """
import os, sys
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

def grandchild(path):
    with open(path, "a") as file:
        file.write(f"grandchild {rpc.__name__} {sys.argv[1:]}\\n")

def child(rank, path):
    method = ("spawn", "forkserver")[rank]
    process = mp.get_context(method).Process(target=grandchild, args=(path,))
    process.start()
    process.join()
    with open(path, "a") as file:
        file.write(f"child {rpc.__name__} {sys.argv[1:]}\\n")

if __name__ == "__main__":
    assert sys.modules["__main__"].child is child
    print("main", rpc.__name__, sys.argv[1:])
    mp.spawn(child, args=(os.path.abspath("out.txt"),), nprocs=2)
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_program_and_its_children_run_on_farprop(tmp_path: Path, as_module: bool) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text(PROGRAM)
    target = ["-m", "package.program"] if as_module else ["package/program.py"]
    printed = run("-m", "farprop.compat", *target, "one", "-m", cwd=tmp_path)
    assert printed == "main farprop.rpc ['one', '-m']\n"
    expected = ["child farprop.rpc ['one', '-m']"] * 2 + ["grandchild farprop.rpc ['one', '-m']"] * 2
    assert sorted((tmp_path / "out.txt").read_text().splitlines()) == expected


def test_children_of_a_script_that_calls_install_run_on_farprop(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import farprop.compat\nfarprop.compat.install()\n" + PROGRAM)
    assert run(str(script), cwd=tmp_path) == "main farprop.rpc []\n"
    expected = ["child farprop.rpc []"] * 2 + ["grandchild farprop.rpc []"] * 2
    assert sorted((tmp_path / "out.txt").read_text().splitlines()) == expected


# A callee writes into the memory of its caller, because the program's own pickler passes tensors without a copy.
SHARING = """
import copyreg, os, sys
import torch
import torch.distributed.rpc as rpc
from torch import multiprocessing
from torch.distributed.rpc.api import _use_rpc_pickler
from torch.distributed.rpc.internal import _InternalRPCPickler
from torch.multiprocessing import reductions

class Sharing(_InternalRPCPickler):
    def __init__(self):
        super().__init__()
        own = copyreg.dispatch_table.copy()
        own.update(dict.fromkeys(torch._storage_classes, reductions.reduce_storage))
        own.update(dict.fromkeys((torch.Tensor, torch.nn.Parameter), reductions.reduce_tensor))
        self._dispatch_table = own

def start(rank):
    how = rpc.TensorPipeRpcBackendOptions(init_method="file://" + os.path.abspath("meeting"))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=how)

def other(_):
    start(1)
    rpc.shutdown()

def add(tensors):
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_(1)

def add_to_all(module):
    add(module.parameters())

if __name__ == "__main__":
    multiprocessing.set_sharing_strategy("file_system")
    spawned = multiprocessing.spawn(other, join=False)
    with _use_rpc_pickler(Sharing()):
        start(0)
        module, tensor = torch.nn.Linear(1, 2).share_memory(), torch.zeros(2).share_memory_()
        bias = module.bias.detach().clone()
        rpc.rpc_sync("worker1", add, args=([tensor],))
        rpc.rpc_async("worker1", add, args=([tensor],)).wait()
        rpc.remote("worker1", add_to_all, args=(module,)).to_here()
        print(rpc.__name__, tensor.tolist(), (module.bias.detach() - bias).round().tolist())
        rpc.shutdown()
    spawned.join()
"""


def test_callee_can_write_into_the_memory_of_its_caller(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SHARING)
    assert run("-m", "farprop.compat", "program.py", cwd=tmp_path) == "farprop.rpc [2.0, 2.0] [1.0, 1.0]\n"


def test_exit_code_and_relative_imports_work_as_without_compat(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("CODE = 7\n")
    (package / "__main__.py").write_text("import sys\nfrom .other import CODE\nsys.exit(CODE)\n")
    command = [sys.executable, "-W", "error::ImportWarning", "-m", "farprop.compat"]
    assert subprocess.run([*command, "-m", "package"], cwd=tmp_path, timeout=100, check=False).returncode == 7
    script = tmp_path / "script.py"
    script.write_text("try:\n    from . import other\nexcept ImportError:\n    raise SystemExit(3)\n")
    assert subprocess.run([*command, str(script)], cwd=tmp_path, timeout=100, check=False).returncode == 3


@pytest.mark.parametrize("arguments", [[], ["-x"], ["-m"], ["no_such_script.py"]])
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "farprop.compat", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "farprop.compat" in done.stderr
    assert "Traceback" not in done.stderr


def settled(value: object) -> "Future[Any]":
    future: Future[Any] = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def test_wait_all_returns_values_in_order() -> None:
    first: Future[int] = Future()
    second: Future[int] = Future()

    def settle() -> None:
        second.set_result(2)
        first.set_result(1)

    threading.Timer(0.05, settle).start()
    assert wait_all([first, second, settled(3)]) == [1, 2, 3]
    assert wait_all([]) == []


@pytest.mark.parametrize("done", ["before", "during"])
def test_wait_all_does_not_wait_for_the_rest_after_an_error(done: str) -> None:
    never: Future[int] = Future()
    failing: Future[int] = Future()
    error = ValueError("expected")

    def fail() -> None:
        failing.set_exception(error)  # type: ignore[arg-type]

    if done == "before":
        fail()
    else:
        threading.Timer(0.1, fail).start()
    started = time.monotonic()
    with pytest.raises(ValueError, match="expected") as raised:
        wait_all([never, failing, settled(1)])
    assert raised.value is error
    assert time.monotonic() - started < 5
    never.set_result(0)


def test_wait_all_raises_the_error_that_came_first() -> None:
    with pytest.raises(KeyError):
        wait_all([settled(1), settled(KeyError("a")), settled(IndexError("b"))])


@pytest.mark.parametrize("wait", [torch.futures.wait_all, wait_all])
def test_wait_all_raises_the_same_errors_as_torch(wait: Callable[[list["Future[Any]"]], list[Any]]) -> None:
    # An error inside a callback is stored by torch's C++ code, not by set_exception.
    source: Future[int] = Future()
    failing = source.then(lambda _: 1 // 0)
    source.set_result(1)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        wait([Future(), failing])
    with pytest.raises(TypeError):
        wait([1])  # type: ignore[list-item]
