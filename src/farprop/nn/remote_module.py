"""``RemoteModule``: the local handle of a module on another worker."""

from __future__ import annotations

import inspect
import io
import logging
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, TypeVarTuple, overload

import torch
from torch import nn

import farprop.rpc as rpc
from farprop._torch import (
    export,
    ignore,
    load_script,
    parse_remote_device,
    save_script,
    script,
    tree_map_only,
    type_of_module,
)
from farprop.nn.scripting import boxed, interface_type, methods_of
from farprop.rpc import RRef
from farprop.rpc.call_arguments import Args, Kwargs, Variadic, args_of, kwargs_of
from farprop.runtime.agent_registry import current_agent

__all__ = ["RemoteModule"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault  # Python 3.13 has them

    _M = TypeVarWithDefault("_M", bound=nn.Module, covariant=True, default=nn.Module)
else:
    _M = TypeVar("_M", bound=nn.Module, covariant=True)
_Module = TypeVar("_Module", bound=nn.Module)
_Ts = TypeVarTuple("_Ts")

_log = logging.getLogger(__name__)

# The attributes that are sent with a RemoteModule, in order.
_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "_module_interface_cls",
    "module_rref",
)

# The attributes that are not sent: the receiver recreates them, or creates them on first use.
_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING = (
    *vars(nn.Module()),
    "forward_async",
    "forward",
    "_caller",
    "_interface_name",
    "__overloads__",
    "__orig_class__",  # RemoteModule[nn.Linear](...) sets it
)

# Methods of modules that a RemoteModule does not support, because the module is on another worker.
_UNSUPPORTED = (
    *("register_buffer", "register_parameter", "add_module", "apply", "requires_grad_", "zero_grad", "share_memory"),
    *("cuda", "ipu", "xpu", "cpu", "type", "float", "double", "half", "bfloat16", "to"),
    *("register_backward_hook", "register_forward_pre_hook", "register_forward_hook"),
    *("state_dict", "load_state_dict", "parameters", "named_parameters", "buffers", "named_buffers"),
    *("children", "named_children", "modules", "named_modules", "extra_repr"),
)
# Those of them whose signatures differ from those of nn.Module.
_OTHER_SIGNATURES: dict[str, Callable[..., None]] = {
    "modules": lambda self: None,
    "register_forward_hook": lambda self, hook, prepend=False, with_kwargs=False: None,
    "register_forward_pre_hook": lambda self, hook, prepend=False, with_kwargs=False: None,
}
_INSTEAD = {"parameters": ". Please use ``remote_parameters`` instead."}


