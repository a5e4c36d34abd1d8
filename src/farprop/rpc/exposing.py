"""``expose``: what other workers of a restricted job may call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from farprop.wire import exposed

_T = TypeVar("_T")


@overload
def expose(target: _T, *, name: str | None = None, methods: Iterable[str] = ()) -> _T: ...


@overload
def expose(target: None = None, *, name: str | None = None, methods: Iterable[str] = ()) -> Callable[[_T], _T]: ...


def expose(target: Any = None, *, name: str | None = None, methods: Iterable[str] = ()) -> Any:
    """Let the other workers of a restricted job call this. Elsewhere it changes nothing.

    Use it as the outermost decorator, ``@expose`` or ``@expose(name="predict")``, or call it: ``expose(torch.add)``.

    - A function, static method or class method can be called by its name.
    - A class can be called, which makes an object, and be passed to functions that want one (``RemoteModule``,
      ``DistributedOptimizer``). If it is a dataclass, its objects can be in messages.
    - A method, decorated in the body of its class or named in ``methods``, can be called through references to
      objects of the class and of those derived from it: ``rref.rpc_sync().method()``. A module's ``forward`` is also
      what ``rref.rpc_sync()(...)`` calls.

    Args:
        target: what to expose.
        name: what others call it, who may then not have the code and give the name as text. Without one it is
            ``module:qualified_name``.
        methods: names of methods of a class that are exposed with it, such as inherited ones.
    """
    methods = tuple(methods)

    def decorate(found: _T) -> _T:
        exposed.add(found, name, methods)
        return found

    return decorate if target is None else decorate(target)
