"""``farprop doctor --store``: all ranks of a job, before it starts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import farprop
from farprop.cli.main import INCOMPLETE, OK, main
from farprop.doctor import job_checks
from farprop.doctor.job import _rounds
from farprop.doctor.job_checks import Host, Pair, Skew
from farprop.doctor.results import Result, Status, failure, ok
from farprop.doctor.speed import Speed
from farprop.errors import RendezvousError
from tests.support import clocks
from tests.support.hosts import Hosts
from tests.support.workers import Cluster, free_port, processes

pytestmark = pytest.mark.one_transport
SECRET = secrets.token_hex(32)


# Between real processes


def _doctor(*words: str, version: str = "") -> tuple[int, str, str]:
    """Run the command in this process; its code, output and errors."""
    if version:
        farprop.__version__ = version
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(["doctor", *words])
    return code, output.getvalue(), errors.getvalue()


def _examine(job: Cluster, ranks: int, size: int, address: str, *words: str, **of_last: str) -> list[Any]:
    runs = [
        job.start(rank, _doctor, "--store", address, "--rank", str(rank), "--world-size", str(size), *words)
        for rank in range(ranks - 1)
    ]
    last = ("--store", address, "--rank", str(ranks - 1), "--world-size", str(size), *words)
    runs.append(job.start(ranks - 1, _doctor, *last, **of_last))
    return [run.result() for run in runs]


def _address() -> str:
    return f"127.0.0.1:{free_port()}"


def _joined(text: str) -> str:
    return " ".join(text.split())


def test_ranks_of_one_host() -> None:
    """Without a secret: they find one. Rank and size come from the launcher's variables."""
    places = [{"RANK": str(rank), "WORLD_SIZE": "3"} for rank in range(3)]
    address = _address()
    with processes(3, env=places) as job:
        runs = [job.start(rank, _doctor, "--store", address, "--json") for rank in range(3)]
        found = [json.loads(run.result()[1]) for run in runs]
        assert [run.result()[0] for run in runs] == [OK] * 3
    assert found[0]["ok"]
    pairs = [(pair["source"], pair["target"]) for pair in found[0]["pairs"]]
    assert sorted(pairs) == [(a, b) for a in range(3) for b in range(3) if a != b]
    assert {pair["speed"]["transport"] for pair in found[0]["pairs"]} == {"shared memory"}
    # On a busy machine one pair may be much slower than the others.
    assert {check["name"] for check in found[0]["checks"] if check["status"] != "ok"} <= {"calls"}
    assert [(pair["source"], pair["target"]) for pair in found[2]["pairs"]] == [(2, 0), (2, 1)]


def test_hosts_that_cannot_reach_each_other(hosts: Hosts) -> None:
    with processes(3, env=hosts.environments([0, 1, 2])) as job:
        address = f"{hosts.address(0)}:{free_port()}"
        ends = _examine(job, 3, 3, address)
        assert [code for code, _, _ in ends] == [OK] * 3, ends
        assert len(re.findall(r"TCP with TLS +\d", ends[0][1])) == 6
        assert "all 3 ranks came, from 3 hosts" in ends[0][1]
        assert ends[1][1] == "Rank 1 is done. Rank 0 shows what was found.\n"
        hosts.part(1, 2)
        ends = _examine(job, 3, 3, f"{hosts.address(0)}:{free_port()}", "--timeout", "10")
        assert [code for code, _, _ in ends] == [INCOMPLETE] * 3
        assert len(re.findall("FAILED", ends[0][1])) == 2
        assert re.search(
            r"failure calls rank 1 \(\S+\) can't call rank 2 \(\S+\) at 192.0.2.3:\d+: ", _joined(ends[0][1])
        )


def test_loopback_between_hosts(hosts: Hosts) -> None:
    """As with a name that /etc/hosts has as 127.0.1.1: rank 0 would listen where nobody reaches it."""
    environments = [dict(one) for one in hosts.environments([0, 1])]
    environments[1]["FARPROP_INTERFACE"] = "lo"
    with processes(2, env=environments) as job:
        ends = _examine(job, 2, 2, f"{hosts.address(0)}:{free_port()}")
    assert [code for code, _, _ in ends] == [INCOMPLETE] * 2
    assert re.search(r"failure addresses rank 1 \(\S+\) listens at 127.0.0.1, where no", _joined(ends[0][1]))


