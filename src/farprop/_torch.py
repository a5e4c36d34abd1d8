"""All private names of torch that farprop uses, and all functions of torch that it replaces.

Torch may remove private names in any version. Each is looked up here once, when farprop is imported, together with the
feature that needs it. A missing name does not fail the import: it gets a fallback, or a stand-in that raises
``TorchVersionError`` when it is used. One ``TorchVersionWarning`` lists all missing names, and warns of versions of
torch that farprop was not tested with.

No other module under ``src/`` may use a private name of torch; ``tests/test_layers.py`` checks it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from farprop.errors import TorchVersionError, TorchVersionWarning

# The versions that farprop was tested with. docs/torch_versions.md lists the tests.
TRIED: Final = ("2.13", "2.15")

_F = TypeVar("_F", bound=Callable[..., Any])

# From a name to the feature that needs it: all, and those that this torch lacks. Tests hide each name in turn.
names: dict[str, str] = {}
missing: dict[str, str] = {}

_RAISE: Final = object()
_GONE: Final = object()


class _Absent:
    """The stand-in for a missing name: any use raises ``TorchVersionError``."""

    def __init__(self, name: str, feature: str) -> None:
        self.__dict__["_error"] = (
            f"torch {torch.__version__} has no {name}, which farprop needs for this: {feature}. Use a torch that "
            f"farprop was tried with: {_listed(TRIED)}."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TorchVersionError(self.__dict__["_error"])

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself looks these up
            raise AttributeError(name)
        raise TorchVersionError(self.__dict__["_error"])


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:-1]) + " or " + items[-1] if len(items) > 1 else items[0]


def _found(name: str) -> Any:
    """Return the object with a dotted name, or _GONE."""
    parts = name.split(".")
    found: Any = torch
    for count, part in enumerate(parts[1:], 2):
        owner, found = found, getattr(found, part, _GONE)
        if found is _GONE and isinstance(owner, ModuleType):
            try:
                found = importlib.import_module(".".join(parts[:count]))
            except ImportError:
                return _GONE
        if found is _GONE:
            return _GONE
    return found


def _find(name: str, feature: str, fallback: Any = _RAISE) -> Any:
    """Return the object with a dotted name. If it is missing, return the fallback, or a stand-in that raises."""
    names[name] = feature
    found = _found(name)
    if found is not _GONE:
        return found
    missing[name] = feature
    return _Absent(name, feature) if fallback is _RAISE else fallback


def _find_base(name: str, feature: str) -> Any:
    """Return a base class. If it is missing, return a class that raises when it is instantiated."""
    absent = _Absent(name, feature)
    return _find(name, feature, type("Absent", (), {"__init__": lambda self, *args, **kwargs: absent()}))


class Hook(NamedTuple):
    """A function of torch that farprop replaces."""

    owner: Any
    name: str
    theirs: Any


def _find_hook(name: str, arguments: int, feature: str) -> Hook | None:
    """Find a function to replace; None if it is missing, or takes another number of arguments than ours."""
    names[name] = feature
    found = _found(name)
    if found is _GONE or not _takes(found, arguments):
        missing[name] = feature
        return None
    owner, _, last = name.rpartition(".")
    return Hook(_found(owner), last, found)


def _takes(function: Any, arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:  # a function in C++ has no signature
        return callable(function)
    return True


# Futures. Torch's Python class wraps the one in C++, which costs time in short calls. Futures from C++ are not wrapped.

_FUTURES = "futures that errors don't keep alive, and that cost as little as they can"
_PublicFuture: Any = torch.futures.Future
Future: Any = _find("torch._C.Future", _FUTURES, _PublicFuture)
wait: Any = _find("torch._C.Future.wait", _FUTURES, _PublicFuture.wait)
set_result: Any = _find("torch._C.Future.set_result", _FUTURES, _PublicFuture.set_result)
# Sets the function that raises a future's exception.
set_unwrap_function: Any = _find("torch._C.Future._set_unwrap_func", _FUTURES, None)


# Autograd

_VIEWS = "quick looks at views that are sent to other workers"
_HOOKS = "hooks of leaves in distributed backward passes"
_TAKING = "gradients that are taken as they come, without a copy"
_CHANGES = "the names of parameters that another trainer changes under a backward pass"
# C code, for ``finally``: an interrupt at the start of the ``__exit__`` of ``torch.no_grad`` would leave its mode on.
set_grad_enabled: Any = _find(
    "torch._C._set_grad_enabled", "a grad mode that interrupts leave as it was", torch.set_grad_enabled
)
# The node of a view is looked up in another way. The fallback treats every tensor as a view.
is_view: Any = _find("torch.Tensor._is_view", _VIEWS, lambda tensor: True)


def _find_attribute(name: str, feature: str, fallback: Any) -> Any:
    """Return a function that reads an attribute, or the fallback if the class lacks it."""
    found = _find(name, feature, None)
    return fallback if found is None else operator.attrgetter(name.rpartition(".")[2])


# Used as a truth value. Without the name, every leaf is treated as one with hooks.
backward_hooks: Any = _find_attribute("torch.Tensor._backward_hooks", _HOOKS, lambda tensor: True)
post_accumulate_hooks: Any = _find_attribute("torch.Tensor._post_accumulate_grad_hooks", _HOOKS, lambda tensor: None)
# How often a tensor was changed in place. Without it, no step is found that changed a parameter, and a step with
# ``consistency`` does not see which graphs need the old values.
version_of: Any = _find_attribute("torch.Tensor._version", _CHANGES, lambda tensor: 0)
# The reference count of a tensor. The fallback's results are never equal to a count, so every tensor counts as shared.
use_count: Any = _find("torch.Tensor._use_count", _TAKING, lambda tensor: object())
# These also work for sparse tensors that are not coalesced.
sparse_indices: Any = _find("torch.Tensor._indices", _TAKING, lambda tensor: tensor.coalesce().indices())
sparse_values: Any = _find("torch.Tensor._values", _TAKING, lambda tensor: tensor.coalesce().values())


def _run_backward_in_layers(
    roots: Any, gradients: Any, keep: bool, create: bool, sinks: Any, unreachable: bool, accumulate: bool
) -> Any:
    if sinks:
        return torch.autograd.grad(roots, sinks, gradients, keep, create, allow_unused=unreachable)
    return torch.autograd.backward(roots, gradients, keep, create)


# torch.autograd.grad calls this. A direct call is three times as fast.
run_backward: Any = _find(
    "torch.autograd.Variable._execution_engine.run_backward",
    "backward passes that cost as little as they can",
    _run_backward_in_layers,
)
# Registers a callback for the end of the running backward pass.
queue_callback: Any = _find("torch.autograd.Variable._execution_engine.queue_callback", "DistributedDataParallel")

# The types of nodes. The fallback takes the type of a new node, which can't be made inside of a custom operator.
_NODES = "an import of farprop inside of custom operators"


def _leaf_type() -> Any:
    with torch.inference_mode(False), torch.enable_grad():
        leaf: Any = torch.empty(0, requires_grad=True)
        return type(leaf.view_as(leaf).grad_fn.next_functions[0][0])


LeafNode: Any = _find("torch._C._functions.AccumulateGrad", _NODES, None) or _leaf_type()
_has_node_classes: Final = _find("torch.autograd.Function._backward_cls", _NODES, None) is not None


def node_type(function: Any, *arguments: Any) -> Any:
    """The node type of a ``torch.autograd.Function``. ``arguments`` are valid arguments for it."""
    if _has_node_classes:
        return function._backward_cls
    with torch.inference_mode(False), torch.enable_grad():
        return type(function.apply(*arguments)[0].grad_fn)


# The metadata of a node's gradients, for their devices.
input_metadata: Any = _find_attribute(
    "torch.autograd.graph.Node._input_metadata",
    "distributed backward passes on several devices at once",
    lambda node: (),
)

# Inside of a custom operator torch records nothing, however grad mode is set.
_OPERATORS = "gradients of calls inside of custom operators"
_is_excluded: Any = _find("torch._C._dispatch_tls_is_dispatch_key_excluded", _OPERATORS, None)
_AUTOGRAD_KEY: Any = _find("torch._C.DispatchKey.AutogradFunctionality", _OPERATORS, None)
is_key_excluded: Any = (lambda key: False) if None in (_is_excluded, _AUTOGRAD_KEY) else _is_excluded
AUTOGRAD_KEY: Any = _AUTOGRAD_KEY

# Transforms of functions, and forward mode
_TRANSFORMS = "errors of calls with tensors of torch.func or of forward mode that say what is possible"
# The innermost transform of torch.func that runs in this thread, or None.
current_transform: Any = _find("torch._C._functorch.peek_interpreter_stack", _TRANSFORMS, lambda: None)
_forward_ad: Any = torch.autograd.forward_ad
_DUAL_LEVEL = "torch.autograd.forward_ad._current_level"
_has_levels: Final = _find(_DUAL_LEVEL, _TRANSFORMS, None) is not None
# The level of forward mode; below 0 outside of it. Every call asks: C code, for speed.
dual_level: Callable[[], int] = (
    partial(operator.attrgetter(_DUAL_LEVEL.rpartition(".")[2]), _forward_ad) if _has_levels else lambda: -1
)


# Profiles

_PROFILES = "calls and collectives in profiles"
profiler_enabled: Any = _find("torch.autograd._profiler_enabled", _PROFILES, lambda: False)
_enter_record: Any = _find("torch.autograd._record_function_with_args_enter", _PROFILES, None)
_exit_record: Any = _find("torch.autograd._record_function_with_args_exit", _PROFILES, None)
_has_records: Final = None not in (_enter_record, _exit_record)
# Begins a profiler event, which another thread may end. Both or none: an event without an end spoils the profile.
enter_record: Any = _enter_record if _has_records else lambda name, *tensors: None
exit_record: Any = _exit_record if _has_records else lambda event: None
# The legacy profiler, which torch's RPC supports. Torch may drop it.
_profiler_type: Any = _find("torch._C._autograd._profiler_type", _PROFILES, lambda: None)
_LEGACY: Any = _find("torch._C._profiler.ActiveProfilerType.LEGACY", _PROFILES, _GONE)
legacy_profile: Any = _find_base("torch.autograd.profiler_legacy.profile", _PROFILES)
# The first starts a profile, the second turns records into events.
start_trace: Hook | None = _find_hook("torch.autograd.profiler_legacy.profile._start_trace", 1, _PROFILES)
parse_records: Hook | None = _find_hook("torch.autograd.profiler_legacy._parse_legacy_records", 1, _PROFILES)
build_tree: Any = _find("torch.autograd.profiler_util.EventList._build_tree", _PROFILES, lambda events: None)


# Kineto records one thread only, unless it is told otherwise.
_KinetoConfig: Any = _find("torch._C._profiler._ExperimentalConfig", "torch's operators in farprop.profile", None)
_profiler_module: Any = torch.autograd.profiler
_IS_PROFILED = "torch.autograd.profiler._is_profiler_enabled"
_has_flag: Final = _find(_IS_PROFILED, "called functions in profiles of the worker that runs them", None) is not None
# Whether a profile of torch's runs in any thread of this process. Every call that is served asks: C code, for speed.
is_profiled_process: Callable[[], bool] = (
    partial(operator.attrgetter(_IS_PROFILED.rpartition(".")[2]), _profiler_module) if _has_flag else lambda: False
)


def profile_of_all_threads() -> Any:
    """Make a profile of torch's that records the operators of all threads, or None if this torch has none."""
    if _KinetoConfig is None or not torch.autograd.kineto_available():
        return None
    config = _KinetoConfig(profile_all_threads=True)
    return _profiler_module.profile(use_kineto=True, experimental_config=config)


