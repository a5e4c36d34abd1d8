"""Times calls that have gaps between them and work in them. It uses the standard library only."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from statistics import median

from bench.channel import Measured, Sample

GAPS, WORKS = (200e-6, 1e-3, 3e-3), (0.0, 200e-6, 1e-3)
CALLS = 8
_clock = time.perf_counter


def sample_of(call: Callable[[float], object], work: Callable[[float], object]) -> Sample:
    """A sample of calls.

    Args:
        call: makes a call whose function works for so many seconds.
        work: works for so many seconds in the caller, before each call.

    Returns:
        A sample: the geometric mean, over all gaps and works, of what a call costs beyond its work.
    """

    def sample() -> Measured:
        logs = []
        for gap, seconds in itertools.product(GAPS, WORKS):
            costs = []
            for _ in range(CALLS):
                work(gap)
                began = _clock()
                call(seconds)
                costs.append(_clock() - began - seconds)
            logs.append(math.log(median(costs) * 1e6))
        return Measured(math.exp(sum(logs) / len(logs)))

    return sample
