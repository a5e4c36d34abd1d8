"""``DistributedDataParallel``: a module that is trained on many ranks at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from farprop._torch import active_ddp, join_config, preserve_version, root_mesh, set_active_ddp, tree_map_only
from farprop.distributed.calling import rank_of, size_of, tensor_of, wait_for
from farprop.errors import UsageError
from farprop.nn.parallel.graph import tensors_in
from farprop.nn.parallel.hooks import CommHook
from farprop.nn.parallel.join import Accompanying
from farprop.nn.parallel.reducer import Reducer
from farprop.nn.parallel.states import check_same, spread
from farprop.runtime.uncompiled import uncompiled, uncompiled_itself

__all__ = ["DistributedDataParallel"]

_MIB = 1024 * 1024


class DistributedDataParallel(nn.Module, Joinable):
    """Trains a module on all ranks of a group: gradients are averaged while the backward pass runs.

    Inside of a distributed autograd context, the averages are in the context; else they are in ``.grad``.

    Args:
        module: the same on every rank.
        device_ids: the one device of the module, to which inputs are moved; None on the CPU.
        output_device: only together with ``device_ids``; outputs stay where the module puts them.
        dim: accepted as torch does.
        broadcast_buffers: give all ranks the buffers of rank 0 at the start and before each forward pass; so it is
            unless you say False.
        init_sync: check that ranks have the same parameters, and give all those of rank 0. Without it that is up to
            you.
        process_group: any group; unset, the default group of ``torch.distributed``.
        bucket_cap_mb: about how many MiB of gradients travel together; unset a third of them, but 25 at most, and 1 for
            the first, so that it leaves early.
        find_unused_parameters: some parameters may not take part in the loss. It costs a walk of the graph and a small
            collective in each iteration.
        check_reduction: does nothing, and torch has deprecated it.
        gradient_as_bucket_view: ``.grad`` is memory of a bucket, which saves memory and copies.
        static_graph: every iteration is like the first, which finds out about unused parameters and those whose
            gradients come several times (checkpoints).
        delay_all_reduce_named_params: refused; torch reduces these parameters later than the others.
        param_to_hook_all_reduce: refused; it belongs to the parameter above.
        mixed_precision: refused; torch computes in a lower precision than that of the parameters.
        device_mesh: a mesh of one dimension, whose group is used; in place of ``process_group``.
        skip_all_reduce_unused_params: refused unless False; unused parameters are reduced with the rest.
        bucket_cap_mb_list: refused; all buckets but the first have the same limit.
        batched_grad_copy: makes no difference: how gradients are copied is up to the reduction.
        forward_sync_buffers: what ``broadcast_buffers`` says, but for the start, when all ranks get the buffers of rank
            0 in any case. If both are given, this one counts.

    Raises:
        UsageError: there is no parameter to train, no group, or an argument that is refused.
        ValueError: devices or the mesh make no sense.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        _refuse(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params or None,
            bucket_cap_mb_list=bucket_cap_mb_list or None,
        )
        if check_reduction:
            warnings.warn("check_reduction is deprecated and does nothing. Leave it out.", FutureWarning, stacklevel=2)
        found = _trained(module)
        self.parameters_to_ignore = _ignored(module)
        self.device = _checked_device(module, found, device_ids, output_device)
        self.device_type = self.device.type
        self.is_multi_device_module = len({leaf.device for _, leaf in found}) > 1
        self.module = module
        self.dim = dim
        self.device_ids = device_ids or None
        self.output_device = (device_ids[0] if output_device is None else output_device) if device_ids else None
        self.process_group = _group_of(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.mixed_precision = None
        self.skip_all_reduce_unused_params = False
        self.batched_grad_copy = batched_grad_copy
        spreads_buffers = True if broadcast_buffers is None else broadcast_buffers
        self.forward_sync_buffers = spreads_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._divides_by_all = True
        # Looked up once: it takes as long as a small layer.
        self._has_buffers = any(True for _ in self._buffers_of_all())
        if init_sync:
            check_same(self.process_group, [name for name, _ in found], [leaf for _, leaf in found])
            self._broadcast_states(0, spreads_buffers if forward_sync_buffers is None else True)
        self._limits = _bucket_limits(bucket_cap_mb, sum(leaf.nbytes for _, leaf in found))
        self.bucket_bytes_cap = self._limits[1]  # the compiler cuts graphs by this
        self._reducer = self._new_reducer()

    def _new_reducer(self) -> Reducer:
        found, sparse = _trained(self.module), _sparse_weights(self.module)
        return Reducer(
            [leaf for _, leaf in found],
            [name for name, _ in found],
            [leaf in sparse for _, leaf in found],
            self.process_group,
            limits=self._limits,
            as_views=self.gradient_as_bucket_view,
            find_unused=self.find_unused_parameters,
            is_static=self.static_graph,
        )

    @uncompiled_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module computes. Its backward pass averages the gradients, unless under :meth:`no_sync`."""
        inputs, kwargs, divisor = self._before_forward(inputs, kwargs)
        before = active_ddp()
        if self.bucket_bytes_cap >= _MIB:  # the compiler can't cut graphs by smaller ones
            set_active_ddp(self)
        try:
            output = self.module(*inputs, **kwargs)
        finally:
            set_active_ddp(before)
        self._after_forward(output, divisor)
        return output

    @uncompiled
    def _before_forward(self, inputs: Any, kwargs: Any) -> tuple[Any, Any, int]:
        """What ranks do together before the module runs: its inputs, and what gradients are to be divided by."""
        has_backward = torch.is_grad_enabled()
        reduces = has_backward and self.require_backward_grad_sync
        if reduces:
            self._reducer.check_finished()
        divisor = self._ranks_at_work()
        if has_backward:
            self._reducer.rebuild_if_due()
        if self._syncs_buffers():
            self._broadcast_buffers(True)
        if join_config(self).enable:
            self._anybody_reduces(reduces)
        if self.device_ids:
            inputs, kwargs = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), (inputs, kwargs)
            )
        return inputs, kwargs, divisor

    @uncompiled
    def _after_forward(self, output: Any, divisor: int) -> None:
        reduces = torch.is_grad_enabled() and self.require_backward_grad_sync
        if reduces:
            self._reducer.expect(tensors_in(output), divisor)
        self.require_forward_param_sync = reduces

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes under it have backward passes that only add to the gradients of this rank.

        The next iteration outside of it averages the sums.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Have buckets reduced by ``hook(state, bucket)``, which returns a future of the reduced buffer.

        The bucket is like torch's ``GradBucket``, and torch's own hooks work. Gradients are not divided before. It can
        be done once, before the first backward pass.
        """
        if not callable(hook):
            raise TypeError(f"Communication hook must be callable, but is a {type(hook).__name__}.")
        self._reducer.set_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """As ``register_comm_hook``, with the hook that torch has for this name."""
        # Here, because it brings in all of torch's hooks, and their packages.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        if comm_hook_type not in hooks:
            raise UsageError(f"There is no builtin hook {comm_hook_type}. Use one of {list(map(str, hooks))}.")
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])

    def _set_static_graph(self) -> None:
        """What ``static_graph=True`` does, for programs that call it later: before the first forward pass."""
        if not self.static_graph:
            self._reducer.make_static()
            self.static_graph = True

    # Uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """``with ddp.join():`` around a loop whose length differs from rank to rank.

        Args:
            divide_by_initial_world_size: divide sums of gradients by all ranks; else by those that still have inputs.
            enable: False switches all of it off.
            throw_on_early_termination: have every rank raise when the first runs out of inputs.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``torch.distributed.algorithms.Join``."""
        self._divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        return Accompanying(self)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    def _ranks_at_work(self) -> int:
        """What sums of gradients are divided by. Inside of a join, ranks that have ended are told of this one."""
        work = Join.notify_join_context(self)
        if work is None or self._divides_by_all:
            return size_of(self.process_group)
        wait_for(work)
        return int(tensor_of(work.get_future().value()).item())

    def _accompany(self) -> None:
        self._reducer.rebuild_if_due()
        if self._syncs_buffers():
            self._broadcast_buffers(False)
        reduces = self._anybody_reduces(False)
        self.require_forward_param_sync = reduces
        if reduces:
            self._reducer.accompany()

    def _take_over(self, is_last: bool) -> None:
        """All ranks are done: they get the module of one that was so last."""
        self._broadcast_states(self._highest_rank(is_last), self.forward_sync_buffers)

    def _anybody_reduces(self, here: bool) -> bool:
        flag = torch.tensor([float(here)], device=self.device)
        dist.all_reduce(flag, group=self.process_group)
        return bool(flag.item())

    def _highest_rank(self, is_candidate: bool) -> int:
        rank = torch.tensor([rank_of(self.process_group) if is_candidate else -1], device=self.device)
        dist.all_reduce(rank, dist.ReduceOp.MAX, group=self.process_group)
        return int(rank.item())

    # States

    def _syncs_buffers(self) -> bool:
        return self.forward_sync_buffers and self.require_forward_param_sync and self._has_buffers

    def _broadcast_buffers(self, has_inputs: bool) -> None:
        rank = self._highest_rank(has_inputs) if join_config(self).enable else 0
        buffers = tuple(self._buffers_of_all())
        # Graphs of earlier forward passes may have saved them.
        with torch.no_grad(), preserve_version(buffers):
            spread(self.process_group, buffers, rank)

    def _broadcast_states(self, rank: int, with_buffers: bool) -> None:
        ignored = self.parameters_to_ignore
        parameters = [leaf for name, leaf in self.module.named_parameters() if name not in ignored]
        with torch.no_grad():
            buffers = self._buffers_of_all() if with_buffers else ()
            spread(self.process_group, (*parameters, *buffers), rank)

    def _buffers_of_all(self) -> Iterator[torch.Tensor]:
        """The buffers that all ranks have in common."""
        return (buffer for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore)

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass gives all ranks the buffers of rank 0."""
        return self._syncs_buffers()

    def _sync_buffers(self) -> None:
        """Give all ranks the buffers of rank 0 now."""
        self._broadcast_buffers(True)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Leave parameters and buffers of a module to each rank. Call it before the module is wrapped.

        Args:
            module: what is to be wrapped.
            params_and_buffers_to_ignore: names as in ``named_parameters`` and ``named_buffers`` of the module.
        """
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters, or pairs of name and parameter, that ranks have in common; of a module or a wrapped one."""
        inner: Any = module.module if isinstance(module, DistributedDataParallel) else module
        ignored = _ignored(inner)
        for name, leaf in inner.named_parameters():
            if name not in ignored:
                yield (name, leaf) if named_params else leaf

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    # Inputs and outputs, for subclasses that call these

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> Any:
        """Inputs on a device, for each replica: a tuple of tuples, and a tuple of dicts."""
        device = torch.device(self.device_type, device_id) if isinstance(device_id, int) else torch.device(device_id)
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), (inputs, kwargs))
        return (moved[0],), (moved[1],)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Inputs cut along ``dim``, a piece for each device."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Outputs of several devices, joined along ``dim`` on one."""
        return gather(outputs, output_device, dim=self.dim)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: all but the group, the reduction, and with it the communication hook."""
        if self.process_group is not dist.group.WORLD:
            raise UsageError(
                "A DistributedDataParallel on another group than the default one can't be copied or pickled, because "
                "a group can't. Copy its module, or save its state_dict()."
            )
        state = self.__dict__.copy()
        del state["process_group"], state["_reducer"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = _default_group()
        self._reducer = self._new_reducer()

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        """The compiler asks for it to cut graphs where buckets end: torch's class, or under compat this one."""
        return active_ddp()


