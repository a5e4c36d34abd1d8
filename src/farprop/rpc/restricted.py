"""Restricted mode: what workers that don't trust each other's code may call.

``_INTERNAL`` lists farprop's own functions that workers call on each other, with the types of their arguments. Nothing
else can be called, except what the program exposes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farprop import _torch
from farprop.errors import NotExposedError, ProtocolError, UsageError
from farprop.rpc.rref import RRef
from farprop.runtime.agent_registry import current_agent, is_agent_set
from farprop.wire import data_codec, exposed
from farprop.wire.dialect import Dialect
from farprop.wire.function_names import shown_name
from farprop.wire.message import Method

_Check = Callable[[Any], bool]
_ID = (int, int, bool)  # of a reference: its creator's rank, its number there, whether its value is known to exist


def _is(*kinds: type) -> _Check:
    return lambda value: type(value) in kinds


def _list_of(kind: type) -> _Check:
    return lambda value: type(value) is list and all(type(item) is kind for item in value)


class _Takes:
    """The arguments that a function takes.

    Args:
        *kinds: The types of the positional arguments, or checks of them.
        rest: A check of further positional arguments; None if there may be none.
        named: Whether there may be keyword arguments.
        by: Whether a caller with this rank and name may pass these arguments. Workers speak only for themselves.
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


def _is_called(value: Any) -> bool:
    """Whether this stands for a function: what the codec makes of a name is exposed, and text is looked up there."""
    return callable(value) or type(value) is str


_GRADIENT = _is(torch.Tensor, type(None), int)
_KEY = _is(tuple)


def _leads(args: Sequence[Any], rank: int, caller: str) -> bool:
    """Whether the caller is the leader of the all-gather: the worker whose name sorts first."""
    names = args[0][:1]
    return bool(names) and type(names[0]) is tuple and names[0][:1] == (caller,)


_INTERNAL = {
    # references
    Method.CONTROL.value: _Takes(str, int, bytes),
    Method.FETCH.value: _Takes(*_ID),
    Method.REF_BACKWARD.value: _Takes(*_ID, int, bool),
    # these call only exposed methods
    b"farprop.rpc.rref_proxy:invoke_on_owner": _Takes(*_ID, str, rest=_anything, named=True),
    b"farprop.rpc.rref_proxy:invoke_here": _Takes(RRef, str, rest=_anything, named=True),
    # all-gathers and shutdown
    b"farprop.rpc.api:_gather_to_leader": _Takes(_KEY, str, _anything, by=lambda args, _, name: args[1] == name),
    b"farprop.rpc.api:_broadcast_to_followers": _Takes(_KEY, dict, by=_leads),
    b"farprop.rpc.api:_release_follower": _Takes(_KEY, _is(tuple, type(None)), by=_leads),
    # streams: of exposed functions alone
    Method.STREAM_OPEN.value: _Takes(int, int, _is_called, rest=_anything, named=True),
    Method.STREAM_PULL.value: _Takes(int, int, int),
    Method.STREAM_CLOSE.value: _Takes(int),
    # backward passes
    Method.GRADIENTS.value: _Takes(bytes, rest=_GRADIENT),
    Method.RETURN_CREDIT.value: _Takes(bytes),
    Method.RELEASE.value: _Takes(bytes, rest=_is(int)),
    Method.SURVEY.value: _Takes(bytes, rest=_is(int)),
    Method.REACH.value: _Takes(bytes, rest=_is(int)),
    Method.PREPARE.value: _Takes(bytes, int, rest=_is(int)),
    Method.PASS_FAILED.value: _Takes(int, int, bytes),
    Method.ABORT.value: _Takes(int, int, int, by=lambda args, rank, _: args[1] == rank),
    b"farprop.autograd.higher_order:_want": _Takes(int, int, int, _list_of(RRef), by=lambda a, rank, _: a[1] == rank),
    b"farprop.autograd.higher_order:_take": _Takes(int, int, int, by=lambda args, rank, _: args[1] == rank),
    b"farprop.autograd.higher_order:_dot": _Takes(RRef, _is(torch.Tensor, RRef)),
    b"farprop.autograd.higher_order:_zeros_like": _Takes(RRef),
    Method.CONTEXT_EXISTS.value: _Takes(int),
    # inspection
    Method.INSPECT.value: _Takes(int, int),
    Method.RECORD.value: _Takes(bytes),
    # optimizers and modules: their classes, and the modules' methods that are called, have to be exposed
    b"farprop.optim.local:_new_shard": _Takes(str, callable, _list_of(RRef), _list_of(int), tuple, dict),
    b"farprop.optim.gradients:norms_here": _Takes(_list_of(int), _list_of(RRef), float),
    b"farprop.optim.gradients:scale_here": _Takes(_list_of(int), _list_of(RRef), float),
    b"farprop.nn.remote_module:_create_module": _Takes(callable, tuple, dict, str),
    b"farprop.nn.remote_module:_run_forward": _Takes(RRef, str, tuple, dict),
    b"farprop.nn.remote_module:_param_rrefs": _Takes(RRef, bool),
    b"farprop.nn.remote_module:_train": _Takes(RRef, bool),
}


