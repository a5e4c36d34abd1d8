"""Groups that workers join and leave, under the names of torch's ``rpc._utils``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from farprop.ids import WorkerInfo
from farprop.runtime.current import current_agent

logger = logging.getLogger("farprop.rpc")

_TOKEN = "RpcGroupManagementToken"


@contextmanager
def _group_membership_management(store: dist.Store, name: str, is_join: bool) -> Iterator[None]:
    """Nobody else joins or leaves meanwhile: one worker at a time has the token in the store.

    Farprop's own workers don't need it to join or leave. It is for programs that use it, and works among them.
    """
    mine = f"Token_for_{name}_{'join' if is_join else 'leave'}"
    while (holder := store.compare_set(_TOKEN, "", mine).decode()) != mine:
        try:
            store.wait([holder])  # it is set when its holder is done
        except RuntimeError:
            logger.error("%s waited for %s to let go of the token of the group, and it has not.", mine, holder)
            raise
    yield
    store.set(_TOKEN, "")
    store.set(mine, "Done")


def _update_group_membership(
    worker_info: WorkerInfo,
    my_devices: Sequence[torch.device],
    reverse_device_map: Mapping[str, Mapping[torch.device, torch.device]],
    is_join: bool,
) -> None:
    """Tell this worker's agent that a worker has come or gone."""
    agent: Any = current_agent()
    agent._update_group_membership(worker_info, my_devices, reverse_device_map, is_join)
