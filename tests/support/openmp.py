"""What torch's operators get from OpenMP."""

from __future__ import annotations

import ctypes
from pathlib import Path


def threads_for_operators() -> int:
    """How many threads OpenMP would use in this thread. To ask torch would change it."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in lines if "libgomp" in line)
    return int(ctypes.CDLL(library).omp_get_max_threads())
