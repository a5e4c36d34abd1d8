"""Each verdict of ``farprop doctor`` about one host, by facts that the test plants."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import farprop.rpc as rpc
from farprop.cli.main import INCOMPLETE, main
from farprop.config import GIB, MIB, Settings
from farprop.doctor import checks, facts
from farprop.doctor.facts import Clock, Cores, Files, Memory, Network, Ports, Secrecy, Tls, Variables, Versions
from farprop.doctor.results import Result, Status
from farprop.doctor.speed import Speed
from farprop.transport import sockets
from tests.support.certificate_authority import CertificateAuthority
from tests.support.workers import cluster

KNOWN = frozenset({"FARPROP_SECRET", "FARPROP_TLS"})
NETWORK = {"interface": None, "address": "10.0.0.5", "problem": "", "host": "node1", "resolved": ("10.0.0.5",)}
SECRECY = {"source": "", "is_given_twice": False, "insecure": False, "problem": ""}


def _variables(*given: str) -> Result:
    return checks.variables(Variables(frozenset(given), KNOWN, ""))


def _network(**planted: Any) -> Result:
    return checks.network(Network(**{**NETWORK, **planted}))


def _secrecy(**planted: Any) -> Result:
    return checks.secrecy(Secrecy(**{**SECRECY, **planted}))


GOOD = [
    checks.versions(Versions("1", "2.13.0", "3.12", True, {})),
    _variables("FARPROP_TLS"),
    checks.cores(Cores(8, None, "4", 4)),
    checks.cores(Cores(8, None, None, 8)),
    _network(),
    _network(address="127.0.0.1", resolved=()),
    checks.ports(Ports(None, 1, 1, "")),
    checks.ports(Ports((20000, 20003), 4, 2, "")),
    checks.memory(Memory("", 8 * GIB, (8 * GIB, 8 * GIB))),
    checks.memory(Memory("", 8 * GIB, None)),
    _secrecy(),
    _secrecy(source="FARPROP_SECRET_FILE"),
    checks.tls(Tls(True, None, "", 0.0)),
    checks.tls(Tls(True, "w.crt", "", 30 * 86400.0)),
    checks.files(Files(1024, 4096, 20), workers=200),
    checks.clock(Clock(2.0, 1.0)),
    *checks.calls([Speed("shared memory", 1e-4, 1e-3, 1e9)]),
]


@pytest.mark.parametrize("result", GOOD, ids=lambda result: result.name)
def test_what_is_well(result: Result) -> None:
    assert result.status is Status.OK
    assert not result.advice


WARNINGS = [
    (checks.versions(Versions("1", "2.99.0", "3.12", False, {})), "not tried with this torch"),
    (checks.versions(Versions("1", "2.13.0", "3.12", True, {"torch._C.x": "DDP"})), "lacks torch._C.x.*DDP"),
    (_variables("FARPROP_ANYTHING_ELSE"), "does not know FARPROP_ANYTHING_ELSE, and ignores it"),
    (checks.cores(Cores(2, None, "8", 8)), "2; a worker uses 8 threads"),
    (checks.cores(Cores(8, 1.5, None, 8)), "control group may use 1.5"),
    (_network(resolved=("127.0.1.1",)), "its name resolves to 127.0.1.1 here"),
    (_network(resolved=()), "its name does not resolve"),
    (_network(interface="lo", address="127.0.0.1"), "FARPROP_INTERFACE=lo is 127.0.0.1: only workers of this host"),
    (checks.memory(Memory("Too large", 8 * GIB, None)), "No shared memory .* Too large"),
    (checks.memory(Memory("", 100 * MIB, None)), "100 MiB of memory"),
    (checks.memory(Memory("", 8 * GIB, (64 * MIB, 60 * MIB))), "/dev/shm has 64 MiB, 60 MiB free"),
    (_secrecy(insecure=True), "FARPROP_INSECURE=1: whoever can reach"),
    (_secrecy(source="FARPROP_SECRET", is_given_twice=True), "FARPROP_SECRET_FILE has no effect"),
    (_secrecy(source="FARPROP_SECRET", insecure=True), "FARPROP_INSECURE has no effect"),
    (checks.tls(Tls(False, None, "", 0.0)), "FARPROP_TLS=0: whoever can read"),
    (checks.tls(Tls(False, "w.crt", "", 0.0)), "FARPROP_TLS_CERT has no effect"),
    (checks.tls(Tls(True, "w.crt", "", 2.5 * 86400)), "w.crt ends in 2 days"),
    (checks.clock(Clock(1.0, 7201.0)), "behind: farprop was installed 2.0 h later than now"),
    (checks.calls([Speed("TCP", 0.02, 0.03, 1e6)], busy=1.9, cores=2)[0], "TCP: a call takes 20.0 ms"),
]


@pytest.mark.parametrize(("result", "found"), WARNINGS, ids=lambda one: one.name if isinstance(one, Result) else "")
def test_warnings(result: Result, found: str) -> None:
    assert result.status is Status.WARNING
    _check_text(result, found)
    assert result.advice


FAILURES = [
    (_variables("FARPROP_SECERT", "FARPROP_TLS"), r"FARPROP_SECERT \(do you mean FARPROP_SECRET\?\)"),
    (checks.variables(Variables(frozenset(), KNOWN, "FARPROP_TLS='x' is not known")), "FARPROP_TLS='x'"),
    (checks.cores(Cores(2, None, "two", 2)), "OMP_NUM_THREADS='two' is no number"),
    (_network(problem="FARPROP_INTERFACE='eth7' is neither"), "eth7"),
    (checks.ports(Ports((80, 81), 2, 0, "Permission denied")), "0 of 2 are free .*80-81. Permission denied"),
    (checks.ports(Ports(None, 1, 0, "No port is free")), "No port is free"),
    (_secrecy(source="FARPROP_SECRET", problem="it can be guessed"), "it can be guessed"),
    (checks.tls(Tls(True, "w.crt", "certificate has expired", 0.0)), "w.crt no connection .* has expired"),
    (checks.files(Files(256, 4096, 20), workers=100), "may open 256 files, and a worker of this job needs 480"),
    (checks.calls([], "they have not ended")[0], "can't call each other: they have not ended"),
]


@pytest.mark.parametrize(("result", "found"), FAILURES, ids=lambda one: one.name if isinstance(one, Result) else "")
def test_failures(result: Result, found: str) -> None:
    assert result.status is Status.FAILURE
    _check_text(result, found)


def _check_text(result: Result, found: str) -> None:
    assert re.search(found, result.found), result.found


# Facts


def test_facts_of_this_host() -> None:
    assert facts.versions().is_tried
    assert facts.cores().cores == len(os.sched_getaffinity(0))
    assert facts.network(Settings()).problem == ""
    assert facts.memory().problem == ""
    assert facts.memory().available > 0
    assert facts.files().opened < facts.files().limit
    assert facts.clock().installed < facts.clock().now


def test_every_setting_is_known() -> None:
    found = facts.variables({"FARPROP_SECRET_FILE": "x", "FARPROP_SECERT": "y", "HOME": "/"})
    assert found.given - found.known == {"FARPROP_SECERT"}
    assert "FARPROP_TRANSPORT='x'" in facts.variables({"FARPROP_TRANSPORT": "x"}).problem


def test_interface_that_is_none() -> None:
    assert "Interfaces here: " in facts.network(Settings(interface="no-such")).problem
    assert "Can't listen on 203.0.113.9" in facts.network(Settings(interface="203.0.113.9")).problem


def test_ports_that_are_taken() -> None:
    with sockets.listen_tcp("127.0.0.1", None) as taken:
        port = taken.getsockname()[1]
        found = facts.ports(Settings(port_range=(port, port)), "127.0.0.1")
    assert (found.tried, found.free) == (1, 0)
    assert "is free on 127.0.0.1" in found.problem
    assert facts.ports(Settings(), "127.0.0.1").free == 1


def _tls(files: tuple[str, str, str]) -> Tls:
    return facts.tls(Settings(tls_cert=files[0], tls_key=files[1], tls_ca=files[2]))


def test_certificates(tmp_path: Path) -> None:
    ours, theirs = CertificateAuthority(tmp_path, "ours"), CertificateAuthority(tmp_path, "theirs")
    certificate, key, ca = ours.issue("worker")
    found = _tls((certificate, key, ca))
    assert found.problem == ""
    assert 0 < found.valid_seconds <= 86400
    _, other_key, other_ca = theirs.issue("other")
    assert "can't be used" in _tls((certificate, other_key, ca)).problem
    assert "certificate verify failed" in _tls((certificate, key, other_ca)).problem
    assert "can't be used" in _tls((str(tmp_path / "none"), key, ca)).problem


def test_certificate_that_has_expired(tmp_path: Path) -> None:
    found = _tls(CertificateAuthority(tmp_path, "ours").issue("worker", days=-1))
    assert "certificate verify failed" in found.problem
    assert checks.tls(found).found.endswith("It has expired.")


def _open_files_after_calls() -> int:
    own, names = rpc.get_worker_info().name, {info.name for info in rpc.workers()}
    for name in names - {own}:
        rpc.rpc_sync(name, os.getpid)
    rpc.api._barrier(names)
    return facts.files().opened


@pytest.mark.one_transport
def test_files_that_a_worker_needs() -> None:
    with cluster(4) as job:
        before = job.run(0, facts.files).opened
        runs = [job.start(rank, _open_files_after_calls) for rank in range(4)]
        assert runs[0].result() - before == 3 * checks.DESCRIPTORS_A_WORKER
        for run in runs[1:]:
            run.result()


# The command


def test_doctor_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef" * 4)
    file.chmod(0o644)
    monkeypatch.setenv("FARPROP_SECRET_FILE", str(file))
    monkeypatch.setenv("FARPROP_PORT_RANG", "1-2")
    monkeypatch.setenv("FARPROP_TLS", "0")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == INCOMPLETE
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80 + len(str(file))
    joined = " ".join(text.split())
    assert "failure settings Farprop does not know FARPROP_PORT_RANG (do you mean FARPROP_PORT_RANGE?)" in joined
    assert f"failure secret FARPROP_SECRET_FILE {file} can be read by others. Run: chmod 600 {file}" in joined
    assert "warning TLS FARPROP_TLS=0" in joined
    assert joined.endswith("2 failures")
    assert "calls" not in text  # it makes no sense to try
