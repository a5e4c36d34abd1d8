"""A reference arrives whose owner has left the group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farprop.errors import UsageError
from farprop.rpc import rref
from farprop.runtime.references.user_references import RRefHandle


def test_reference_of_a_worker_that_has_left_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed the call whose answer brought it, as if the function had not run."""

    def get_worker_info(worker: int | None = None) -> Any:
        if worker is not None:
            raise UsageError(f"could not find destination {worker}")
        return SimpleNamespace(id=0, name="w0")

    handle = RRefHandle.__new__(RRefHandle)
    monkeypatch.setattr(type(handle), "__del__", lambda self: None, raising=False)
    handle.record = SimpleNamespace(owner=2)  # type: ignore[assignment]
    membership = SimpleNamespace(name_of=lambda rank: f"worker {rank}")
    agent = SimpleNamespace(get_worker_info=get_worker_info, membership=membership, references=object())
    monkeypatch.setattr(rref, "current_agent", lambda: agent)
    monkeypatch.setattr(rref, "resolve_out_of_band", lambda place: handle)
    assert rref._arrived(0).owner_name() == "worker 2"
