"""Defaults, under torch's names."""

from datetime import timedelta

from farprop.runtime import agent

_DEFAULT_RPC_TIMEOUT_SEC: float = agent.DEFAULT_RPC_TIMEOUT
_DEFAULT_INIT_METHOD: str = "env://"
_DEFAULT_NUM_WORKER_THREADS: int = agent.AgentOptions.num_worker_threads
_UNSET_RPC_TIMEOUT: float = -1.0

DEFAULT_RPC_TIMEOUT_SEC: float = _DEFAULT_RPC_TIMEOUT_SEC
DEFAULT_INIT_METHOD: str = _DEFAULT_INIT_METHOD
# 0 disables the timeout: a worker waits for the others as long as they live.
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = _DEFAULT_NUM_WORKER_THREADS
# The longest timeout that a process group accepts; for programs that make a group of their workers.
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
# Means that the call gave no timeout and the process's default applies.
UNSET_RPC_TIMEOUT: float = _UNSET_RPC_TIMEOUT
