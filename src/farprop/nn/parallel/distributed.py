"""``DistributedDataParallel``: a module that is trained on many ranks at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from farprop._torch import active_ddp, join_config, preserve_version, set_active_ddp, tree_map_only
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
        output_device: accepted as torch does; outputs stay where the module puts them.
        dim: accepted as torch does.
        broadcast_buffers: give all ranks the buffers of rank 0 before each forward pass.
        init_sync: check that ranks have the same parameters, and give all those of rank 0. Without it that is up to
            you.
        process_group: any group; unset, the default group of ``torch.distributed``.
        bucket_cap_mb: about how many MiB of gradients travel together; unset a third of them, but 25 at most, and 1 for
            the first, so that it leaves early.
        find_unused_parameters: some parameters may not take part in the loss. It costs a walk of the graph and a small
            collective in each iteration.
        check_reduction: accepted as torch does.
        gradient_as_bucket_view: ``.grad`` is memory of a bucket, which saves memory and copies.
        static_graph: every iteration is like the first, which finds out about unused parameters and those whose
            gradients come several times (checkpoints).
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        found = _trained(module)
        self.device = _checked_device(module, found, device_ids)
        self.module = module
        self.device_ids = device_ids or None
        self.process_group = _default_group() if process_group is None else process_group
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._divides_by_all = True
        # Looked up once: it takes as long as a small layer.
        self._has_buffers = any(True for _ in module.buffers())
        if init_sync:
            check_same(self.process_group, [name for name, _ in found], [leaf for _, leaf in found])
            self._broadcast_states(0)
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
        self._broadcast_states(self._highest_rank(is_last))

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
        return self.broadcast_buffers and self.require_forward_param_sync and self._has_buffers

    def _broadcast_buffers(self, has_inputs: bool) -> None:
        rank = self._highest_rank(has_inputs) if join_config(self).enable else 0
        buffers = tuple(self.module.buffers())
        # Graphs of earlier forward passes may have saved them.
        with torch.no_grad(), preserve_version(buffers):
            spread(self.process_group, buffers, rank)

    def _broadcast_states(self, rank: int) -> None:
        with torch.no_grad():
            buffers = self.module.buffers() if self.broadcast_buffers else ()
            spread(self.process_group, (*self.module.parameters(), *buffers), rank)

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


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, leaf) for name, leaf in module.named_parameters() if leaf.requires_grad]


def _bucket_limits(cap_mb: float | None, total: int) -> tuple[int, int]:
    """Bytes of the first bucket, and of the others."""
    if cap_mb is not None:
        return int(cap_mb * _MIB), int(cap_mb * _MIB)
    # What comes last is reduced when backward has nothing left to do, so that should not be most of it.
    return _MIB, min(25 * _MIB, max(_MIB, total // 3))


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise UsageError("There is no process group. Call torch.distributed.init_process_group first, or give one.")
    return group


def _checked_device(
    module: nn.Module, parameters: list[tuple[str, nn.Parameter]], device_ids: list[Any] | None
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
