"""``forward`` and ``forward_async`` of a RemoteModule for ``torch.jit.script``, generated from an interface.

The compiled methods call back into Python, because TorchScript has no type for farprop's references. The Python
object to call is an attribute of the compiled module, in a *box*: a completed future, which TorchScript does not open.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union  # noqa: UP035

import torch
from torch.futures import Future

from farprop._torch import ScriptAttribute, compilation_unit, export, ignore


class Methods(NamedTuple):
    """The two methods. ``self`` is the caller object, or the compiled module, which has it in the box ``_caller``."""

    forward_async: Callable[..., Any]
    forward: Callable[..., Any]


# The first three functions are not compiled. The request is sent on the caller's thread, in program order. The forked
# function waits for the answer and gives it its type.
_SOURCE = """\
def _run(_caller: Future[Any], {parameters}) -> {result}:
    return _caller.value().forward({names})


def _start(_caller: Future[Any], {parameters}) -> Future[Any]:
    return _caller.value().forward_async({names})


def _typed(_answer: Any) -> {result}:
    return _value_of(_answer)


def _finish(_answer: Future[Any]) -> {result}:
    return _typed(_answer.wait())


def forward_async(self, {parameters}) -> Future[{result}]:
    if torch.jit.is_scripting():
        return torch.jit.fork(_finish, _start(self._caller, {names}))
    return self.forward_async({names})


def forward(self, {parameters}) -> {result}:
    if torch.jit.is_scripting():
        return _run(self._caller, {names})
    return self.forward({names})
"""


def boxed(value: Any) -> Any:
    """An attribute of a module that keeps its Python value when the module is compiled."""
    box: Future[Any] = Future()
    box.set_result(value)
    return ScriptAttribute(box, Future[Any])


@functools.cache
def methods_of(interface: Any) -> Methods:
    """The methods for an interface, with the signature of its ``forward``."""
    schema = interface_type(interface).getMethod("forward")
    if schema is None:
        raise ValueError(f"{interface} has no method forward, which a RemoteModule needs. Declare it there.")
    arguments = schema.arguments[1:]  # the first is self
    source = _SOURCE.format(
        parameters=", ".join(f"{argument.name}: {argument.type.annotation_str}" for argument in arguments),
        names=", ".join(argument.name for argument in arguments),
        result=schema.returns[0].type.annotation_str,
    )
    file = f"<forward of {interface.__torch_script_interface__}>"
    # The compiler reads the source from there.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = dict(_NAMES)
    try:
        exec(compile(source, file, "exec", dont_inherit=True), names)
    except NameError as error:
        raise ValueError(
            f"forward of {interface} takes or returns objects of a class. Use Tensor, int, float, bool, str and None, "
            "and Tuple, List, Dict, Optional and Union of them."
        ) from error
    for name in ("_run", "_start", "_typed"):
        names[name] = ignore(names[name])
    for name in Methods._fields:
        names[name].__defaults__ = interface.forward.__defaults__  # the schema has none
    return Methods(*(export(names[name]) for name in Methods._fields))


def interface_type(interface: Any) -> Any:
    """The compiler's type for a class that is decorated with ``torch.jit.interface``."""
    name = getattr(interface, "__torch_script_interface__", None)
    if name is None:
        raise ValueError(f"{interface} is not an interface. Decorate the class with @torch.jit.interface.")
    return compilation_unit.get_interface(name)


def _value_of(answer: Any) -> Any:
    """Raise an exception that was set in Python, which compiled code sees as the future's value."""
    if isinstance(answer, Exception):
        raise answer
    return answer


# The globals of the source. Types have the names that the compiler uses.
_NAMES = {
    "__name__": __name__,
    "_value_of": _value_of,
    "torch": torch,
    "Any": Any,
    "Device": torch.device,
    "Dict": Dict,  # noqa: UP006
    "Future": Future,
    "List": List,  # noqa: UP006
    "NoneType": type(None),
    "Optional": Optional,
    "Tensor": torch.Tensor,
    "Tuple": Tuple,  # noqa: UP006
    "Union": Union,
}
