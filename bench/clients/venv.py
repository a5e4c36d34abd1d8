"""A venv with other people's packages, under build/clients, made on first use."""

from __future__ import annotations

import subprocess
import sys

from bench.driver import ROOT, BenchError

PLACE = ROOT / "build" / "clients"
INSTALL_SECONDS = 900
# The versions that the table in docs/clients.md is about.
PACKAGES = {
    "torchrl": ["torchrl==0.14.1", "tensordict==0.14.3"],
    "torch_geometric": ["torch_geometric==2.8.1"],
    # The last version whose pipelines run over RPC; later ones use process groups.
    "torchpippy": ["torchpippy==0.1.1"],
}


def python_with(package: str) -> str:
    """An interpreter that has the package. `BenchError` says why there is none."""
    python = PLACE / "bin" / "python"
    installed = PLACE / f"installed-{'-'.join(PACKAGES[package])}"
    if installed.exists():
        return str(python)
    print(f"installing {package} into {PLACE} (once)", file=sys.stderr)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(PLACE)])
        # The constraints matter: a bare torch brings gigabytes of CUDA packages.
        _run([*pip, "-c", str(ROOT / "constraints.txt"), "torch", "numpy", "cloudpickle", *PACKAGES[package]])
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"not installed in {INSTALL_SECONDS} s") from error
    except subprocess.CalledProcessError as error:
        reasons = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        raise BenchError(f"can't be installed: {(reasons or ['see pip'])[-1]}") from error
    installed.touch()
    return str(python)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS, capture_output=True, text=True)
