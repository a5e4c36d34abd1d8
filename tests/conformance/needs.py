"""Which parts of the RPC a test uses beyond plain calls, found by running it on torch and watching.

Every process of a test notes when it touches a reference (``remote``, ``RRef``), distributed autograd or
TorchScript. ``--needs`` writes what came out to ``needs.txt``, and ``--without`` picks tests by it.
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

NEEDS = ("reference", "autograd", "script")
FILE = Path(__file__).with_name("needs.txt")

# Attributes to watch, each in the module that uses the name: what torch's RPC does with references for itself
# (at shutdown, say) is not to be taken for the test's.
_WATCHED = {
    "reference": [
        ("torch.distributed.rpc", "remote"),
        ("torch.distributed.rpc.api", "_invoke_remote_builtin"),
        ("torch.distributed.rpc.api", "_invoke_remote_python_udf"),
        ("torch.distributed.rpc.api", "_invoke_remote_torchscript"),
        ("torch.distributed.rpc.api", "RRef.__init__"),
        ("torch.testing._internal.dist_utils", "_rref_context_get_debug_info"),
        ("torch.testing._internal.distributed.rpc.rpc_test", "_rref_context_get_debug_info"),
    ],
    # Not backward or get_gradients: they need a context anyway, and TorchScript knows them by identity.
    "autograd": [
        ("torch.distributed.autograd", "context.__enter__"),
        ("torch.distributed.autograd", "_get_debug_info"),
        ("torch.distributed.autograd", "_current_context"),
        ("torch.distributed.autograd", "_retrieve_context"),
    ],
    "script": [
        ("torch.distributed.rpc.api", "_invoke_rpc_torchscript"),
        ("torch.distributed.rpc.api", "_invoke_remote_torchscript"),
        ("torch.jit", "script"),
        ("torch.jit", "load"),
        ("torch.jit", "RecursiveScriptModule.__init__"),
    ],
}

_notes: Path | None = None


def watch() -> None:
    """Put the watching in place, in this process and in those forked from it."""
    for need, places in _WATCHED.items():
        for module_name, path in places:
            *holders, name = path.split(".")
            owner: Any = functools.reduce(getattr, holders, importlib.import_module(module_name))
            setattr(owner, name, _noting(need, getattr(owner, name)))


def note_to(path: Path) -> None:
    """From here on, this process and its children note what they use in that file."""
    global _notes
    _notes = path


def read(path: Path) -> list[str]:
    noted = set(path.read_text().split()) if path.exists() else set()
    return [need for need in NEEDS if need in noted]


def save(found: dict[str, list[str]]) -> None:
    """Write what tests need; tests that were not run keep what they had."""
    # Calls made by compiled code are not seen from Python; in these classes all are.
    found = {name: ["script"] if name.startswith("Jit") and not used else used for name, used in found.items()}
    merged = (load() if FILE.exists() else {}) | found
    lines = [f"{name} {' '.join(needs) or '-'}\n" for name, needs in sorted(merged.items())]
    FILE.write_text(
        "# What each test needs beyond plain calls. Made by python -m tests.conformance --needs\n" + "".join(lines)
    )


def load() -> dict[str, list[str]]:
    entries = (line.split() for line in FILE.read_text().splitlines() if line and not line.startswith("#"))
    return {name: [need for need in needs if need != "-"] for name, *needs in entries}


def without(names: Iterable[str], excluded: Iterable[str]) -> list[str]:
    """The tests that are known to need none of these."""
    known, unwanted = load(), set(excluded)
    return [name for name in names if name in known and not unwanted.intersection(known[name])]


def _noting(need: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if _notes is not None:
            with open(_notes, "a") as file:
                file.write(need + "\n")
        return function(*args, **kwargs)

    return noting


def summary(found: dict[str, list[str]]) -> str:
    width = max(map(len, found), default=0)
    lines = [f"{name:{width}}  {', '.join(needs) or '-'}" for name, needs in sorted(found.items())]
    plain = sum(not needs for needs in found.values())
    return "\n".join([*lines, "", f"{plain} of {len(found)} tests need none of: {', '.join(NEEDS)}"])
