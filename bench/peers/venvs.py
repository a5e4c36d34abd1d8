"""A venv for each peer under build/peers, made on first use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.driver import ROOT, BenchError

PLACE = ROOT / "build" / "peers"
# The pin matters: a bare torch brings gigabytes of CUDA packages.
TORCH = "torch==2.13.0"
PACKAGES = {"ray": ["ray", "numpy", TORCH], "monarch": ["torchmonarch", "numpy", TORCH]}
INSTALL_SECONDS = 600


def python_of(peer: str) -> Path:
    """The peer's interpreter. `BenchError` says why there is none."""
    venv = PLACE / peer
    python = venv / "bin" / "python"
    installed = venv / "installed"
    if installed.exists():
        return python
    print(f"installing {peer} into {venv} (once)", file=sys.stderr)
    try:
        _run([sys.executable, "-m", "venv", str(venv)])
        _run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES[peer]])
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"not installed in {INSTALL_SECONDS} s") from error
    except subprocess.CalledProcessError as error:
        reasons = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        raise BenchError(f"can't be installed: {(reasons or ['see pip'])[-1]}") from error
    installed.touch()
    return python


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS, capture_output=True, text=True)
