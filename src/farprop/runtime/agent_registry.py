"""The agent of this process. There is at most one."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

from farprop.errors import UsageError
from farprop.locks import make_lock
from farprop.runtime import first_failure, profiling

if TYPE_CHECKING:
    from farprop.runtime.agent import Agent

_lock = make_lock("agent_registry")
installed: Agent | None = None  # None: RPC is not initialized

NOT_INITIALISED = (
    "RPC has not been initialized: Current RPC agent is not set! Did you initialize the RPC framework? "
    "Call farprop.rpc.init_rpc first."
)


def current_agent() -> Agent:
    agent = installed
    if agent is None:
        raise UsageError(NOT_INITIALISED)
    return agent


def is_agent_set() -> bool:
    return installed is not None


def set_agent(agent: Agent) -> None:
    global installed
    with _lock:
        if installed is not None:
            raise UsageError("RPC is already initialized. Call farprop.rpc.shutdown before init_rpc.")
        installed = agent
    profiling.own_node_id = agent.get_worker_info().id
    first_failure.watch_end()


def reset_agent() -> None:
    global installed
    with _lock:
        installed = None
    profiling.own_node_id = -1


@atexit.register
def _close_at_exit() -> None:
    """Close the agent at exit: a program that ends without shutdown must neither hang nor crash."""
    agent = installed
    close = getattr(agent, "close", None)  # a registered backend's agent need not be ours
    if close is not None:
        error = first_failure.uncaught()
        if error is not None:
            _tell_failure(error)
        close(0.2)


@first_failure.at_failing_end
def _tell_failure(error: BaseException) -> None:
    tell = getattr(installed, "tell_failure", None)
    if tell is not None:
        tell(error)


def _after_fork_in_child() -> None:
    """Drop the agent in a forked child, which must neither use its parent's connections nor keep them open."""
    global installed, _lock
    _lock = make_lock("agent_registry")
    agent, installed = installed, None
    abandon = getattr(agent, "abandon", None)
    if abandon is not None:
        abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