def is_legacy_profile() -> bool:
    """Whether a legacy profile runs on this thread."""
    return bool(profiler_enabled() and _profiler_type() == _LEGACY)


# Functions that torch.compile must not trace. Torch has decorators for this, but they import its compiler, which takes
# seconds, and they cost time at each call.

_COMPILER = "functions that torch.compile is to leave alone: it may trace farprop"
_FrameAction: Any = _find("torch._C._dynamo.eval_frame._FrameAction", _COMPILER, None)
_FrameExecStrategy: Any = _find("torch._C._dynamo.eval_frame._FrameExecStrategy", _COMPILER, None)
_set_strategy: Any = _find("torch._C._dynamo.eval_frame.set_code_exec_strategy", _COMPILER, None)
_has_strategies: Final = None not in (_FrameAction, _FrameExecStrategy, _set_strategy)


def skip_in_compiler(function: Any, why: str, with_callees: bool = True) -> None:
    """Exclude a function from ``torch.compile``.

    Args:
        function: the function.
        why: the reason, for the compiler's messages.
        with_callees: whether the functions that it calls are excluded, too.
    """
    if _has_strategies:
        callees = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
        _set_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, callees))
    # The tracer reads these attributes at a call of the function.
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = why
    function._torchdynamo_disable_recursive = with_callees


