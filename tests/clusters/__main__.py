"""`make clusters`: tests on a local Ray cluster, and of Kubeflow's resources, in a virtual environment of their own."""

from __future__ import annotations

import os
import subprocess
import sys

from bench import venvs
from bench.driver import ROOT, BenchError

# Farprop's own dependencies, pytest, and what would be too much for everybody's .venv: Ray takes hundreds of megabytes,
# and Kubeflow's packages bring the client of Kubernetes.
PACKAGES = [
    "cloudpickle",
    "cryptography",
    "kubeflow-trainer-api==2.3.0",
    "kubeflow-training==1.9.4",
    "msgspec",
    "pytest",
    "pytest-timeout",
    "ray==2.60.0",
]


def main() -> int:
    try:
        python = venvs.python_with(ROOT / "build" / "clusters" / "ray", PACKAGES)
    except BenchError as error:
        print(f"clusters: {error}", file=sys.stderr)
        return 2
    # Ray's and Kubeflow's warnings are not ours.
    command = [str(python), "-m", "pytest", "-o", "norecursedirs=", "-o", "filterwarnings=default", "tests/clusters"]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}).returncode


if __name__ == "__main__":
    sys.exit(main())