def test_another_secret_is_named() -> None:
    envs = [{"FARPROP_SECRET": SECRET}] * 2 + [{"FARPROP_SECRET": secrets.token_hex(32)}]
    with processes(3, env=envs) as job:
        ends = _examine(job, 3, 3, _address())
    assert [code for code, _, _ in ends] == [INCOMPLETE] * 3
    assert re.search(r"failure secret rank 2 \(\S+\): another secret than rank 0", _joined(ends[0][1]))
    assert re.search(r"failure secret rank 2 \(\S+\) has another secret than all others", _joined(ends[2][1]))
    assert not any(env["FARPROP_SECRET"] in text for env in envs for _, *texts in ends for text in texts)


def test_host_without_a_secret_and_with_other_settings() -> None:
    envs = [{"FARPROP_SECRET": SECRET, "FARPROP_TLS": "0"}, {"FARPROP_RESTRICTED": "1"}]
    with processes(2, env=envs) as job:
        ends = _examine(job, 2, 2, _address(), version="9.9")
    text = _joined(ends[0][1])
    assert [code for code, _, _ in ends] == [INCOMPLETE] * 2
    assert re.search(r"failure secret rank 1 \(\S+\): no secret, and others have one", text)
    assert re.search(r"failure restricted \w+ on rank \d \(\S+\); \w+ on rank \d", text)
    assert re.search(r"failure TLS \w+ on rank \d", text)
    assert re.search(r"failure farprop .*9\.9 on rank 1", text)
    assert re.search(r"warning TLS rank 0 \(\S+\): FARPROP_TLS=0: whoever", text)  # what it found by itself


def test_restricted_job() -> None:
    with processes(2, env={"FARPROP_RESTRICTED": "1"}) as job:
        ends = _examine(job, 2, 2, _address())
    assert [code for code, _, _ in ends] == [OK] * 2, ends
    assert "restricted on everywhere" in _joined(ends[0][1])


def test_weak_secret_of_one_host_is_told_to_all() -> None:
    with processes(2, env=[{"FARPROP_SECRET": SECRET}, {"FARPROP_SECRET": "password"}]) as job:
        ends = _examine(job, 2, 2, _address())
    assert [code for code, _, _ in ends] == [INCOMPLETE] * 2
    for _, text, _ in ends:
        assert re.search(r"failure secret rank 1 \(\S+\): FARPROP_SECRET can be guessed", _joined(text))
        assert "password" not in text


def test_invalid_setting_of_one_host_is_told_to_all() -> None:
    with processes(2, env=[{}, {"FARPROP_TRANSPORT": "pigeon"}]) as job:
        ends = _examine(job, 2, 2, _address())
    assert [code for code, _, _ in ends] == [INCOMPLETE] * 2
    assert re.search(r"failure settings rank 1 \(\S+\): FARPROP_TRANSPORT='pigeon' is not known", _joined(ends[0][1]))


def test_missing_host_is_named() -> None:
    with processes(2) as job:
        ends = _examine(job, 2, 4, _address(), "--timeout", "1")
    for code, text, _ in ends:
        assert code == INCOMPLETE
        assert re.search(r"Ranks 2, 3 of 4 have not come within 1 s. Those that came: rank 0 \(", _joined(text))


def test_missing_rank_0_and_a_rank_that_is_taken() -> None:
    address = _address()
    with processes(2) as job:
        code, _, errors = job.run(0, _doctor, "--store", address, "--rank", "1", "--world-size", "2", "--timeout", "1")
        assert (code, "No store answers at 127.0.0.1" in errors) == (INCOMPLETE, True)
        first = job.start(0, _doctor, "--store", address, "--rank", "0", "--world-size", "3", "--timeout", "2")
        place = ("--store", address, "--rank", "1", "--world-size", "3", "--timeout", "2")
        ends = [job.start(1, _doctor, *place), first]
        third = job.run(1, _doctor, *place)  # in a thread of its own
        texts = [third[2], ends[0].result()[2]]
        assert any("Rank 1 is taken by a process on" in text for text in texts), texts
        first.result()


def _stranger(address: str) -> dict[str, str]:
    """Somebody who can reach the store, and knows no secret: writes nonsense, and reads all that is there."""
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), None, False, timedelta(seconds=20))
    theirs = dist.PrefixStore("farprop_doctor", store)
    told = json.loads(theirs.get("host/0"))
    told |= {"rank": 1, "host": "evil\033]0;mine\007\u202e", "instance": "x", "problems": []}
    theirs.set("host/1", json.dumps(told))
    theirs.set("proof/1", f"{'0' * 64} {json.dumps(told)}")
    theirs.set("skew/1", "[1]")
    return {name: theirs.get(name).decode() for name in ("host/0", "proof/0", "job")}


