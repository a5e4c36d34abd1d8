"""``DistributedDataParallel``: trains a module on many ranks at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from farprop._torch import active_ddp, join_config, preserve_version, set_active_ddp, tree_map_only
from farprop.distributed.interop import size_of, tensor_of, wait_for
from farprop.errors import UsageError
from farprop.nn.parallel.arguments import (
    MIB,
    DeviceLike,
    bucket_limits,
    check_supported,
    checked_device,
    default_group,
    group_of,
    ignored_names,
    sparse_weights,
    trained_parameters,
)
from farprop.nn.parallel.module_sync import any_rank, check_same_parameters, copy_from_rank, highest_rank
from farprop.nn.parallel.reducer import CommHook, Reducer
from farprop.nn.parallel.unused_parameters import tensors_in
from farprop.runtime.dynamo_disable import uncompiled, uncompiled_itself

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.Module, Joinable):
    """Trains a module on all ranks of a group: gradients are averaged while the backward pass runs.

    Inside a distributed autograd context the averages are in the context, otherwise in ``.grad``.

    Args:
        module: The module to train, the same on every rank.
        device_ids: The one device of the module, to which inputs are moved; None on the CPU.
        output_device: Only together with ``device_ids``. Outputs stay where the module puts them.
        dim: The dimension that :meth:`scatter` and :meth:`gather` use.
        broadcast_buffers: Whether all ranks get the buffers of rank 0 at the start and before each forward pass.
            True by default.
        init_sync: Whether to check that all ranks have the same parameters, and to copy those of rank 0 to all. If
            False, you have to make sure that they are the same.
        process_group: Any group. By default the default group of ``torch.distributed``.
        bucket_cap_mb: The size of buckets in MiB. By default a third of all gradients, but at most 25, and 1 for the
            first bucket, so that it is launched early.
        find_unused_parameters: Set it if some parameters may not take part in the loss. It costs a walk of the graph
            and a small collective in each iteration.
        check_reduction: Deprecated in torch; it does nothing.
        gradient_as_bucket_view: Whether ``.grad`` is a view of the bucket's buffer, which saves memory and copies.
        static_graph: Set it if every iteration is like the first. The first iteration then finds unused parameters
            and those whose gradients are accumulated several times (checkpoints).
        delay_all_reduce_named_params: Not supported. In torch it delays the reduction of these parameters.
        param_to_hook_all_reduce: Not supported. In torch it belongs to ``delay_all_reduce_named_params``.
        mixed_precision: Not supported. In torch it computes in a lower precision than that of the parameters.
        device_mesh: A mesh of one dimension, whose group is used instead of ``process_group``.
        skip_all_reduce_unused_params: Only False is supported. Unused parameters are reduced with the others.
        bucket_cap_mb_list: Not supported. All buckets but the first have the same limit.
        batched_grad_copy: Accepted and ignored: the reducer decides how gradients are copied.
        forward_sync_buffers: Like ``broadcast_buffers``, except that at the start all ranks get the buffers of rank 0
            in any case. It takes precedence over ``broadcast_buffers``.

    Raises:
        UsageError: There is no parameter to train, there is no group, or an argument is not supported.
        ValueError: ``device_ids`` or ``output_device`` do not fit the module.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
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
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        check_supported(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params or None,
            bucket_cap_mb_list=bucket_cap_mb_list or None,
        )
        if check_reduction:
            warnings.warn("check_reduction is deprecated and does nothing. Leave it out.", FutureWarning, stacklevel=2)
        trained = trained_parameters(module)
        self.parameters_to_ignore = ignored_names(module)
        self.device = checked_device(module, trained, device_ids, output_device)
        self.device_type = self.device.type
        self.is_multi_device_module = len({leaf.device for _, leaf in trained}) > 1
        self.module = module
        self.dim = dim
        self.device_ids = device_ids or None
        self.output_device = (device_ids[0] if output_device is None else output_device) if device_ids else None
        self.process_group = group_of(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.mixed_precision = None
        self.skip_all_reduce_unused_params = False
        self.batched_grad_copy = batched_grad_copy
        sync_buffers = True if broadcast_buffers is None else broadcast_buffers
        self.forward_sync_buffers = sync_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._divides_by_world_size = True
        # Looked up once: the walk over all modules takes as long as a small layer.
        self._has_buffers = any(True for _ in self._shared_buffers())
        if init_sync:
            names, leaves = zip(*trained, strict=True)
            check_same_parameters(self.process_group, names, leaves)
            self._broadcast_states(0, sync_buffers if forward_sync_buffers is None else True)
        self._limits = bucket_limits(bucket_cap_mb, sum(leaf.nbytes for _, leaf in trained))
        self._may_delay_buckets = bucket_cap_mb is None
        self.bucket_bytes_cap = self._limits[1]  # torch.compile splits graphs by this
        self._reducer = self._new_reducer()

    def _new_reducer(self) -> Reducer:
        trained, sparse = trained_parameters(self.module), sparse_weights(self.module)
        return Reducer(
            [leaf for _, leaf in trained],
            [name for name, _ in trained],
            [leaf in sparse for _, leaf in trained],
            self.process_group,
            limits=self._limits,
            may_delay=self._may_delay_buckets,
            as_views=self.gradient_as_bucket_view,
            find_unused=self.find_unused_parameters,
            is_static=self.static_graph,
        )

    @uncompiled_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. The backward pass averages its gradients, unless inside :meth:`no_sync`.

        Args:
            *inputs: Positional arguments of the module's ``forward``.
            **kwargs: Its keyword arguments.

        Returns:
            What the module returns.

        Raises:
            ReductionError: The last backward pass gave no gradient for some parameters.
        """
        inputs, kwargs, divisor = self._before_forward(inputs, kwargs)
        before = active_ddp()
        if self.bucket_bytes_cap >= MIB:  # torch.compile can't split graphs by smaller buckets
            set_active_ddp(self)
        try:
            output = self.module(*inputs, **kwargs)
        finally:
            set_active_ddp(before)
        self._after_forward(output, divisor)
        return output

    @uncompiled
    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        """Run the collectives before the module; returns its inputs, and the divisor of gradients."""
        has_backward = torch.is_grad_enabled()
        reduces = has_backward and self.require_backward_grad_sync
        if reduces:
            self._reducer.check_finished()
        divisor = self._divisor()
        if has_backward:
            self._reducer.rebuild_if_due()
        if self._syncs_buffers():
            self._broadcast_buffers(True)
        if join_config(self).enable:
            any_rank(self.process_group, self.device, reduces)
        if self.device_ids:
            inputs, kwargs = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), (inputs, kwargs)
            )
        return inputs, kwargs, divisor

    @uncompiled
    def _after_forward(self, output: Any, divisor: int) -> None:
        reduces = torch.is_grad_enabled() and self.require_backward_grad_sync
        if reduces:
            self._reducer.prepare_for_backward(tensors_in(output), divisor)
        self.require_forward_param_sync = reduces

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only: ``with ddp.no_sync():`` around forward passes.

        The next iteration outside the block averages the sums.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce buckets with a communication hook. Torch's own hooks work.

        Call it once, before the first backward pass. Gradients are not divided by the number of ranks before the hook
        gets them.

        Args:
            state: Passed to the hook.
            hook: Called as ``hook(state, bucket)`` with a bucket like torch's ``GradBucket``. It returns a future of
                the reduced buffer.

        Raises:
            TypeError: ``hook`` is not callable.
            UsageError: A hook is registered already.
        """
        if not callable(hook):
            raise TypeError(f"Communication hook must be callable, but is a {type(hook).__name__}.")
        self._reducer.set_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Register the Python hook that corresponds to one of torch's built-in hooks."""
        # Imported here, because it imports all of torch's hooks and their dependencies.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        if comm_hook_type not in hooks:
            raise UsageError(f"There is no builtin hook {comm_hook_type}. Use one of {list(map(str, hooks))}.")
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])

    def _set_static_graph(self) -> None:
        """Do what ``static_graph=True`` does. Call it before the first forward pass."""
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
        """Train with uneven inputs: ``with ddp.join():`` around a loop whose length differs between ranks.

        Ranks without input shadow the remaining collectives of the others. At the end all ranks have the same module.

        Args:
            divide_by_initial_world_size: Whether sums of gradients are divided by the number of all ranks; otherwise
                by the number of ranks that still have inputs.
            enable: Whether to do all this; False makes it a no-op.
            throw_on_early_termination: Whether every rank raises when the first one runs out of inputs.

        Returns:
            A context manager.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook by which ``torch.distributed.algorithms.Join`` shadows this module's collectives.

        Args:
            **kwargs: ``divide_by_initial_world_size``, as for :meth:`join`.

        Returns:
            The hook.
        """
        self._divides_by_world_size = kwargs.get("divide_by_initial_world_size", True)
        return DDPJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives that ``Join`` makes."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group of the collectives that ``Join`` makes."""
        return self.process_group

    def _divisor(self) -> int:
        """What sums of gradients are divided by. Inside ``join`` it also makes ranks without input shadow this one."""
        work = Join.notify_join_context(self)
        if work is None or self._divides_by_world_size:
            return size_of(self.process_group)
        wait_for(work)
        return int(tensor_of(work.get_future().value()).item())

    def _shadow(self) -> None:
        """Take part in the collectives of the other ranks' iteration, without input."""
        self._reducer.rebuild_if_due()
        if self._syncs_buffers():
            self._broadcast_buffers(False)
        reduces = any_rank(self.process_group, self.device, False)
        self.require_forward_param_sync = reduces
        if reduces:
            self._reducer.shadow()

    def _sync_final_state(self, is_last: bool) -> None:
        """Copy the state of a rank that ran out of inputs last to all ranks."""
        rank = highest_rank(self.process_group, self.device, is_last)
        self._broadcast_states(rank, self.forward_sync_buffers)

    # States

    def _syncs_buffers(self) -> bool:
        return self.forward_sync_buffers and self.require_forward_param_sync and self._has_buffers

    def _broadcast_buffers(self, has_inputs: bool) -> None:
        rank = highest_rank(self.process_group, self.device, has_inputs) if join_config(self).enable else 0
        buffers = tuple(self._shared_buffers())
        # Graphs of earlier forward passes may have saved the buffers.
        with torch.no_grad(), preserve_version(buffers):
            copy_from_rank(self.process_group, buffers, rank)

    def _broadcast_states(self, rank: int, with_buffers: bool) -> None:
        ignored = self.parameters_to_ignore
        parameters = [leaf for name, leaf in self.module.named_parameters() if name not in ignored]
        with torch.no_grad():
            buffers = self._shared_buffers() if with_buffers else ()
            copy_from_rank(self.process_group, (*parameters, *buffers), rank)

    def _shared_buffers(self) -> Iterator[torch.Tensor]:
        """The buffers that ranks have in common."""
        return (buffer for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore)

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass copies the buffers of rank 0 to all ranks.

        Returns:
            Whether it does.
        """
        return self._syncs_buffers()

    def _sync_buffers(self) -> None:
        """Copy the buffers of rank 0 to all ranks now."""
        self._broadcast_buffers(True)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Exclude parameters and buffers from synchronisation. Call it before the module is wrapped.

        Args:
            module: The module to be wrapped.
            params_and_buffers_to_ignore: Names as in ``named_parameters`` and ``named_buffers`` of the module.
        """
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """Yield the synchronised parameters of a module, wrapped or not, or (name, parameter) pairs of them."""
        inner: Any = module.module if isinstance(module, DistributedDataParallel) else module
        ignored = ignored_names(inner)
        for name, leaf in inner.named_parameters():
            if name not in ignored:
                yield (name, leaf) if named_params else leaf

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    # Moving inputs and outputs, for subclasses

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: DeviceLike) -> tuple[tuple[Any], tuple[Any]]:
        """Move inputs to a device.

        Args:
            inputs: Positional arguments.
            kwargs: Keyword arguments.
            device_id: The device, or its index.

        Returns:
            A tuple with one tuple of arguments, and a tuple with one dict, as for one replica in torch.
        """
        device = torch.device(self.device_type, device_id) if isinstance(device_id, int) else torch.device(device_id)
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), (inputs, kwargs))
        return (moved[0],), (moved[1],)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Split inputs along ``dim``, one piece for each device.

        Args:
            inputs: Positional arguments.
            kwargs: Keyword arguments.
            device_ids: The devices.

        Returns:
            A tuple of arguments and a dict for each device.
        """
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """Join the outputs of several devices along ``dim``.

        Args:
            outputs: One output for each device.
            output_device: The device of the result.

        Returns:
            The joined outputs.
        """
        return gather(outputs, output_device, dim=self.dim)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles: without the group, the reducer, and the reducer's communication hook."""
        if self.process_group is not dist.group.WORLD:
            raise UsageError(
                "A DistributedDataParallel on another group than the default one can't be copied or pickled, because "
                "the group can't be. Copy its module, or save its state_dict()."
            )
        state = self.__dict__.copy()
        del state["process_group"], state["_reducer"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = default_group()
        self._reducer = self._new_reducer()

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        """The module whose forward pass runs. ``torch.compile`` asks for it, to split graphs where buckets end."""
        return active_ddp()


class DDPJoinHook(JoinHook):
    """Shadows the collectives of ``forward`` and ``backward`` on a rank that has no more input."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def main_hook(self) -> None:
        """Shadow one iteration of the ranks that still have input."""
        self._ddp._shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the same final state."""
        self._ddp._sync_final_state(is_last_joiner)
