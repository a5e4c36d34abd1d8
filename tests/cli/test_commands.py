"""The real commands, as a user runs them: few, because each of them imports torch several times."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

from farprop.cli.main import OK
from tests.support.certificate_authority import CertificateAuthority
from tests.support.workers import free_port


def _run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "farprop", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_doctor(tmp_path: Path) -> None:
    """With a secret, certificates and one port of the user's own: the two workers of the trial don't need it."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    certificate, key, ca = CertificateAuthority(tmp_path, "ours").issue("worker", days=30)
    files = {"FARPROP_TLS_CERT": certificate, "FARPROP_TLS_KEY": key, "FARPROP_TLS_CA": ca}
    port = str(free_port())
    done = _run("doctor", "--json", FARPROP_SECRET_FILE=str(secret), FARPROP_PORT_RANGE=port, **files)
    assert done.returncode == OK, done.stdout + done.stderr
    found = json.loads(done.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert found["ok"]
    assert checks["ports"]["found"].startswith("1 of 1 are free in FARPROP_PORT_RANGE")
    assert checks["secret"]["found"] == "given by FARPROP_SECRET_FILE, and long enough"
    assert "valid for 29 days" in checks["TLS"]["found"]
    calls = [check["found"].partition(":")[0] for check in found["checks"] if check["name"] == "calls"]
    assert calls == ["to itself", "shared memory", "TCP with TLS"]
    assert secret.read_text() not in done.stdout + done.stderr


def test_bench() -> None:
    done = _run("bench", "--rounds", "1", "--json")
    assert done.returncode == OK, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [case["case"] for case in found["cases"]] == [
        "empty call",
        "call with small tensors",
        "10 MB there and back",
        "forward and backward, one hop",
    ]
    for case in found["cases"]:
        for side in ("farprop", "torch"):
            assert case[side]["samples"] >= 1
            assert 0 < case[side]["median_us"] <= case[side]["p99_us"]
        assert case["ratio"] > 0