def test_stranger_in_the_store_learns_nothing_and_steers_nothing() -> None:
    address = _address()
    with processes(2, env=[{"FARPROP_SECRET": SECRET}, {}]) as job:
        rank0 = job.start(0, _doctor, "--store", address, "--rank", "0", "--world-size", "2", "--timeout", "20")
        read = job.run(1, _stranger, address)
        code, text, errors = rank0.result()
    assert not any(SECRET in value for value in read.values())
    assert code == INCOMPLETE
    assert "rank 1 (evil?]0;mine??): another secret than rank 0" in _joined(text)
    assert "rank 1 (evil?]0;mine??) did not tell the time" in _joined(text)
    assert "\033" not in text + errors


_SHIFTED = """
import sys
from tests.support.clocks import use_wall_clock
use_wall_clock(sys.argv.pop(1))
from farprop.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_clock_that_is_ahead(tmp_path: Path) -> None:
    try:
        library = clocks.build(str(tmp_path))
    except clocks.NotAllowedError as error:
        pytest.skip(str(error))
    clock = clocks.WallClock(str(tmp_path / "clock"))
    clock.set(3.5)
    words = ["--store", _address(), "--world-size", "2", "--rank"]
    with processes(1, env={"COLUMNS": "80"}) as job:
        rank0 = job.start(0, _doctor, *words, "0")
        ahead = subprocess.run(
            [sys.executable, "-c", _SHIFTED, clock.path, "doctor", *words, "1"],
            env={**os.environ, "LD_PRELOAD": library, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        code, text, _ = rank0.result()
    assert (code, ahead.returncode) == (OK, OK), text + ahead.stdout + ahead.stderr
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"clocks Compared with rank 0 \(\S+\): rank 1 \(\S+\) is 3\.[45] s ahead", _joined(text)), text


# Comparing


def _host(rank: int, **planted: Any) -> Host:
    return Host(
        **{
            "rank": rank,
            "world_size": 3,
            "instance": str(rank),
            "host": f"node{rank}",
            "pid": 1,
            "place": str(rank),
            "address": f"10.0.0.{rank}",
            "farprop": "1.0",
            "torch": "2.13.0",
            "python": "3.12.1",
            "cores": 4,
            "threads": 4,
            "restricted": False,
            "tls": True,
            "own_certificates": False,
            "secret": "given",
            "problems": [],
            **planted,
        }
    )


HOSTS = [_host(rank) for rank in range(3)]


def _compared(**planted: Any) -> dict[str, Result]:
    return {result.name: result for result in job_checks.compare([*HOSTS[:2], _host(2, **planted)])}


def test_hosts_that_are_alike() -> None:
    assert {result.status for result in _compared().values()} == {Status.OK}


@pytest.mark.parametrize(
    ("name", "status", "text", "planted"),
    [
        ("farprop", "failure", r"1.1 on rank 2 \(node2\); 1.0 on the other 2.", {"farprop": "1.1"}),
        ("torch", "warning", r"2.15.0 on rank 2 \(node2\)", {"torch": "2.15.0+cu130"}),
        ("Python", "warning", r"3.11 on rank 2 \(node2\); 3.12 on", {"python": "3.11.9"}),
        ("world size", "failure", r"4 on rank 2", {"world_size": 4}),
        ("restricted", "failure", r"on on rank 2 \(node2\); off on", {"restricted": True}),
        ("TLS", "failure", r"off on rank 2", {"tls": False}),
        ("TLS", "failure", r"on, own certificates on rank 2", {"own_certificates": True}),
        ("addresses", "failure", r"rank 2 \(node2\) listens at 127.0.1.1", {"address": "127.0.1.1"}),
        ("threads", "warning", r"The 2 workers of node1 use 8 threads .* 4 cores", {"place": "1"}),
    ],
)
def test_hosts_that_differ(name: str, status: str, text: str, planted: dict[str, Any]) -> None:
    found = _compared(**planted)
    assert found[name].status == status
    assert re.search(text, found[name].found), found[name].found
    assert found[name].advice
    assert {other.status for other in found.values() if other.name != name} == {Status.OK}


def test_patches_of_python_are_alike() -> None:
    assert _compared(python="3.12.9", torch="2.13.0+cpu")["Python"].status is Status.OK


@pytest.mark.parametrize(
    ("secrets_", "strangers", "text"),
    [
        (("given", "given", "given"), {1}, r"^rank 1 \(node1\): another secret than rank 0"),
        (("given", "given", "given"), {1, 2}, r"^rank 0 \(node0\) has another secret than all others"),
        (("found", "found", "found"), {1, 2}, r"^No secret is given, and rank 0 \(node0\) shares none with rank 1"),
        (("given", "found", "given"), {1}, r"^rank 1 \(node1\): no secret, and others have one"),
        (("none", "given", "given"), {1, 2}, r"^rank 0 \(node0\): no secret"),
    ],
)
def test_secrets_that_differ(secrets_: tuple[str, ...], strangers: set[int], text: str) -> None:
    hosts = [_host(rank, secret=kind) for rank, kind in enumerate(secrets_)]
    found = job_checks.secrets(hosts[0], hosts, strangers)
    assert found.status is Status.FAILURE
    assert re.search(text, found.found), found.found
    assert job_checks.secrets(hosts[0], hosts, {0}).status is Status.OK


def test_skew_counts_only_beyond_its_error() -> None:
    assert job_checks.clocks(HOSTS, {1: Skew(1.5, 0.001), 2: Skew(0.0, 0.001)}).status is Status.WARNING
    assert job_checks.clocks(HOSTS, {1: Skew(1.5, 0.6), 2: Skew(0.5, 0.001)}).status is Status.OK
    assert "node1) is 2.0 h behind" in job_checks.clocks(HOSTS, {1: Skew(-7200.0, 0.1)}).found
    assert "rank 2 (node2) did not tell the time" in job_checks.clocks(HOSTS, {1: Skew(0.0, 0.1)}).found


def _pairs(**slow: float) -> list[Pair]:
    speed = {"transport": "TCP", "call": 1e-4, "call_p99": 1e-3, "rate": 1e9}
    return [
        Pair(a, b, f"10.0.0.{b}:20000", "yes", Speed(**{**speed, **(slow if (a, b) == (0, 2) else {})}), "")  # type: ignore[arg-type]
        for a in range(3)
        for b in range(3)
        if a != b
    ]


def test_pairs() -> None:
    assert [result.status for result in job_checks.pairs(HOSTS, _pairs())] == ["ok"]
    for slow in ({"call": 0.01}, {"rate": 1e7}):
        (result,) = job_checks.pairs(HOSTS, _pairs(**slow))
        assert result.status is Status.WARNING
        assert "From rank 0 (node0) to rank 2 (node2)" in result.found
    (result,) = job_checks.pairs(HOSTS, _pairs()[:4])
    assert result.status is Status.FAILURE
    assert "2 of 6 pairs have no result: rank 2 (node2)" in result.found


def test_names_are_told_and_no_problem() -> None:
    found = [Pair(0, 1, "10.0.0.1:1", "no", None, "x"), Pair(0, 2, "10.0.0.2:1", "elsewhere", None, "x")]
    result = job_checks.names(HOSTS, found)
    assert result.status is Status.OK
    assert "node1 does not resolve on rank 0 (node0), node2 leads elsewhere on rank 0" in result.found


def test_problems_of_hosts_have_their_names() -> None:
    host = _host(1, problems=[failure("files", "too few", "more"), ok("clock", "fine")])
    assert job_checks.problems([host]) == [failure("files", "rank 1 (node1): too few", "more")]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_rounds_pair_all_with_all(size: int) -> None:
    rounds = [_rounds(rank, size) for rank in range(size)]
    everyone = {(a, b) for a in range(size) for b in range(a + 1, size)}
    assert {pair for one in rounds for pair in one} == everyone
    for rank, one in enumerate(rounds):
        assert len(one) == len(set(one)) == size - 1
        assert all(rank in pair for pair in one)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rank": -1}', "[" * 100_000, "x" * 70_000, '{"rank": 1e400}'])
def test_nonsense_in_the_store_is_an_error(text: str) -> None:
    with pytest.raises(RendezvousError, match="store holds"):
        job_checks.from_json(text.encode(), Host, "host/1")


def test_texts_of_others_are_clean() -> None:
    sent = _host(1, host="a\033[2Jb\nc", problems=[failure("x\007", "y" * 2000)])
    found = job_checks.from_json(job_checks.to_json(sent).encode(), Host, "host/1")
    assert found.host == "a?[2Jb c"
    assert found.problems[0].name == "x?"
    assert len(found.problems[0].found) == 1000
