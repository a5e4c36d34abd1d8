"""Workers that join and leave a running job: the names of torch's ``rpc._utils``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from farprop.ids import WorkerInfo
from farprop.runtime.agent_registry import current_agent

logger = logging.getLogger(__name__)

_TOKEN = "RpcGroupManagementToken"


@contextmanager
def _group_membership_management(store: dist.Store, name: str, is_join: bool) -> Iterator[None]:
    """Let one worker at a time join or leave: it holds a token in the store meanwhile.

    Farprop's own workers join and leave without it. It is for programs that use it, and excludes only those.
    """
    mine = f"Token_for_{name}_{'join' if is_join else 'leave'}"
    while (holder := store.compare_set(_TOKEN, "", mine).decode()) != mine:
        try:
            store.wait([holder])  # set when the holder is done
        except RuntimeError:
            logger.error("Worker %s: %s waited in vain for %s to release the group's token.", name, mine, holder)
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
    """Tell this worker's agent that a worker has joined or left."""
    agent: Any = current_agent()
    agent._update_group_membership(worker_info, my_devices, reverse_device_map, is_join)
