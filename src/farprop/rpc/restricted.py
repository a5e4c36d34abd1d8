"""Restricted mode: what workers may ask of each other that don't trust each other's code.

``_INTERNAL`` lists the functions of farprop's own that workers call on each other, with the types that each takes. What
is not in this list and not exposed by the program can't be called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farprop import _torch
from farprop.errors import NotExposedError, ProtocolError, UsageError
from farprop.rpc.rref import RRef
from farprop.runtime import owner_calls as owner_calls  # these two, so that peers find them
from farprop.runtime.current import current_agent, is_agent_set
from farprop.runtime.gradients import calls as calls
from farprop.wire import data_codec, data_failures, exposed
from farprop.wire.dialect import Dialect

_Check = Callable[[Any], bool]
_ID = (int, int, bool)  # of a reference: who made it, its number there, whether its value surely exists


def _is(*kinds: type) -> _Check:
    return lambda value: type(value) in kinds


def _list_of(kind: type) -> _Check:
    return lambda value: type(value) is list and all(type(item) is kind for item in value)


class _Takes:
    """The arguments of a function: by position, then any number of ``rest``; named ones only if ``named``.

    ``by`` says whether the caller, of this rank and name, may give them: workers speak for themselves alone.
    """

    def __init__(
        self,
        *kinds: type | _Check,
        rest: _Check | None = None,
        named: bool = False,
        by: Callable[[Sequence[Any], int, str], bool] | None = None,
    ) -> None:
        self._checks = [_is(kind) if isinstance(kind, type) else kind for kind in kinds]
        self._rest = rest
        self._named = named
        self._by = by

    def allows(self, args: Sequence[Any], kwargs: dict[str, Any], rank: int, caller: str) -> bool:
        count = len(self._checks)
        if len(args) < count or (kwargs and not self._named) or (len(args) > count and self._rest is None):
            return False
        if not all(check(value) for check, value in zip(self._checks, args, strict=False)):
            return False
        if self._rest is not None and not all(self._rest(value) for value in args[count:]):
            return False
        return self._by is None or self._by(args, rank, caller)


def _anything(value: Any) -> bool:
    return True


_GRADIENT = _is(torch.Tensor, type(None), int)
_KEY = _is(tuple)


def _leads(args: Sequence[Any], rank: int, caller: str) -> bool:
    """Whether the caller leads the gathering, which the worker does whose name sorts first."""
    names = args[0][:1]
    return bool(names) and type(names[0]) is tuple and names[0][:1] == (caller,)


_INTERNAL = {
    # references
    b"farprop.runtime.owner_calls:operate": _Takes(int, str, int, bytes, by=lambda args, rank, _: args[0] == rank),
    b"farprop.runtime.owner_calls:fetch": _Takes(*_ID),
    b"farprop.runtime.owner_calls:backward": _Takes(*_ID, int, bool),
    # calls only methods that are exposed
    b"farprop.runtime.owner_calls:invoke": _Takes(*_ID, str, tuple, dict),
    b"farprop.rpc.rref_proxy:invoke_here": _Takes(RRef, str, tuple, dict),
    # gatherings and shutdown
    b"farprop.rpc.api:_gather_to_leader": _Takes(_KEY, str, _anything, by=lambda args, _, name: args[1] == name),
    b"farprop.rpc.api:_broadcast_to_followers": _Takes(_KEY, dict, by=_leads),
    b"farprop.rpc.api:_release_follower": _Takes(_KEY, _is(tuple, type(None)), by=_leads),
    # backward passes
    b"farprop.runtime.gradients.calls:propagate": _Takes(
        int, bytes, rest=_GRADIENT, by=lambda args, rank, _: args[0] == rank
    ),
    b"farprop.runtime.gradients.calls:give_back": _Takes(bytes),
    b"farprop.runtime.gradients.calls:release": _Takes(bytes, rest=_is(int)),
    b"farprop.runtime.gradients.calls:survey": _Takes(bytes, _list_of(int)),
    b"farprop.runtime.gradients.calls:failed": _Takes(int, int, bytes),
    b"farprop.runtime.gradients.calls:abort": _Takes(int, int, int, by=lambda args, rank, _: args[1] == rank),
    b"farprop.runtime.gradients.calls:exists": _Takes(int, int, by=lambda args, rank, _: args[1] == rank),
    # optimisers and modules: their classes have to be exposed, and so has what is called of the modules
    b"farprop.optim.local:_new_local_optimizer": _Takes(callable, _list_of(RRef), rest=_anything, named=True),
    b"farprop.nn.remote_module:_create_module": _Takes(callable, tuple, dict, str),
    b"farprop.nn.remote_module:_run_forward": _Takes(RRef, str, tuple, dict),
    b"farprop.nn.remote_module:_param_rrefs": _Takes(RRef, bool),
    b"farprop.nn.remote_module:_train": _Takes(RRef, bool),
}


_SYSTEM_MODULES = (b"farprop.runtime.", b"farprop.rpc.api:")
# These run functions of the program's.
_PROGRAM_RUNS = {
    b"farprop.runtime.owner_calls:invoke",
    b"farprop.runtime.owner_calls:fetch",
    b"farprop.runtime.owner_calls:backward",
    b"farprop.runtime.gradients.calls:propagate",
}


def data_dialect(worker: str) -> Dialect:
    """How a worker of a restricted job reads and writes."""

    def resolve(name: bytes) -> Any:
        found = exposed.find(name)
        if found is None:
            found = _internal(name)
            if found is None:
                raise _not_exposed(worker, name)
        return found

    def method_of(value: Any, name: str) -> Any:
        check_method(worker, value, name)
        return getattr(value, name)

    return Dialect(
        restricted=True,
        name_of=exposed.name_of,
        resolve=resolve,
        vet=_vet,
        may_be_system=_is_system,
        method_of=method_of,
        encode=data_codec.refuse,
        decode=data_codec.refuse,
        encode_call=data_codec.encode_call,
        decode_call=data_codec.decode_call,
        encode_value=data_codec.encode_value,
        decode_value=data_codec.decode_value,
        encode_failure=data_failures.encode_failure,
        decode_failure=data_failures.decode_failure,
    )


def check_method(worker: str, value: Any, name: str) -> None:
    """Raises unless this method of a value may be called by others."""
    if not exposed.is_method_exposed(value, name):
        kind, name = type(value).__qualname__, name[:200]
        raise NotExposedError(
            f"{worker} does not expose {name!r} of a {kind}. In a restricted job only exposed methods can be called: "
            f"decorate it with @farprop.rpc.expose in the class, or call expose({kind}, methods=[{name!r}])."
        )


def _internal(name: bytes) -> Any:
    """One of farprop's own functions, if its module is imported here."""
    if name not in _INTERNAL:
        return None
    where, _, path = name.decode().partition(":")
    module = sys.modules.get(where)
    return None if module is None else getattr(module, path)