class _Caller:
    """Calls the module behind a reference.

    The ``forward`` of a RemoteModule is bound to this object. Bound to the RemoteModule itself it would make a cycle,
    and the module on the other worker would live until the garbage collector runs.
    """

    def __init__(self, module_rref: RRef[nn.Module], device: str) -> None:
        self._module_rref = module_rref
        self._device = device
        self._is_on_cpu = torch.device(device).type == "cpu"

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        if self._is_on_cpu:
            future: torch.futures.Future[Any] = self._module_rref.rpc_async()(*args, **kwargs)
            return future
        return rpc.rpc_async(self._module_rref.owner_name(), _run_forward, self._arguments(args, kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_on_cpu:
            return self._module_rref.rpc_sync()(*args, **kwargs)
        return rpc.rpc_sync(self._module_rref.owner_name(), _run_forward, self._arguments(args, kwargs))

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        return self._module_rref, self._device, args, kwargs


class _RemoteModule(nn.Module, Generic[_M]):
    """A RemoteModule with an optional interface for TorchScript.

    Args:
        remote_device: As for ``RemoteModule``.
        module_cls: As for ``RemoteModule``.
        args: As for ``RemoteModule``.
        kwargs: As for ``RemoteModule``.
        _module_interface_cls: A class decorated with ``torch.jit.interface``. The module is compiled on its worker, and
            the RemoteModule can be compiled with ``torch.jit.script``, alone or as a part of another module.
    """

    # Compiled modules share their code if they have the same class, attribute types and constants.
    __constants__ = ["_interface_name"]
    _interface_name = ""
    # The compiler copies these to the compiled module without looking at them.
    __jit_ignored_attributes__ = ["module_rref"]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Args | None = None,
        kwargs: Kwargs | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__()
        self._prepare_init(remote_device)
        creation = module_cls, args_of(args), kwargs_of(kwargs), self.device
        module_rref: RRef[Any]
        if _module_interface_cls is None:
            module_rref = rpc.remote(self.on, _create_module, creation)
        else:
            methods_of(_module_interface_cls)  # raises for a class that is not an interface, before the remote call
            module_rref = rpc.remote(self.on, _create_compiled_module, (*creation, _module_interface_cls))
        self._set_up(self.on, self.device, _module_interface_cls, module_rref)

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[_Module], _module_interface_cls: Any = None
    ) -> RemoteModule[_Module]:
        """Make a RemoteModule for an existing module.

        Args:
            remote_device: Where the module is, as for the constructor.
            module_rref: A reference to the module, for example from ``get_module_rref``.
            _module_interface_cls: The interface of a compiled module.

        Returns:
            The RemoteModule.
        """
        remote_module: RemoteModule[_Module] = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(remote_module)
        remote_module._prepare_init(remote_device)
        remote_module._set_up(remote_module.on, remote_module.device, _module_interface_cls, module_rref)
        return remote_module

    def _prepare_init(self, remote_device_str: str) -> bool:
        """Parse the worker and the device; returns whether CPU tensors have to be moved to a CUDA device."""
        place = parse_remote_device(remote_device_str)
        name, rank = place.worker_name(), place.rank()
        on = rank if name is None else name
        info = rpc.get_worker_info(on)  # raises UsageError if there is no such worker
        self.on = info.name if on is None else on
        self.device = str(place.device())
        return torch.device(self.device).type == "cuda"

    def _set_up(self, on: str | int, device: str, interface: Any, module_rref: RRef[Any]) -> None:
        self.on = on
        self.device = device
        self.is_device_map_set = False  # a RemoteModule moves tensors to its device by itself
        self.is_scriptable = interface is not None
        self._module_interface_cls = interface
        self.module_rref: RRef[_M] = module_rref
        caller = _Caller(module_rref, device)
        if interface is None:
            self.forward_async = caller.forward_async
            self.forward = caller.forward
            return
        methods = methods_of(interface)
        self.forward_async = types.MethodType(methods.forward_async, caller)
        self.forward = types.MethodType(methods.forward, caller)
        self._caller = boxed(caller)
        self._interface_name = interface.__torch_script_interface__

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Get references to the module's parameters, for example for a ``DistributedOptimizer``.

        Args:
            recurse: Whether to include the parameters of submodules.

        Returns:
            A reference for each parameter.
        """
        return rpc.rpc_sync(self.module_rref.owner_name(), _param_rrefs, (self.module_rref, recurse))

    def get_module_rref(self) -> RRef[_M]:
        """Get the reference to the module.

        Returns:
            The reference.
        """
        return self.module_rref

    def train(self, mode: bool = True) -> Self:
        """Set the module on its worker to training or evaluation mode.

        Args:
            mode: Whether to set training mode.

        Returns:
            This RemoteModule.
        """
        rpc.rpc_sync(self.module_rref.owner_name(), _train, (self.module_rref, mode))
        return self

    def eval(self) -> Self:
        """Set the module on its worker to evaluation mode.

        Returns:
            This RemoteModule.
        """
        return self.train(False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on={self.on!r}, device={self.device!r})"

    def __getattr__(self, name: str) -> Any:
        # A received RemoteModule gets the attributes of nn.Module when one of them is first used.
        if "_modules" not in self.__dict__:
            nn.Module.__init__(self)
            return getattr(self, name)
        return super().__getattr__(name)

    # Pickling. torch.jit.script compiles the next two methods.

    @export
    def __getstate__(self) -> None:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
        )

    @export
    def __setstate__(self, state: None) -> None:
        raise RuntimeError(
            "Cannot unpickle RemoteModule in python pickler. RemoteModule can only be unpickled when using RPC"
        )

    @ignore
    def save_to_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to be sent or saved in compiled form.

        Args:
            *args: Ignored.
            **kwargs: Ignored.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "Passing a script RemoteModule over RPC is not supported. Pass its module_rref, and call "
            "RemoteModule.init_from_module_rref on the other worker."
        )

    def _check_attribute_picklability(self) -> None:
        """Raise ``AttributeError`` for an attribute that is in neither list of attributes."""
        known = {*_REMOTE_MODULE_PICKLED_ATTRIBUTES, *_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING}
        for name in vars(self).keys() - known:
            raise AttributeError(
                f"Attribute {name} must be either in ``_REMOTE_MODULE_PICKLED_ATTRIBUTES`` or "
                "``_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING``."
            )

    def _reduce_for_call(self, pickler: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _remote_module_reducer(self)


class RemoteModule(_RemoteModule[_M]):
    """A module on another worker.

    ``forward``, and a call of the RemoteModule, run the module there and return the result. ``forward_async`` returns a
    future of it. A RemoteModule can be sent in calls, and refers to the same module on the receiver. Most other methods
    of modules are not supported.

    If the module is not on the CPU, its arguments are moved to its device, and its results to the CPU. If
    ``module_cls`` raises, the first use of the module raises.

    Args:
        remote_device: ``"worker1/cuda:0"`` or ``"rank:1/cuda:0"``; without a device the CPU. A device alone is a device
            of this worker.
        module_cls: A class or function that is called on that worker and returns the module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        TypeError: ``args`` is no tuple or list, or ``kwargs`` no dict.
        UsageError: There is no such worker, or this process is not a worker.
        ValueError: ``remote_device`` is malformed.

    Example:
        ``layer = RemoteModule("worker1", nn.Linear, args=(20, 30))``, then ``layer(x)``
    """

    # As those of rpc.remote: see farprop.rpc.call_arguments.
    # fmt: off
    @overload
    def __init__(self, remote_device: str, module_cls: Callable[..., _M], args: list[Any],
                 kwargs: None = None) -> None: ...
    @overload
    def __init__(self, remote_device: str, module_cls: Callable[..., _M], args: Args | None,
                 kwargs: Kwargs) -> None: ...
    @overload
    def __init__(self, remote_device: str, module_cls: Callable[..., _M], args: Args | None = None, *,
                 kwargs: Kwargs) -> None: ...
    @overload
    def __init__(self, remote_device: str, module_cls: Callable[[], _M], args: None = None,
                 kwargs: None = None) -> None: ...
    @overload
    def __init__(self, remote_device: str, module_cls: Variadic[_M], args: tuple[Any, ...],
                 kwargs: None = None) -> None: ...
    @overload
    def __init__(self, remote_device: str, module_cls: Callable[[*_Ts], _M], args: tuple[*_Ts],
                 kwargs: None = None) -> None: ...
    # fmt: on
    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Args | None = None,
        kwargs: Kwargs | None = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)


def _raise_not_supported(name: str) -> NoReturn:
    raise ValueError(f"Method ``{name}`` not supported for RemoteModule{_INSTEAD.get(name, '')}")


def _unsupported(name: str) -> Callable[..., NoReturn]:
    signature = inspect.signature(_OTHER_SIGNATURES.get(name) or getattr(nn.Module, name))

    def method(self: _RemoteModule[Any], *args: Any, **kwargs: Any) -> NoReturn:
        signature.bind(self, *args, **kwargs)
        _raise_not_supported(name)

    method.__name__ = name
    method.__qualname__ = f"{_RemoteModule.__qualname__}.{name}"
    method.__doc__ = "Not supported."
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


for _name in _UNSUPPORTED:
    setattr(_RemoteModule, _name, _unsupported(_name))


def _remote_module_reducer(remote_module: _RemoteModule[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """How a RemoteModule is sent in a call."""
    known = {*_REMOTE_MODULE_PICKLED_ATTRIBUTES, *_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING}
    for name in vars(remote_module).keys() - known:
        _log.warning("The attribute %s of a RemoteModule is not sent with it.", name)
    sent = remote_module.on, remote_module.device, remote_module._module_interface_cls, remote_module.module_rref
    return _remote_module_receiver, (type(remote_module), *sent)


def _remote_module_receiver(*remote_module_pickled_attrs: Any) -> _RemoteModule[Any]:
    cls, *attributes = remote_module_pickled_attrs
    remote_module: _RemoteModule[Any] = cls.__new__(cls)
    remote_module._set_up(*attributes)
    return remote_module


def _recursive_script_module_reducer(recursive_script_module: Any) -> tuple[Callable[..., Any], tuple[bytes]]:
    """How a compiled module is sent in a call. A compiled RemoteModule raises."""
    file = io.BytesIO()
    save_script(recursive_script_module, file)
    return _recursive_script_module_receiver, (file.getvalue(),)


def _recursive_script_module_receiver(recursive_script_module_serialized: bytes) -> Any:
    return load_script(io.BytesIO(recursive_script_module_serialized))


# These run on the module's worker.


def _create_module(
    module_cls: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    module.to(device)
    return module


def _create_compiled_module(
    module_cls: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: str, interface: Any
) -> nn.Module:
    module = _create_module(module_cls, args, kwargs, device)
    compiled = script(module)
    if not type_of_module(compiled).isSubtypeOf(interface_type(interface)):
        raise ValueError(f"{type(module)} does not implement {interface}: a method is missing, or its types differ.")
    return compiled  # type: ignore[no-any-return]


def _create_module_with_interface(
    module_cls: Callable[..., nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
    module_interface_cls: Any,
) -> RRef[nn.Module]:
    """Create a module, compiled if there is an interface; returns a reference to it."""
    if module_interface_cls is None:
        return RRef(_create_module(module_cls, args, kwargs, device))
    return RRef(_create_compiled_module(module_cls, args, kwargs, device, module_interface_cls), module_interface_cls)


# For errors: how the program knows the arguments of these functions.
_creates: Any
for _creates in (_create_module, _create_compiled_module, _create_module_with_interface):
    _creates.argument_names = ("module_cls", "args", "kwargs", "device", "interface")


def _instantiate_template(module_interface_cls: Any, enable_moving_cpu_tensors_to_cuda: bool) -> None:
    """Generate the methods of RemoteModules with this interface. They move tensors if necessary."""
    methods_of(module_interface_cls)


def _run_forward(module_rref: RRef[nn.Module], device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module that is not on the CPU: its arguments are moved to its device, and its results to the CPU."""
    module = _exposing("__call__", module_rref)
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, module(*args, **kwargs))


def _param_rrefs(module_rref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in _exposing("parameters", module_rref).parameters(recurse)]


def _train(module_rref: RRef[nn.Module], mode: bool) -> None:
    _exposing("train", module_rref).train(mode)


def _exposing(method: str, module_rref: RRef[nn.Module]) -> nn.Module:
    """Return the module. In a restricted job, raise unless the module exposes this method."""
    module = module_rref.local_value()
    current_agent().dialect.method_of(module, method)
    return module