# Trees of lists, tuples and dicts


def _tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _tree_map(change, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_tree_map(change, item) for item in tree)
    return change(tree)


def _tree_map_only(kind: Any, change: Callable[[Any], Any], tree: Any) -> Any:
    return _tree_map(lambda leaf: change(leaf) if isinstance(leaf, kind) else leaf, tree)


_TREES = "tensors inside of containers of other classes than list, tuple and dict, in optimisers and modules"
tree_map: Any = _find("torch.utils._pytree.tree_map", _TREES, _tree_map)
tree_map_only: Any = _find("torch.utils._pytree.tree_map_only", _TREES, _tree_map_only)


# Mixed precision and checkpoints

_AUTOCAST = "autocast of the caller in called functions"
is_any_autocast_enabled: Any = _find("torch._C._is_any_autocast_enabled", _AUTOCAST, lambda: False)
privateuse_name: Any = _find("torch._C._get_privateuse1_backend_name", _AUTOCAST, lambda: "privateuseone")
_SCALER = "farprop.optim.GradScaler"
check_scaler: Any = _find("torch.amp.GradScaler._check_scale_growth_tracker", _SCALER)
scale_of: Any = operator.attrgetter("_scale")  # a tensor; None before the first loss is scaled


def scaler_state(scaler: Any, optimizer: Any) -> dict[str, Any]:
    """What a ``GradScaler`` notes of an optimizer until the next update."""
    state: dict[str, Any] = scaler._per_optimizer_states[id(optimizer)]
    return state


