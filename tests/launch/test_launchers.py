"""What ``init_rpc()`` without arguments learns from launchers: the environments were recorded from real ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farprop.errors import UsageError
from farprop.rpc.launchers import DEFAULT_PORT, Launched, launched, require_launched

RECORDED = tomllib.loads(Path(__file__).with_name("environments.toml").read_text())
ANY = -1  # a port that comes from the job's id


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("Open MPI 4, one host", Launched("mpirun", 1, 3, "127.0.0.1", ANY)),
        ("Open MPI 5, one host", Launched("mpirun", 1, 3, "127.0.0.1", ANY)),
        ("MPICH, one host", Launched("mpirun", 1, 3, "127.0.0.1", DEFAULT_PORT)),
        ("Open MPI 4, two hosts", Launched("mpirun", 3, 4, None, ANY)),
        ("Open MPI 5, two hosts", Launched("mpirun", 3, 4, None, ANY)),
        ("MPICH, two hosts", Launched("mpirun", 3, 4, None, DEFAULT_PORT)),
        ("srun, one node", Launched("srun", 2, 3, "gpu01", ANY)),
        ("srun, three nodes", Launched("srun", 4, 6, "gpu01", ANY)),
        ("batch script", None),
        ("salloc", None),
        ("srun in a batch script", Launched("srun", 5, 6, "gpu01", ANY)),
        ("srun in a batch script, on the second node", Launched("srun", 1, 2, "gpu02", ANY)),
        ("srun with a list of hosts", Launched("srun", 2, 3, None, ANY)),
        ("srun --mpi=pmi2", Launched("srun", 3, 6, "gpu01", ANY)),
        ("srun --mpi=pmix", Launched("srun", 1, 3, "gpu01", ANY)),
        ("srun starts torchrun", Launched("torchrun", 3, 4, "gpu01", 43847)),
        ("Open MPI 4 in a batch script", Launched("mpirun", 3, 6, "gpu01", ANY)),
        ("Open MPI 5 in a batch script", Launched("mpirun", 3, 6, "gpu01", ANY)),
        ("MPICH in a batch script", Launched("mpirun", 3, 6, "gpu01", ANY)),
    ],
)
def test_recorded_environments(title: str, expected: Launched | None) -> None:
    found = launched(RECORDED[title])
    if found is not None and expected is not None and expected.port == ANY:
        assert 20000 <= found.port < 30000
        expected = Launched(expected.launcher, expected.rank, expected.world_size, expected.host, found.port)
    assert found == expected
    if found is not None:
        with_address = {**RECORDED[title], "MASTER_ADDR": "node9", "MASTER_PORT": "12345"}
        assert require_launched(with_address).address() == ("node9", 12345)


def test_every_recorded_environment_is_in_the_table() -> None:
    (mark,) = test_recorded_environments.pytestmark  # type: ignore[attr-defined]
    assert {title for title, _ in mark.args[1]} == set(RECORDED)


def test_all_workers_of_a_step_find_the_same_port_and_two_steps_do_not() -> None:
    env = RECORDED["srun, three nodes"]
    others = {**env, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
    assert require_launched(others).address() == require_launched(env).address()
    assert require_launched({**env, "SLURM_STEP_ID": "1"}).port != require_launched(env).port


@pytest.mark.parametrize(
    ("title", "says"),
    [
        ("Open MPI 5, two hosts", r"mpirun -x MASTER_ADDR=node1"),
        ("MPICH, two hosts", r"mpiexec -genv MASTER_ADDR node1"),
        ("srun with a list of hosts", "the first host in SLURM_HOSTFILE"),
    ],
)
def test_host_of_rank_0_is_never_guessed(title: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        require_launched(RECORDED[title]).address()


BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "1234"}


def test_variables_that_were_set_by_hand() -> None:
    assert launched(BY_HAND) == Launched("the environment", 1, 2, "node1", 1234)
    with pytest.raises(UsageError, match="MASTER_ADDR is not"):
        require_launched({**BY_HAND, "MASTER_ADDR": ""}).address()
    assert require_launched({**BY_HAND, "MASTER_PORT": ""}).port == DEFAULT_PORT


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({}, "none has started this process. Start the program with a launcher, such as `farprop run"),
        ({"RANK": "0"}, "none has started this process"),
        (RECORDED["batch script"], "not started by srun: write `srun python script.py`"),
        (RECORDED["salloc"], "not started by srun"),
        ({**BY_HAND, "RANK": "one"}, "RANK='one' is not a number"),
        ({**BY_HAND, "RANK": ""}, "RANK='' is not a number"),
        ({**BY_HAND, "RANK": "2"}, "RANK=2 must be from 0 to WORLD_SIZE - 1 = 1"),
        ({**BY_HAND, "RANK": "-1"}, "RANK=-1 must be from 0"),
        ({**BY_HAND, "MASTER_PORT": "http"}, "MASTER_PORT='http' is not a number"),
        ({**BY_HAND, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE='' is not a number"),
        ({"PMI_RANK": "3", "PMI_SIZE": "3"}, "PMI_RANK=3 must be"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "The list of nodes '' is empty"),
        ({**RECORDED["srun, one node"], "SLURM_STEP_NODELIST": "gpu[01"}, "not in Slurm's notation"),
    ],
)
def test_nonsense_is_an_error_that_says_what_to_do(env: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        require_launched(env)
    assert says in str(caught.value)


def test_an_address_that_was_given_is_taken_without_a_look_at_the_nodes() -> None:
    env = {**RECORDED["srun, one node"], "SLURM_STEP_NODELIST": "gpu[01", "MASTER_ADDR": "node9"}
    assert require_launched(env).address()[0] == "node9"


_NAMES = sorted({name for env in RECORDED.values() for name in env})


@given(
    st.dictionaries(st.sampled_from(_NAMES), st.one_of(st.integers(-1, 4).map(str), st.text("019a[],-", max_size=6)))
)
def test_any_environment_gives_a_place_none_or_a_usage_error(env: dict[str, str]) -> None:
    try:
        found = launched(env)
    except UsageError:
        return
    assert found is None or (0 <= found.rank < found.world_size and 0 < found.port < 1 << 16)


_PROGRAM = """
import os

import farprop.rpc as rpc

rpc.init_rpc()
me = rpc.get_worker_info()
if me.id == 0:
    pids = [rpc.rpc_sync(rank, os.getpid) for rank in range(3)]
    assert len(set(pids)) == 3 and pids[0] == os.getpid()
    print(me.name, "called", sorted(worker.name for worker in rpc.workers()), flush=True)
rpc.shutdown()
"""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (Debian: openmpi-bin or mpich)")
def test_init_rpc_under_a_real_mpirun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    # Open MPI's: root may start it, and three workers may share two cores, in version 4 and in version 5.
    allowed = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    run = subprocess.run(
        ["mpirun", "-n", "3", sys.executable, str(program)],
        env={**os.environ, **allowed},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "worker0 called ['worker0', 'worker1', 'worker2']"
