"""A process that burns one core."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

# It looks at its parent now and then, so that it can't outlive a killed run.
_BURN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def one_busy_core() -> Iterator[None]:
    burner = subprocess.Popen([sys.executable, "-c", _BURN])
    time.sleep(0.3)  # its own start is not the load we mean
    try:
        yield
    finally:
        burner.kill()
        burner.wait()