def _vet(name: bytes, rank: int, caller: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    takes = _INTERNAL.get(name)
    if takes is not None and not takes.allows(args, kwargs, rank, caller):
        raise ProtocolError(f"{caller} called {name.decode()} with arguments that it does not take, or not from there")


def _is_system(name: bytes) -> bool:
    """Functions that are short and run nothing of the program's."""
    return name in _INTERNAL and name.startswith(_SYSTEM_MODULES) and name not in _PROGRAM_RUNS


def _not_exposed(worker: str, name: bytes) -> NotExposedError:
    if not name:
        return NotExposedError(f"{worker} is in restricted mode, and runs only functions that are called by a name.")
    shown = name.decode(errors="replace")[:200]
    if name in _INTERNAL:
        module = shown.partition(":")[0].rpartition(".")[0]
        return NotExposedError(f"{worker} has not imported {module}, which {shown!r} needs. Import it there.")
    return NotExposedError(
        f"{worker} does not expose {shown!r}. In a restricted job only exposed functions can be called: decorate it "
        f"with @farprop.rpc.expose on {worker}, and import its module there before the call."
    )


def check_options(device_maps: Any) -> None:
    """Raises if a job with these options can't be restricted."""
    if device_maps:
        raise UsageError("A restricted job sends tensors of the CPU only, so it takes no device_maps: drop them.")


def refuse_object_collectives() -> None:
    """Have torch's collectives of objects, which unpickle what comes, raise while this process is in a restricted job.

    They are made of collectives of tensors, so a group can't tell; and they are torch's with any group.
    """
    hook = _torch.object_hook
    if hook is None or getattr(hook.owner, hook.name) is not hook.theirs:
        return

    def tensor_to_object(tensor: Any, tensor_size: Any, group: Any) -> Any:
        if is_agent_set() and current_agent().dialect.restricted:
            raise UsageError(
                "Collectives of objects (broadcast_object_list and the like) unpickle what other ranks send, which a "
                "process in a restricted job does not do. Send tensors, or make a call."
            )
        return hook.theirs(tensor, tensor_size, group)

    setattr(hook.owner, hook.name, tensor_to_object)
