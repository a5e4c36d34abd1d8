"""Virtual environments under `build`, made on first use, for packages that farprop does not depend on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.driver import ROOT, BenchError

INSTALL_SECONDS = 900


def python_with(venv: Path, packages: Sequence[str]) -> Path:
    """The interpreter of a virtual environment with these packages, torch and NumPy.

    Raises:
        BenchError: they can't be installed.
    """
    python = venv / "bin" / "python"
    installed = venv / f"installed-{'-'.join(packages)}"
    if installed.exists():
        return python
    print(f"installing {', '.join(packages)} into {venv} (once)", file=sys.stderr)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(venv)])
        # The constraints matter: a bare torch brings gigabytes of CUDA packages.
        _run([*pip, "-c", str(ROOT / "constraints.txt"), "torch", "numpy", *packages])
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"not installed in {INSTALL_SECONDS} s") from error
    except subprocess.CalledProcessError as error:
        reasons = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        raise BenchError(f"can't be installed: {(reasons or ['see pip'])[-1]}") from error
    installed.touch()
    return python


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS, capture_output=True, text=True)
