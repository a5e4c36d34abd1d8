"""One timeline of all workers of a job: where the time goes, and who waits for whom.

:func:`profile` records all workers from one of them, as ``farprop.profile``. The command ``farprop trace`` does so from
outside of the job.
"""

from __future__ import annotations

from farprop.profiler.profile import Profile, profile, trace
from farprop.profiler.summary import CallTime, SlowestCalls, Summary, WorkerSummary

__all__ = ["profile", "trace", "Profile", "Summary", "WorkerSummary", "CallTime", "SlowestCalls"]


def __dir__() -> list[str]:
    return __all__
