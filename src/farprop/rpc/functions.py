"""Decorators for functions that other workers call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from farprop.wire import exposed

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


def async_execution(fn: _F) -> _F:
    """Mark a function that returns a ``torch.futures.Future``. Its thread is free until the future is done.

    The caller gets the future's value. Use it where a function waits for other calls or for other workers, so that many
    calls can wait at once. With ``@staticmethod`` or ``@classmethod`` it is the inner decorator, with
    ``@torch.jit.script`` the outer one. An ``async def`` function needs no decorator.

    Args:
        fn: The function.

    Returns:
        The decorated function.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


@overload
def expose(target: _T, *, name: str | None = None, methods: Iterable[str] = ()) -> _T: ...


@overload
def expose(target: None = None, *, name: str | None = None, methods: Iterable[str] = ()) -> Callable[[_T], _T]: ...


def expose(target: Any = None, *, name: str | None = None, methods: Iterable[str] = ()) -> Any:
    """Let the other workers of a restricted job call this. In other jobs it has no effect.

    Use it as the outermost decorator, ``@expose`` or ``@expose(name="predict")``, or call it: ``expose(torch.add)``.

    - Functions, static methods and class methods can be called by name.
    - Classes can be called, which makes an object, and passed to functions that take a class (``RemoteModule``,
      ``DistributedOptimizer``). Objects of an exposed dataclass can be part of messages.
    - Methods, decorated in the body of their class or listed in ``methods``, can be called through references to
      objects of the class and of its subclasses: ``rref.rpc_sync().method()``. If a module's ``forward`` is exposed,
      ``rref.rpc_sync()(...)`` can be called as well.

    Args:
        target: The function, method or class.
        name: The name by which others call it, also as a string if they don't have its code. By default
            ``module:qualified_name``.
        methods: Names of methods of a class to expose with it, for example inherited ones.

    Returns:
        ``target``, or a decorator if no target is given.
    """
    methods = tuple(methods)

    def decorate(found: _T) -> _T:
        exposed.add(found, name, methods)
        return found

    return decorate if target is None else decorate(target)
