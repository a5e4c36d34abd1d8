"""What the launcher of this process has said in its environment: torchrun and ``farprop run``, ``srun``, ``mpirun``.

``init_rpc()`` without arguments takes the rank, the number of workers and the store's address from here. Only the
environment is read, so that it can be tested without a cluster.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
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
        if self.host is None and self.launcher != "mpirun":
            raise UsageError("RANK and WORLD_SIZE are set, and MASTER_ADDR is not. Set it to the host of rank 0.")
        if self.host is None:
            raise UsageError(
                f"{self.launcher} has started workers on several hosts and does not say where rank 0 is. Pass its "
                "host's name to all of them, such as: mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ... (Open MPI), "
                "or mpiexec -genv MASTER_ADDR node1 -genv MASTER_PORT 29500 ... (MPICH, Intel MPI)."
            )
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
        name = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "the environment"
        return _checked(name, env, "RANK", "WORLD_SIZE", None, DEFAULT_PORT)
    # MPI before Slurm: in an allocation of Slurm's, mpirun's own processes are tasks of a step with other numbers.
    if "OMPI_COMM_WORLD_RANK" in env:
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
        host, port = _mpi_address(env, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", job)
        return _checked("mpirun", env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", host, port)
    if "PMI_RANK" in env and "PMI_SIZE" in env and not _is_step(env):
        host, port = _mpi_address(env, "PMI_SIZE", "MPI_LOCALNRANKS", None)
        return _checked("mpirun", env, "PMI_RANK", "PMI_SIZE", host, port)
    if _is_step(env):
        return _checked("srun", env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", *_slurm_address(env))
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


def _checked(
    launcher: str, env: Mapping[str, str], rank_name: str, size_name: str, host: str | None, port: int
) -> Launched:
    rank, size = _number(env, rank_name), _number(env, size_name)
    if not 0 <= rank < size:
        raise UsageError(f"{rank_name}={rank} must be from 0 to {size_name} - 1 = {size - 1}. {launcher} sets both.")
    if env.get("MASTER_ADDR"):
        host = env["MASTER_ADDR"]
    if env.get("MASTER_PORT"):
        port = _number(env, "MASTER_PORT")
    return Launched(launcher, rank, size, host, port)


def _number(env: Mapping[str, str], name: str) -> int:
    """A variable that must be a number.

    Raises:
        UsageError: it is not.
    """
    try:
        return int(env[name])
    except ValueError:
        raise UsageError(f"The environment variable {name}={env[name]!r} is not a number.") from None


def _mpi_address(env: Mapping[str, str], size: str, local_size: str, job: str | None) -> tuple[str | None, int]:
    is_one_host = local_size in env and env[local_size] == env.get(size)
    if is_one_host:
        host: str | None = "127.0.0.1"
    elif "SLURM_JOB_NODELIST" in env:
        # mpirun has taken the nodes from Slurm. Not those of a step: it starts one on the other nodes, not on its own.
        host, job = first_host(env["SLURM_JOB_NODELIST"]), job or env.get("SLURM_JOB_ID")
    else:
        host = None
    return host, _port_of(job) if job else DEFAULT_PORT


def _slurm_address(env: Mapping[str, str]) -> tuple[str | None, int]:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    job = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    return first_host(nodes), _port_of(job)


def _port_of(job: str) -> int:
    """A port that all workers of a job find by themselves; jobs of one host rarely find the same one."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