# These run functions of the program. Farprop's other methods, and all-gathers, are short.
_PROGRAM_RUNS = {
    Method.FETCH.value,
    Method.REF_BACKWARD.value,
    Method.GRADIENTS.value,
    Method.STREAM_OPEN.value,
    Method.STREAM_PULL.value,
}
_ALL_GATHERS = b"farprop.rpc.api:"


def data_dialect(worker: str) -> Dialect:
    """The dialect of a restricted job: how this worker encodes and decodes messages."""

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
        encode_call=data_codec.encode_call,
        decode_call=data_codec.decode_call,
        decode_function_call=data_codec.refuse,
        encode_value=data_codec.encode_value,
        decode_value=data_codec.decode_value,
        encode_failure=data_codec.encode_failure,
        decode_failure=data_codec.decode_failure,
    )


def check_method(worker: str, value: Any, name: str) -> None:
    """Raise ``NotExposedError`` unless other workers may call this method of a value."""
    if not exposed.is_method_exposed(value, name):
        kind, name = type(value).__qualname__, name[:200]
        raise NotExposedError(
            f"{worker} does not expose {name!r} of a {kind}. In a restricted job only exposed methods can be called: "
            f"decorate it with @farprop.rpc.expose in the class, or call expose({kind}, methods=[{name!r}])."
        )


def _internal(name: bytes) -> Any:
    """One of farprop's own functions, if this worker has imported its module."""
    if name not in _INTERNAL:
        return None
    where, _, path = name.decode().partition(":")
    module = sys.modules.get(where)
    return None if module is None else getattr(module, path)


def _vet(name: bytes, rank: int, caller: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    takes = _INTERNAL.get(name)
    if takes is None and len(name) == 1:
        raise NotExposedError(f"{shown_name(name)} is a method of farprop's that restricted jobs don't have.")
    if takes is not None and not takes.allows(args, kwargs, rank, caller):
        raise ProtocolError(
            f"{caller} called {shown_name(name)} with arguments that it does not take, or not from this caller"
        )


def _is_system(name: bytes) -> bool:
    """Whether a function is short and runs none of the program's functions."""
    return name in _INTERNAL and (len(name) == 1 or name.startswith(_ALL_GATHERS)) and name not in _PROGRAM_RUNS


def _not_exposed(worker: str, name: bytes) -> NotExposedError:
    if not name:
        return NotExposedError(f"{worker} is in restricted mode, where functions have to be called by a name.")
    shown = name.decode(errors="replace")[:200]
    if name in _INTERNAL:
        module = shown.partition(":")[0].rpartition(".")[0]
        return NotExposedError(f"{worker} has not imported {module}, which {shown!r} needs. Import it there.")
    return NotExposedError(
        f"{worker} does not expose {shown!r}. In a restricted job only exposed functions can be called: decorate it "
        f"with @farprop.rpc.expose on {worker}, and import its module there before the call."
    )


def check_options(device_maps: Any) -> None:
    """Raise ``UsageError`` if a job with these options can't be restricted."""
    if device_maps:
        raise UsageError("A restricted job sends only CPU tensors, so it takes no device_maps. Leave them out.")


def refuse_object_collectives() -> None:
    """Make torch's object collectives, which unpickle what they receive, raise in a restricted job.

    A process group can't refuse them, because it only sees the collectives of tensors that torch makes of them.
    """
    hook = _torch.object_hook
    if hook is None or getattr(hook.owner, hook.name) is not hook.theirs:
        return

    def tensor_to_object(tensor: Any, tensor_size: Any, group: Any) -> Any:
        if is_agent_set() and current_agent().dialect.restricted:
            raise UsageError(
                "Collectives of objects (such as broadcast_object_list) unpickle what other ranks send, which is not "
                "allowed in a restricted job. Send tensors, or make a call."
            )
        return hook.theirs(tensor, tensor_size, group)

    setattr(hook.owner, hook.name, tensor_to_object)