_CHECKPOINTS = "calls inside of torch.utils.checkpoint that are made once"
checkpoint: Any = _find("torch.utils.checkpoint.checkpoint", _CHECKPOINTS)
CheckpointFunction: Any = _find("torch.utils.checkpoint.CheckpointFunction", _CHECKPOINTS, None)
_ONCE = "checkpointed functions that run again once a pass, however often it stops in between"
graph_exec_group: Any = _find("torch._C._get_graph_exec_group", _ONCE, lambda: None)
set_graph_exec_group: Any = _find("torch._C._set_graph_exec_group", _ONCE, lambda group: None)
checkpoint_generator: Final = _find_hook(
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator", 6, _CHECKPOINTS
)


# The debug server

_DEBUG_SERVER = "farprop.telemetry.torch_debug: farprop's answers in torch's debug server"
register_debug_handler: Any = _find("torch._C._distributed_c10d._register_handler", _DEBUG_SERVER)
_has_debug_page: Final = importlib.util.find_spec("torch.distributed.debug") is not None


def debug_frontend() -> Any:
    """The module of the debug server's page. It is imported here, because it needs packages that torch does not."""
    name = "torch.distributed.debug._frontend"
    return importlib.import_module(name) if _has_debug_page else _Absent(name, _DEBUG_SERVER)()


# Stores and groups

# Parses "worker1/cuda:0".
parse_remote_device: Any = _find("torch.distributed.remote_device._remote_device", "RemoteModule")
create_store: Any = _find("torch.distributed._create_store_from_options", "init_rpc without a world_size")


