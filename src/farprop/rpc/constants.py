"""Defaults, under the names that torch gives them."""

from datetime import timedelta

from farprop.runtime.agent import UNSET_TIMEOUT, AgentOptions

_DEFAULT_RPC_TIMEOUT_SEC: float = AgentOptions.rpc_timeout
_DEFAULT_INIT_METHOD: str = "env://"
_DEFAULT_NUM_WORKER_THREADS: int = AgentOptions.num_worker_threads
_UNSET_RPC_TIMEOUT: float = UNSET_TIMEOUT

DEFAULT_RPC_TIMEOUT_SEC: float = _DEFAULT_RPC_TIMEOUT_SEC
DEFAULT_INIT_METHOD: str = _DEFAULT_INIT_METHOD
# 0: a worker may wait for the others as long as they live.
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = _DEFAULT_NUM_WORKER_THREADS
# The longest that a process group takes; for programs that make a group for their workers.
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
# Says that a call gave no timeout, and the process's default holds.
UNSET_RPC_TIMEOUT: float = _UNSET_RPC_TIMEOUT
