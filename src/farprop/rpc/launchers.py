"""What the launcher of this process has said in its environment: torchrun and ``farprop run``, ``srun``, ``mpirun``.

``init_rpc()`` without arguments takes the rank, the number of workers and the store's address from here. Only the
environment is read, so that it can be tested without a cluster.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from farprop.errors import UsageError
from farprop.rpc.slurm import first_host

DEFAULT_PORT = 29500  # torchrun's
# Below the ports that Linux gives to connections by itself, above those that services like to use.
_FIRST_PORT, _PORTS = 20000, 10000

_START = (
    "Start the program with a launcher, such as `farprop run -n 2 script.py`, torchrun, srun or mpirun; or pass name, "
    "rank and world_size to init_rpc."
)
TORCHRUN, BY_HAND, MPIRUN, SRUN = "torchrun", "the environment", "mpirun", "srun"
_NO_HOST = {
    TORCHRUN: "torchrun has started this process, and MASTER_ADDR is not set. Let it stay as torchrun has set it.",
    BY_HAND: "RANK and WORLD_SIZE are set, and MASTER_ADDR is not. Set it to the host of rank 0.",
    MPIRUN: (
        "mpirun has started workers on several hosts and does not say where rank 0 is. Pass its host's name to all of "
        "them, such as: mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ... (Open MPI), or mpiexec -genv MASTER_ADDR "
        "node1 -genv MASTER_PORT 29500 ... (MPICH, Intel MPI)."
    ),
    SRUN: (
        "srun has started workers with --distribution=arbitrary and does not say where rank 0 is. Set MASTER_ADDR to "
        "the first host in SLURM_HOSTFILE."
    ),
}


@dataclass(frozen=True)
class Launched:
    """This process's place in the job that a launcher has started.

    ``host`` and ``port`` are the store's address: rank 0 opens it, unless the launcher does. ``host`` is None where the
    launcher does not say it.
    """

    launcher: str
    rank: int
    world_size: int
    host: str | None
    port: int

    def address(self) -> tuple[str, int]:
        """The store's address.

        Raises:
            UsageError: the launcher has not said on which host rank 0 is.
        """
        if self.host is None:
            raise UsageError(_NO_HOST[self.launcher])
        return self.host, self.port


def launched(env: Mapping[str, str] = os.environ) -> Launched | None:
    """What the launcher of this process has said; None if no launcher that we know has started it.

    Args:
        env: the environment.

    Raises:
        UsageError: a variable is not a number, or the rank is not below the number of workers.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        # torchrun, farprop run, Kubeflow, or set by hand. It is first: torchrun may have been started by srun.
        name = TORCHRUN if "TORCHELASTIC_RUN_ID" in env else BY_HAND
        return _launched(name, env, "RANK", "WORLD_SIZE", lambda: None, DEFAULT_PORT)
    # MPI before Slurm: in an allocation of Slurm's, mpirun's own processes are tasks of a step with other numbers.
    if "OMPI_COMM_WORLD_RANK" in env:
        return _mpirun(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if "PMI_RANK" in env and "PMI_SIZE" in env and not _is_from_srun(env):
        return _mpirun(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
    if _is_step(env):
        port = _port_of(f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}")
        return _launched(SRUN, env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", lambda: _first_of_step(env), port)
    return None


def require_launched(env: Mapping[str, str] = os.environ) -> Launched:
    """As :func:`launched`, for a program that needs it.

    Raises:
        UsageError: no launcher has started this process; the text says what to do.
    """
    found = launched(env)
    if found is None:
        reason = ""
        if "SLURM_JOB_ID" in env:
            reason = " This process is in a job of Slurm's, but not started by srun: write `srun python script.py`."
        raise UsageError(
            f"init_rpc() without a name needs a launcher, and none has started this process.{reason} {_START}"
        )
    return found


def _is_step(env: Mapping[str, str]) -> bool:
    """Whether srun has started this process. A batch script has a SLURM_PROCID, too, and is no task of a step."""
    return "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env


def _is_from_srun(env: Mapping[str, str]) -> bool:
    """Whether PMI's numbers are srun's own (``srun --mpi=pmi2``). MPICH's mpirun starts its daemons with srun, one a
    node: below them Slurm's numbers are those of the daemons.
    """
    numbers = (env["PMI_RANK"], env["PMI_SIZE"])
    return numbers == (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS"))


def _launched(
    launcher: str,
    env: Mapping[str, str],
    rank_name: str,
    size_name: str,
    find_host: Callable[[], str | None],
    port: int,
) -> Launched:
    rank, size = _number(env, rank_name), _number(env, size_name)
    if not 0 <= rank < size:
        raise UsageError(f"{rank_name}={rank} must be from 0 to {size_name} - 1 = {size - 1}. {launcher} sets both.")
    if env.get("MASTER_PORT"):
        port = _number(env, "MASTER_PORT")
    if not 0 < port < 1 << 16:
        raise UsageError(f"MASTER_PORT={port} is not a port: it must be from 1 to 65535.")
    return Launched(launcher, rank, size, env.get("MASTER_ADDR") or find_host(), port)


def _mpirun(env: Mapping[str, str], rank_name: str, size_name: str, local_size_name: str) -> Launched:
    is_one_host = env.get(local_size_name) == env.get(size_name)
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("SLURM_JOB_ID")

    def find_host() -> str | None:
        if is_one_host:
            return "127.0.0.1"
        # Below Slurm, mpirun has taken the nodes from it, and starts with the first one.
        nodes = env.get("SLURM_JOB_NODELIST")
        return first_host(nodes) if nodes else None

    return _launched(MPIRUN, env, rank_name, size_name, find_host, _port_of(job) if job else DEFAULT_PORT)


def _first_of_step(env: Mapping[str, str]) -> str | None:
    if env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        return None  # the lists of nodes are sorted, and rank 0 is where the user's own list begins
    return first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "")


def _number(env: Mapping[str, str], name: str) -> int:
    """A variable that must be a number.

    Raises:
        UsageError: it is not.
    """
    text = env.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"The environment variable {name}={text!r} is not a number.") from None


def _port_of(job: str) -> int:
    """A port that all workers of a job find by themselves; jobs of one host rarely find the same one."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
