"""Restricted mode: what workers may ask of each other that don't trust each other's code.

``_INTERNAL`` lists the functions of farprop's own that workers call on each other, with the types that each takes. What
is not in this list and not exposed by the program can't be called.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
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
    """The arguments of a function: by position, then any number of ``rest``; named ones only if ``named``."""

    def __init__(self, *kinds: type | _Check, rest: _Check | None = None, named: bool = False) -> None:
        self._checks = [_is(kind) if isinstance(kind, type) else kind for kind in kinds]
        self._rest = rest
        self._named = named

    def allows(self, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
        args = list(args)
        count = len(self._checks)
        if len(args) < count or (kwargs and not self._named) or (len(args) > count and self._rest is None):
            return False
        first = all(check(value) for check, value in zip(self._checks, args, strict=False))
        return first and (self._rest is None or all(self._rest(value) for value in args[count:]))


def _anything(value: Any) -> bool:
    return True


_GRADIENT = _is(torch.Tensor, type(None), int)
_KEY = _is(tuple)

_INTERNAL = {
    # references
    b"farprop.runtime.owner_calls:operate": _Takes(int, str, int, bytes),
    b"farprop.runtime.owner_calls:fetch": _Takes(*_ID),
    b"farprop.runtime.owner_calls:backward": _Takes(*_ID, int, bool),
    # calls only methods that are exposed
    b"farprop.runtime.owner_calls:invoke": _Takes(*_ID, str, tuple, dict),
    b"farprop.rpc.rref_proxy:invoke_here": _Takes(RRef, str, tuple, dict),
    # gatherings and shutdown
    b"farprop.rpc.api:_gather_to_leader": _Takes(_KEY, str, _anything),
    b"farprop.rpc.api:_broadcast_to_followers": _Takes(_KEY, dict),
    b"farprop.rpc.api:_release_follower": _Takes(_KEY, _is(tuple, type(None))),
    # backward passes
    b"farprop.runtime.gradients.calls:propagate": _Takes(int, bytes, rest=_GRADIENT),
    b"farprop.runtime.gradients.calls:give_back": _Takes(bytes),
    b"farprop.runtime.gradients.calls:release": _Takes(bytes, rest=_is(int)),
    b"farprop.runtime.gradients.calls:survey": _Takes(bytes, _list_of(int)),
    b"farprop.runtime.gradients.calls:failed": _Takes(int, int, bytes),
    b"farprop.runtime.gradients.calls:abort": _Takes(int, int, int),
    b"farprop.runtime.gradients.calls:exists": _Takes(int, int),
    # optimisers and modules: their classes have to be exposed, and so has what is called of the modules
    b"farprop.optim.local:_new_local_optimizer": _Takes(callable, _list_of(RRef), rest=_anything, named=True),
    b"farprop.nn.remote_module:_create_module": _Takes(callable, tuple, dict, str),
    b"farprop.nn.remote_module:_run_forward": _Takes(RRef, str, tuple, dict),
    b"farprop.nn.remote_module:_param_rrefs": _Takes(RRef, bool),
    b"farprop.nn.remote_module:_train": _Takes(RRef, bool),
}


def data_dialect(worker: str) -> Dialect:
    """How a worker of a restricted job reads and writes."""
    guarded: dict[bytes, Callable[..., Any]] = {}

    def resolve(name: bytes) -> Any:
        found = exposed.find(name) or guarded.get(name)
        if found is None:
            found = _internal(name)
            if found is None:
                raise _not_exposed(worker, name)
            guarded[name] = found
        return found

    def method_of(value: Any, name: str) -> Any:
        check_method(worker, value, name)
        return getattr(value, name)

    return Dialect(
        restricted=True,
        name_of=exposed.name_of,
        resolve=resolve,
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


def _internal(name: bytes) -> Callable[..., Any] | None:
    """One of farprop's own functions, if its module is imported here, with a look at its arguments."""
    takes = _INTERNAL.get(name)
    where, _, path = name.decode(errors="replace").partition(":")
    if takes is None or where not in sys.modules:
        return None
    function: Callable[..., Any] = operator.attrgetter(path)(sys.modules[where])

    def checked(*args: Any, **kwargs: Any) -> Any:
        if not takes.allows(args, kwargs):
            raise ProtocolError(f"a call of {where}:{path} has arguments of other types than it takes")
        return function(*args, **kwargs)

    return checked


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