def _broadcast_each(group: Any, tensors: Sequence[torch.Tensor], _: int, rank: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = rank, 0
    for tensor in tensors:
        group.broadcast([tensor], options).wait()


_DDP = "DistributedDataParallel that costs as little as it can"
broadcast_coalesced: Any = _find("torch.distributed._broadcast_coalesced", _DDP, _broadcast_each)


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _multiply_each(targets: Sequence[torch.Tensor], factor: float) -> None:
    for target in targets:
        target.mul_(factor)


foreach_copy: Any = _find("torch._foreach_copy_", _DDP, _copy_each)
foreach_multiply: Any = _find("torch._foreach_mul_", _DDP, _multiply_each)
# 0 if no two elements share memory. Other tensors get memory in the default layout.
internal_overlap: Any = _find(
    "torch._debug_has_internal_overlap", _DDP, lambda tensor: 0 if tensor.is_contiguous() else 1
)
preserve_version: Any = _find(
    "torch.autograd._unsafe_preserve_version_counter",
    "DistributedDataParallel of modules with buffers that a graph has saved, two forward passes before a backward",
    lambda tensors: nullcontext(),
)
_BACKENDS = "groups that derive from torch's class and leave some collectives to its backends"
_device_types: Any = _find("torch.distributed.ProcessGroup._device_types", _BACKENDS, None)
_get_backend: Any = _find("torch.distributed.ProcessGroup._get_backend", _BACKENDS, None)
_register_backend: Any = _find("torch.distributed.ProcessGroup._register_backend", _BACKENDS, None)
_has_backends: Final = None not in (_device_types, _get_backend, _register_backend)


def without_overrides(group: Any) -> Any:
    """Return a plain ``ProcessGroup`` with the backends of a group whose class derives from it."""
    if not _has_backends:
        return group
    plain: Any = dist.ProcessGroup(dist.ProcessGroup.rank(group), dist.ProcessGroup.size(group))  # type: ignore[call-arg]
    for device in _device_types.__get__(group):
        _register_backend(plain, device, dist.ProcessGroup.BackendType.CUSTOM, _get_backend(group, device))
    return plain


# The mesh that a mesh is a slice of; a mesh that is not a slice is its own root.
root_mesh: Any = _find(
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    "slices of device meshes that DistributedDataParallel refuses",
    lambda mesh: mesh,
)
_TorchDDP: Any = torch.nn.parallel.DistributedDataParallel
_find(
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module", "graphs that torch.compile cuts where buckets end"
)


def active_ddp() -> Any:
    """The DistributedDataParallel whose forward pass runs. The compiler reads it from torch's class."""
    return getattr(_TorchDDP, "_active_ddp_module", None)


def set_active_ddp(module: Any) -> None:
    """Set the module whose forward pass begins; at its end, restore the earlier one."""
    _TorchDDP._active_ddp_module = module


_join_config: Any = _find("torch.distributed.algorithms.join._JoinConfig", "Join with DistributedDataParallel", None)


class _JoinsNothing:
    enable = False
    throw_on_early_termination = False


# The configuration of a Join that a module takes part in.
join_config: Any = (lambda joinable: _JoinsNothing) if _join_config is None else operator.attrgetter("_join_config")


# Torch's operators, under their names in profiles and errors

_OPERATOR_NAMES = "torch's operators under their own names in profiles, and their own errors"
find_builtin: Any = _find("torch.jit._builtins._find_builtin", _OPERATOR_NAMES, lambda function: None)
get_operation: Any = _find("torch._C._jit_get_operation", _OPERATOR_NAMES)
qualified_name: Any = _find(
    "torch._jit_internal._qualified_name",
    _OPERATOR_NAMES,
    lambda function: getattr(function, "name", "script function"),
)


# TorchScript, which torch deprecates. Calls, references and gradients don't need it. A missing class is replaced with
# an empty tuple, of which nothing is an instance.


class _NoError(Exception):
    """Stands in for a missing exception class. It is never raised."""


_SCRIPT = "TorchScript: script functions and modules in calls, and calls from them"
ScriptFunction: Any = _find("torch.jit.ScriptFunction", _SCRIPT, ())
ScriptModule: Any = _find("torch.jit.ScriptModule", _SCRIPT, ())
ScriptMethod: Any = _find("torch._C.ScriptMethod", _SCRIPT, ())
ScriptList: Any = _find("torch._C.ScriptList", _SCRIPT, ())
ScriptDict: Any = _find("torch._C.ScriptDict", _SCRIPT, ())
ScriptError: Any = _find("torch.jit.Error", _SCRIPT, _NoError)
# Wraps the C++ module of a C++ method.
wrap_module: Any = _find("torch.jit._recursive.wrap_cpp_module", _SCRIPT)
script: Any = _find("torch.jit.script", _SCRIPT)
save_script: Any = _find("torch.jit.save", _SCRIPT)
load_script: Any = _find("torch.jit.load", _SCRIPT)
ScriptAttribute: Any = _find("torch.jit.Attribute", _SCRIPT)
export: Callable[[_F], _F] = _find("torch.jit.export", _SCRIPT, lambda function: function)
ignore: Callable[[_F], _F] = _find("torch.jit.ignore", _SCRIPT, lambda function: function)
# The compilation unit of everything that Python has compiled.
compilation_unit: Any = _find("torch.jit._state._python_cu", _SCRIPT)
class_of_name: Any = _find("torch.jit._state._name_to_pyclass", _SCRIPT)
# The compiler's types
JitType: Any = _find("torch._C.Type", _SCRIPT, ())
InferredType: Any = _find("torch._C.InferredType", _SCRIPT)
AnyType: Any = _find("torch._C.AnyType", _SCRIPT)
NoneType: Any = _find("torch._C.NoneType", _SCRIPT)
BoolType: Any = _find("torch._C.BoolType", _SCRIPT)
IntType: Any = _find("torch._C.IntType", _SCRIPT)
FloatType: Any = _find("torch._C.FloatType", _SCRIPT)
StringType: Any = _find("torch._C.StringType", _SCRIPT)
TensorType: Any = _find("torch._C.TensorType", _SCRIPT)
ListType: Any = _find("torch._C.ListType", _SCRIPT)
DictType: Any = _find("torch._C.DictType", _SCRIPT)
FutureType: Any = _find("torch._C.FutureType", _SCRIPT)
infer_type: Any = _find("torch._C._jit_try_infer_type", _SCRIPT)
ann_to_type: Any = _find("torch.jit.annotations.ann_to_type", _SCRIPT)
# Compiling
CompilationUnit: Any = _find("torch._C.CompilationUnit", _SCRIPT)
compile_class: Any = _find("torch._C._jit_script_class_compile", _SCRIPT)
class_definition: Any = _find("torch.jit.frontend.get_jit_class_def", _SCRIPT)
class_defaults: Any = _find("torch.jit.frontend.get_default_args_for_class", _SCRIPT)
closure_of: Any = _find("torch._jit_internal.get_closure", _SCRIPT)
no_source: Any = _find("torch._sources.fake_range", _SCRIPT)
inline: Any = _find("torch._C._jit_pass_inline", _SCRIPT)
# Torch carries objects stored here to the threads in which compiled code continues.
stash_in_thread: Any = _find("torch._C._stash_obj_in_tls", _SCRIPT)
stashed_in_thread: Any = _find("torch._C._get_obj_in_tls", _SCRIPT)
is_stashed_in_thread: Any = _find("torch._C._is_key_in_tls", _SCRIPT)
# The fallback stores an object without a context, as carry_context does.
remove_from_thread: Any = _find(
    "torch._C._remove_obj_from_tls",
    "threads of TorchScript that have nothing left of an autograd context that has ended",
    lambda key: stash_in_thread(key, (lambda: None, None)),
)
# The compiler's functions that farprop replaces
_SCRIPT_HOOKS: Final = (
    _find_hook("torch.jit.frontend.parse_def", 1, _SCRIPT),
    _find_hook("torch._jit_internal.createResolutionCallbackFromEnv", 1, _SCRIPT),
    _find_hook("torch.jit.annotations.try_ann_to_type", 3, _SCRIPT),
    _find_hook("torch._C._jit_try_infer_type", 1, _SCRIPT),
    _find_hook("torch.jit._script._set_jit_function_cache", 2, _SCRIPT),
    _find_hook("torch.jit._recursive._add_script_class", 2, _SCRIPT),
    _find_hook("torch.jit._recursive.create_methods_and_properties_from_stubs", 3, _SCRIPT),
    _find_hook("torch.jit.save", 2, _SCRIPT),
    _find_hook("torch.jit.load", 1, _SCRIPT),
)
script_hooks: Final = {hook.name: hook for hook in _SCRIPT_HOOKS if hook is not None}
# All or nothing: with half of the hooks, compiled code would fail with obscure errors.
has_torchscript: Final = _SCRIPT not in missing.values()


# Torch unpickles the objects of object collectives here.
object_hook: Final = _find_hook(
    "torch.distributed.distributed_c10d._tensor_to_object",
    3,
    "restricted jobs that refuse what came in broadcast_object_list and the like",
)


def source_of(compiled: Any) -> Any:
    """The Python function that a script function was compiled from; None if it is unknown."""
    return getattr(compiled, "_torchdynamo_inline", None)


def type_of_module(compiled: Any) -> Any:
    """The compiler's type of a compiled module."""
    return compiled._c._type()


def is_tried(version: str) -> bool:
    """Whether farprop was tested with this version of torch."""
    return any(version == tried or version.startswith(tried + ".") for tried in TRIED)


def _warn() -> None:
    version = str(torch.__version__)
    if is_tried(version) and not missing:
        return
    text = "" if is_tried(version) else f"farprop was tried with torch {_listed(TRIED)}, and this is torch {version}. "
    if missing:
        features: dict[str, list[str]] = {}
        for name, feature in missing.items():
            features.setdefault(feature, []).append(name)
        text += f"Torch {version} lacks names that farprop uses; what needs them is off, or slower:"
        text += "".join(f"\n- {feature} ({', '.join(found)})" for feature, found in features.items())
    else:
        text += "It has all that farprop needs, as far as can be told by names."
    warnings.warn(text, TorchVersionWarning, stacklevel=2)


_warn()