# What to do instead of what is refused.
_REFUSED = {
    "delay_all_reduce_named_params": "Leave it out: they are then reduced with the others, as soon as they can be",
    "param_to_hook_all_reduce": "Leave it out, as delay_all_reduce_named_params has to be",
    "mixed_precision": "Use torch.autocast around the forward pass",
    "skip_all_reduce_unused_params": "Leave it out: find_unused_parameters=True takes care of unused parameters",
    "bucket_cap_mb_list": "Give one size for all buckets, as bucket_cap_mb",
}


def _refuse(**given: Any) -> None:
    """Raise for what torch has and this has not, if it is asked for."""
    for name, value in given.items():
        if value is not None:
            shown = value if isinstance(value, bool | list) else f"a {type(value).__name__}"
            raise UsageError(f"DistributedDataParallel can't take {name}={shown}. {_REFUSED[name]}.")


def _ignored(module: nn.Module) -> set[str]:
    """Names of what each rank has for itself."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    ignored = _ignored(module)
    return [(name, leaf) for name, leaf in module.named_parameters() if leaf.requires_grad and name not in ignored]


def _bucket_limits(cap_mb: float | None, total: int) -> tuple[int, int]:
    """Bytes of the first bucket, and of the others."""
    if cap_mb is not None:
        return int(cap_mb * _MIB), int(cap_mb * _MIB)
    # What comes last is reduced when backward has nothing left to do, so that should not be most of it.
    return _MIB, min(25 * _MIB, max(_MIB, total // 3))


def _group_of(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    if device_mesh is None:
        return _default_group() if process_group is None else process_group
    if process_group is not None:
        raise UsageError("Cannot specify both process_group and device_mesh arguments. Leave one of them out.")
    if device_mesh.ndim != 1:
        raise UsageError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if root_mesh(device_mesh) != device_mesh:
        raise UsageError(
            f"DistributedDataParallel can't take device_mesh={device_mesh}, a slice of a larger mesh, because it can't "
            "take parameters that are split over the rest. Give process_group=device_mesh.get_group() if none are."
        )
    return device_mesh.get_group(mesh_dim=0)  # type: ignore[no-any-return]


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise UsageError("There is no process group. Call torch.distributed.init_process_group first, or give one.")
    return group


def _checked_device(
    module: nn.Module, parameters: list[tuple[str, nn.Parameter]], device_ids: list[Any] | None, output_device: Any
) -> torch.device:
    if not parameters:
        raise UsageError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    for name, leaf in module.named_parameters():
        if isinstance(leaf, nn.parameter.UninitializedParameter):
            raise UsageError(f"{name} is not initialized yet. Run a forward pass of the module before you wrap it.")
    kinds = {leaf.device.type for _, leaf in parameters}
    if len(kinds) > 1:
        raise ValueError(f"The parameters have to be on devices of one type, but are on {sorted(kinds)}.")
    if not device_ids:
        if output_device is not None:
            raise ValueError(
                f"output_device is for modules on the one device that device_ids names, but it is {output_device} and "
                f"device_ids is {device_ids}. Leave it out."
            )
        return parameters[0][1].device
    if len(device_ids) > 1 or kinds == {"cpu"} or len({leaf.device for _, leaf in parameters}) > 1:
        raise ValueError(
            f"device_ids is for modules on one device that is not the CPU, and names it, but it is {device_ids}. "
            "Leave it out."
        )
    return parameters[0][1].device


def _sparse_weights(module: nn.Module) -> set[torch.Tensor]:
    return {
        layer.weight for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }
