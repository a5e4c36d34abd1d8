"""The agent of this process. There is at most one."""

from __future__ import annotations

import atexit
import os
import threading

from farprop.errors import UsageError
from farprop.runtime import profiling
from farprop.runtime.agent import Agent

_lock = threading.Lock()
_agent: Agent | None = None

NOT_INITIALISED = (
    "RPC has not been initialized: Current RPC agent is not set! Did you initialize the RPC framework? "
    "Call farprop.rpc.init_rpc first."
)


def current_agent() -> Agent:
    agent = _agent
    if agent is None:
        raise UsageError(NOT_INITIALISED)
    return agent


def is_agent_set() -> bool:
    return _agent is not None


def set_agent(agent: Agent) -> None:
    global _agent
    with _lock:
        if _agent is not None:
            raise UsageError("RPC is already initialized. Call farprop.rpc.shutdown before init_rpc.")
        _agent = agent
    profiling.own_node_id = agent.get_worker_info().id


def reset_agent() -> None:
    global _agent
    with _lock:
        _agent = None
    profiling.own_node_id = -1


@atexit.register
def _close_at_exit() -> None:
    """A program that ends without shutdown, or with calls still open, must neither hang nor crash."""
    agent = _agent
    close = getattr(agent, "close", None)  # a registered backend's agent need not be ours
    if close is not None:
        close(0.2)


def _after_fork_in_child() -> None:
    """A forked child is not a worker: it must not answer on its parent's connections, nor keep them open."""
    global _agent, _lock
    _lock = threading.Lock()
    agent, _agent = _agent, None
    abandon = getattr(agent, "abandon", None)
    if abandon is not None:
        abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
