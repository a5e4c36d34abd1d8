"""Finds what can't be sent in a value that a codec has refused: ``args[1]['lock']``.

The value is taken apart as pickle takes it apart, and its parts are encoded one by one. That is slow, so it is done
only after an error, and given up after many parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch

_MOST = 10_000  # parts that are tried
_WHOLE = (torch.Tensor, type, ModuleType, BuiltinFunctionType, str, bytes, int, float)  # have no parts
Encode = Callable[[Any], object]

_LEAVE_OUT = (
    "Leave it out, keep it on its worker and send an RRef to it, or give its class a __reduce__ method that says how "
    "to make it anew."
)
_ITERATE = (
    "A generator stays on its worker: send a list of its items, or call its function with rpc.stream, which brings "
    "them as they are made."
)
_ADVICE = {GeneratorType: _ITERATE, AsyncGeneratorType: _ITERATE, CoroutineType: "Await it, and send its result."}
_WAIT = "Send what it holds: future.wait(), or await it."


def explain(error: Exception, value: Mapping[str, Any], encode: Encode, to: str) -> None:
    """Say in an error of an encoder which part can't be sent.

    Args:
        error: the error.
        value: what was to be sent, by the names that the error should use.
        encode: encodes a part; raises if that can't be sent.
        to: the worker that it should be sent to.
    """
    found = _Search(encode).find(value)
    if found is None:
        return
    path, part = found
    kind = type(part)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = f"{path} (a {name}) can't be sent to {to}"
    if isinstance(error, TypeError) and len(error.args) == 1 and type(error.args[0]) is str:
        advice = "" if type(error) is not TypeError else f" {_ADVICE.get(kind, _LEAVE_OUT)}"
        error.args = (f"{text}: {error}{'' if str(error).endswith('.') else '.'}{advice}",)
    else:
        advice = f" {_WAIT}" if isinstance(part, torch.futures.Future) else ""
        error.add_note(f"{text[0].upper()}{text[1:]}.{advice}")


class _Search:
    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._left = _MOST
        self._seen: set[int] = set()

    def find(self, value: Mapping[str, Any]) -> tuple[str, Any] | None:
        """The path of the innermost part that can't be encoded, and the part."""
        found = None
        parts: Iterator[tuple[str, Any]] = iter(value.items())
        while (refused := self._first_refused(parts)) is not None:
            suffix, part = refused
            found = (found[0] if found else "") + suffix, part
            self._seen.add(id(part))
            parts = _parts_of(part)
        return found

    def _first_refused(self, parts: Iterator[tuple[str, Any]]) -> tuple[str, Any] | None:
        try:
            for suffix, part in parts:
                if id(part) in self._seen:
                    continue
                if self._left == 0:
                    return None
                self._left -= 1
                try:
                    self._encode(part)
                except Exception:
                    return suffix, part
        except Exception:  # of the program's own methods
            pass
        return None


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value that pickle would send with it, and how to get from the value to each."""
    if isinstance(value, _WHOLE) or hasattr(type(value), "_reduce_for_call"):
        return
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"[{_short(key)}]", part
            yield f" (the key {_short(key)})", key
    elif type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    elif isinstance(value, set | frozenset):
        for part in value:
            yield f" (the element {_short(part)})", part
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f" (its variable {name})", cell.cell_contents
        for index, part in enumerate(value.__defaults__ or ()):
            yield f".__defaults__[{index}]", part
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    else:
        yield from _parts_of_object(value)


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any]]:
    reduced = value.__reduce_ex__(5)
    if not isinstance(reduced, tuple):
        return
    _, args, state, items, pairs = (*reduced, None, None, None)[:5]
    # The attributes of an object: a dict, or a pair of dicts if it has slots.
    for attributes in state if isinstance(state, tuple) else (state,):
        if isinstance(attributes, dict):
            for name, part in attributes.items():
                yield f".{name}", part
        else:
            yield ".__getstate__()", attributes
    for index, part in enumerate(items or ()):
        yield f"[{index}]", part
    for key, part in pairs or ():
        yield f"[{_short(key)}]", part
    for index, part in enumerate(args):
        yield f".__reduce__()[1][{index}]", part


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
