"""Defaults, under the names that torch gives them."""

from farprop.runtime.agent import UNSET_TIMEOUT, AgentOptions

DEFAULT_RPC_TIMEOUT_SEC: float = AgentOptions.rpc_timeout
DEFAULT_INIT_METHOD: str = "env://"
# 0: a worker may wait for the others as long as they live.
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = AgentOptions.num_worker_threads
# Says that a call gave no timeout, and the process's default holds.
UNSET_RPC_TIMEOUT: float = UNSET_TIMEOUT
