"""A program that uses names of torch's RPC which are not documented, and prints what it sees.

It is run on torch and on ``farprop.compat``, and has to print the same.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.autograd import profiler_legacy
from torch.distributed.nn.api import remote_module
from torch.distributed.optim import optimizer as optim
from torch.distributed.rpc import _utils, api, backend_registry, constants, internal, options, rref_proxy

FACTS: dict[str, Callable[[], Any]] = {}


def fact(function: Callable[[], Any]) -> Callable[[], Any]:
    FACTS[function.__name__] = function
    return function


def raised(function: Callable[..., Any], *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        # Farprop's errors have types of their own, which are RuntimeErrors.
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return "nothing"


def double(x: Any) -> Any:
    return 2 * x


def divide(x: int, y: int) -> float:
    return x / y


@rpc.functions.async_execution
def later(x: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(3 * x)
    return future


@torch.jit.script
def compiled(x: torch.Tensor, y: int) -> torch.Tensor:
    return x + y


@torch.jit.interface
class Interface:
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        pass


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, n: int) -> int:
        self.count += n
        return self.count


class Odd:
    pass


def agent() -> Any:
    return api._get_current_rpc_agent()


def me() -> Any:
    return agent().get_worker_info()


# The agent


@fact
def agents_are_of_these_kinds() -> Any:
    return [isinstance(agent(), rpc.TensorPipeAgent), isinstance(agent(), rpc.RpcAgent), agent().is_static_group]


@fact
def metrics() -> Any:
    return {key: type(value).__name__ for key, value in sorted(agent().get_metrics().items())}


@fact
def metrics_of_gil_waits() -> Any:
    rpc.enable_gil_profiling(True)
    rpc.rpc_sync("worker", double, args=(1,))
    keys = sorted(agent().get_metrics())
    rpc.enable_gil_profiling(False)
    return keys


@fact
def metrics_of_calls_that_wait() -> Any:
    gates.append(torch.futures.Future())
    waiting = rpc.rpc_async("worker", at_the_gate)
    reached.wait()
    while agent().get_metrics()["agent.server_active_async_calls"] == "0":
        time.sleep(0.002)
    busy = {key: agent().get_metrics()[f"agent.{key}"] for key in ("server_active_async_calls", "client_active_calls")}
    gates.pop().set_result(5)
    return busy, waiting.wait()


gates: list[Any] = []
reached = threading.Event()


@rpc.functions.async_execution
def at_the_gate() -> Any:
    reached.set()
    return gates[0].then(lambda future: future.value())


@fact
def backend_options() -> Any:
    found = agent()._get_backend_options()
    is_one = isinstance(found, rpc._TensorPipeRpcBackendOptionsBase) and isinstance(found, rpc.RpcBackendOptions)
    return is_one, found.num_worker_threads, found.rpc_timeout, found.init_method, found.device_maps, found.devices


@fact
def the_store_is_one() -> Any:
    agent().store.set("a key", "a value")
    return isinstance(agent().store, dist.Store), agent().store.get("a key").decode()


@fact
def device_map_of_oneself() -> Any:
    return agent()._get_device_map(me())


@fact
def waiting_for_all() -> Any:
    future = rpc.rpc_async("worker", double, args=(2,))
    agent().sync()
    agent().join(shutdown=False, timeout=20)
    return future.done(), future.wait()


@fact
def debug_info() -> Any:
    info = rpc._get_debug_info()
    keys = ("num_owner_rrefs", "agent.thread_pool_size", "num_autograd_contexts", "num_current_backward_passes")
    return {key: [type(info[key]).__name__, info[key]] for key in keys}, dist_autograd._get_debug_info()


@fact
def names_of_workers() -> Any:
    return sorted(api._ALL_WORKER_NAMES), rpc._is_tensorpipe_available


# Calls


@fact
def calls_of_operators() -> Any:
    ones = torch.ones(2)
    found = api._invoke_rpc_builtin(me(), "aten::add", -1.0, ones, ones, alpha=3).wait()
    kept = api._invoke_remote_builtin(me(), "aten::mul", -1.0, ones, 5)
    return found.tolist(), kept.to_here().tolist()


@fact
def calls_of_pickles() -> Any:
    pickled, tensors = internal.serialize(internal.PythonUDF(double, (torch.ones(2),), {}))
    waits, wait_tensors = internal.serialize(internal.PythonUDF(later, (2,), {}))
    return (
        api._invoke_rpc_python_udf(me(), pickled, tensors, -1.0, False).wait().tolist(),
        api._invoke_remote_python_udf(me(), pickled, tensors, -1.0, False).to_here().tolist(),
        api._invoke_rpc_python_udf(me(), waits, wait_tensors, -1.0, True).wait(),
        api._invoke_remote_python_udf(me(), waits, wait_tensors, -1.0, True).to_here(),
    )


@fact
def calls_of_script_functions() -> Any:
    name = torch._jit_internal._qualified_name(compiled)
    found = api._invoke_rpc_torchscript("worker", name, (torch.ones(1),), {"y": 2}, -1.0, False).wait()
    kept = api._invoke_remote_torchscript("worker", name, -1.0, False, torch.ones(1), y=4)
    return found.tolist(), kept.to_here().tolist(), raised(
        lambda: api._invoke_rpc_torchscript("worker", "__torch__.no_such", (), {}, -1.0, False).wait()
    )  # fmt: skip


@fact
def calls_one_level_down() -> Any:
    with api._wait_all():
        future = api._invoke_rpc("worker", double, internal.RPCExecMode.SYNC, (4,), rpc_timeout=20)
        gathered = len(api._thread_local_var.future_list)
    return future.wait(), gathered, raised(lambda: api._invoke_rpc("worker", 5, internal.RPCExecMode.SYNC))


# Pickles


@fact
def pickles_and_back() -> Any:
    tensor = torch.arange(3)
    data, table = internal.serialize([tensor, {"a": tensor}, "text"])
    first, second, text = internal.deserialize(data, table)
    return type(data).__name__, len(table), table[0] is tensor, first.tolist(), second["a"] is first, text


@fact
def what_can_not_be_found_is_returned() -> Any:
    data, table = internal.serialize(Odd())
    kept = globals().pop("Odd")
    found = internal.deserialize(data, table)
    globals()["Odd"] = kept
    return type(found).__name__, type(found.__cause__).__name__


class Small(internal._InternalRPCPickler):
    def __init__(self) -> None:
        super().__init__()
        self._register_reducer(Odd, lambda odd: (str, ("first",)))
        self._register_reducer(Odd, lambda odd: (str, ("second",)))
        self._dispatch_table[complex] = lambda number: (str, ("a number",))


@fact
def picklers_of_ones_own() -> Any:
    with api._use_rpc_pickler(Small()):
        called = rpc.rpc_sync("worker", double, args=([Odd(), 1j],))
        awaited = rpc.rpc_async("worker", later, args=((1j,),)).wait()
        operator = rpc.rpc_sync("worker", torch.add, args=(torch.ones(1), 1)).tolist()
        kept = rpc.remote("worker", double, args=([1j],)).to_here()
        rref = rpc.RRef(Counter())
        passed = rpc.rpc_sync("worker", rref_proxy._local_invoke, args=(rref, "add", (2,), {}))
    return called, awaited, operator, kept, passed, rref.local_value().count


@fact
def reducers_for_all_calls() -> Any:
    internal._internal_rpc_pickler._register_reducer(Registered, lambda obj: (Registered, (obj.n + 1,)))
    # Once for the arguments, and once for the result.
    return rpc.rpc_sync("worker", same, args=(Registered(1),)).n


class Registered:
    def __init__(self, n: int) -> None:
        self.n = n


def same(x: Any) -> Any:
    return x


@fact
def reducers_that_send_references() -> Any:
    internal._internal_rpc_pickler._register_reducer(Holder, lambda obj: (_held, (obj.rref._serialize(),)))
    return rpc.rpc_sync("worker", look_inside, args=(Holder(rpc.RRef(7)),))


class Holder:
    def __init__(self, rref: Any) -> None:
        self.rref = rref


def _held(data: Any) -> Holder:
    return Holder(rpc.PyRRef._deserialize(data))


def look_inside(holder: Holder) -> Any:
    return holder.rref.to_here()


@fact
def failures_as_values() -> Any:
    good = internal._run_function(internal.PythonUDF(divide, (6, 3), {}))
    bad = internal._run_function(internal.PythonUDF(divide, (6, 0), {}))
    missing = internal._run_function(AttributeError("gone"))
    return (
        good,
        [bad._fields, bad.exception_type.__name__, "division by zero" in bad.msg, "WorkerInfo(id=0" in bad.msg],
        missing.exception_type.__name__,
        [raised(internal._handle_exception, value) for value in (good, bad)],
        raised(internal._handle_exception, internal.RemoteException("text", UnicodeDecodeError)),
    )


# References


@fact
def proxies() -> Any:
    rref = rpc.RRef(Counter())
    proxy = rref_proxy.RRefProxy(rref, rpc.rpc_sync)
    return (
        proxy.add(3),
        rref_proxy.RRefProxy(rref, rpc.rpc_async, timeout=20).add(4).wait(),
        rref_proxy.RRefProxy(rref, rpc.remote).add(5).to_here(),
        rref_proxy._invoke_rpc(rref, rpc.rpc_sync, "add", 20.0, 6),
        rref_proxy._local_invoke(rref, "add", (1,), {}),
        [proxy.rref is rref, proxy.rpc_timeout],
    )


@fact
def types_of_values() -> Any:
    rref = rpc.RRef(5)
    return (
        api._rref_typeof_on_owner(rref).__name__,
        api._rref_typeof_on_owner(rref, blocking=False).wait().__name__,
        api._rref_typeof_on_user(rref).__name__,
        api._rref_typeof_on_user(rref, 20.0, False).wait().__name__,
    )


@fact
def methods_of_references() -> Any:
    rref = rpc.RRef(5)
    return api.method_factory("owner_name", "text")(rref), rpc.new_method(rref), rpc.api.PyRRef is rpc.PyRRef


@fact
def profiling_futures() -> Any:
    rref = rpc.remote("worker", double, args=(2,))
    done: torch.futures.Future[int] = torch.futures.Future()
    done.set_result(9)
    rref._set_profiling_future(done)
    return rref._get_profiling_future().wait(), rref.to_here()


@fact
def whether_to_profile() -> Any:
    with profiler_legacy.profile():
        under = api._get_should_profile()
    with torch.profiler.profile():
        newer = api._get_should_profile()
    return under, newer, api._get_should_profile()


# Starting


@fact
def arguments_of_a_start() -> Any:
    right = (backend_registry.BackendType.TENSORPIPE, dist.HashStore(), "a", 0, 1, rpc.TensorPipeRpcBackendOptions())
    wrong = [(*right[:place], Odd(), *right[place + 1 :]) for place in range(6)]
    return [raised(rpc._validate_rpc_args, *arguments) for arguments in (right, *wrong)]


@fact
def tokens_of_a_group() -> Any:
    store, order = dist.HashStore(), []
    inside, go_on = threading.Event(), threading.Event()
    store.set("RpcGroupManagementToken", "")

    def first() -> None:
        with _utils._group_membership_management(store, "a", True):
            inside.set()
            go_on.wait()
            order.append("a")

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    held = store.get("RpcGroupManagementToken").decode()
    go_on.set()
    with _utils._group_membership_management(store, "b", False):
        order.append("b")
    thread.join()
    return held, order, store.get("Token_for_b_leave").decode(), store.get("RpcGroupManagementToken").decode()


@fact
def device_maps() -> Any:
    cuda = [torch.device("cuda", index) for index in range(3)]
    maps = {"a": {"b": {cuda[1]: cuda[0], cuda[0]: cuda[2]}}, "b": {}}
    counts, devices = {"a": 3, "b": 3}, {"a": [], "b": []}
    registry = backend_registry
    reverse = registry._create_reverse_mapping("b", ["a", "b"], maps)
    return (
        sorted((name, str(sorted(map(str, one.items())))) for name, one in reverse.items()),
        [str(device) for device in registry._create_device_list([], maps["a"], reverse)],
        [str(device) for device in registry._create_device_list([cuda[2], cuda[0]], maps["a"], reverse)],
        [registry._tensorpipe_validate_devices(cuda, count) for count in (2, 3)],
        raised(registry._validate_device_maps, ["a", "b"], counts, maps, devices),
        raised(registry._validate_device_maps, ["a"], counts, maps, devices),
        raised(registry._validate_device_maps, ["a"], counts, maps, devices, False),
        raised(registry._validate_device_maps, ["a", "b"], {"a": 3, "b": 1}, maps, devices),
        registry._get_device_infos(),
        [repr(rpc.BackendType.TENSORPIPE), registry._backend_type_repr(rpc.BackendType.TENSORPIPE)],
    )


@fact
def options_of_the_backend() -> Any:
    made = backend_registry._tensorpipe_construct_rpc_backend_options_handler(5.0, "env://", 3, unknown=1)
    base = rpc._TensorPipeRpcBackendOptionsBase(num_worker_threads=2, rpc_timeout=7.0)
    base._set_device_map("b", {torch.device("cuda:0"): torch.device("cuda:1")})
    made.set_device_map("b", {"cuda:0": "cuda:1"})
    return (
        [made.num_worker_threads, made.rpc_timeout, made.init_method, str(made.device_maps)],
        [base.num_worker_threads, base.rpc_timeout, base.init_method, str(base.device_maps), base.devices],
        raised(made.set_device_map, "b", {"cuda:0": "cuda:2"}),
        [str(options._to_device_map({"cuda:0": "cuda:1"})), str(options._to_device_list(["cuda:1", "cuda:0"]))],
        raised(options._to_device_map, {"cuda:0": "cuda:1", "cuda:2": "cuda:1"}),
    )


@fact
def all_constants() -> Any:
    return {
        name: str(value) for name, value in sorted(vars(constants).items()) if "DEFAULT" in name or "UNSET_RPC" in name
    }


# Optimizers and modules


@fact
def local_optimizers() -> Any:
    weight = torch.ones(2, requires_grad=True)
    local = optim._LocalOptimizer(torch.optim.SGD, [rpc.RRef(weight)], lr=0.5)
    made = optim._new_local_optimizer(torch.optim.SGD, [rpc.RRef(weight)], lr=0.25)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [weight.sum()])
        local.step(context_id)
        optim._local_optimizer_step(made, context_id)
    return weight.tolist(), type(local.optim).__name__, local.global_lock is made.local_value().global_lock


@fact
def waits_for_futures() -> Any:
    good = [rpc.rpc_async("worker", double, args=(n,)) for n in (1, 2)]
    bad = [rpc.rpc_async("worker", divide, args=(1, 0)), *good]
    return optim._wait_for_all(good), raised(optim._wait_for_all, bad) != "nothing"


@fact
def helpers_of_remote_modules() -> Any:
    linear = remote_module._create_module(torch.nn.Linear, (2, 1), {}, "cpu")
    rref = remote_module._create_module_with_interface(torch.nn.Linear, (2, 1), {}, "cpu", None)
    scripted = remote_module._create_module_with_interface(torch.nn.ReLU, (), {}, "cpu", Interface)
    receiver, arguments = remote_module._recursive_script_module_reducer(torch.jit.script(linear))
    return (
        type(linear).__name__,
        [parameter.to_here().numel() for parameter in remote_module._param_rrefs(rref, True)],
        [scripted.is_owner(), "script" in str(type(scripted.local_value())).lower()],
        receiver(*arguments)(torch.zeros(1, 2)).shape,
        raised(remote_module._create_module, dict, (), {}, "cpu"),
        raised(remote_module._raise_not_supported, "apply"),
        remote_module._instantiate_template(Interface, False),
    )


@fact
def remote_modules_and_their_attributes() -> Any:
    made = remote_module.RemoteModule("worker/cpu", torch.nn.Linear, (2, 1))
    before = raised(made._check_attribute_picklability)
    made.mine = 1
    bare = object.__new__(remote_module.RemoteModule)
    torch.nn.Module.__init__(bare)
    return (
        before,
        raised(made._check_attribute_picklability),
        [bare._prepare_init("worker/cpu"), bare.on, bare.device],
        raised(made.register_forward_hook, double, True),
        raised(made.register_forward_hook),
        raised(made.modules, 1, 2),
    )


# Ending; the last


@fact
def ends() -> Any:
    return (
        rpc._set_profiler_node_id(3),
        rpc._delete_all_user_and_unforked_owner_rrefs(),
        rpc._destroy_rref_context(True),
        # The last: torch crashes if one of its threads handles a message during this.
        rpc._cleanup_python_rpc_handler(),
    )


if __name__ == "__main__":
    how = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=30, init_method=f"file://{sys.argv[1]}")
    rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=how)
    try:
        for name, function in FACTS.items():
            print(json.dumps({name: function()}, sort_keys=True))
    finally:
        rpc.shutdown()
