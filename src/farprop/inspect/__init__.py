"""See into a job: what its workers run, queue and wait for, and why.

:func:`job` asks all workers from one of them. :func:`find` finds a job of the same user on this host from any process,
as the command ``farprop`` does. Both return a :class:`Job`.
"""

from __future__ import annotations

from collections.abc import Mapping

from farprop.inspect.job import CallRow, Job
from farprop.inspect.outside import find, list_jobs
from farprop.protocol.call_stats import CallStat
from farprop.protocol.inspection import (
    STACKS,
    STATE,
    AwaitedCall,
    CallId,
    ConnectionState,
    Frame,
    Member,
    Pass,
    Recent,
    Reference,
    ServedCall,
    Silence,
    Snapshot,
    Thread,
)
from farprop.protocol.waits import Reason

__all__ = [
    "job",
    "why",
    "recent",
    "find",
    "list_jobs",
    "Job",
    "CallRow",
    "Reason",
    "Snapshot",
    "Silence",
    "Member",
    "CallId",
    "AwaitedCall",
    "ServedCall",
    "Thread",
    "Frame",
    "Reference",
    "Pass",
    "ConnectionState",
    "Recent",
    "CallStat",
]


def job(timeout: float = 1.0, stacks: bool = False) -> Job:
    """Ask all workers of the job what they do, from one of them.

    Args:
        timeout: The seconds to wait for their answers. A worker that does not answer in time is listed with the reason.
        stacks: Whether to ask for the Python stacks of their threads, too.

    Returns:
        What the workers do.

    Raises:
        UsageError: This process is not a worker.

    Example:
        ``print(farprop.inspect.job().calls)``
    """
    from farprop.runtime.agent_registry import current_agent

    inspector = current_agent().inspector
    return Job(inspector.snapshots.job, inspector.ask_all(STACKS if stacks else STATE, timeout))


def why(timeout: float = 1.0) -> list[Reason]:
    """Say why calls of the job have no answers yet, from one of its workers.

    Args:
        timeout: The seconds to wait for the answers of the workers.

    Returns:
        A reason for each call that no other call has made, oldest first. Its ``sentence`` is for people.

    Raises:
        UsageError: This process is not a worker.

    Example:
        ``for reason in farprop.inspect.why(): print(reason.sentence)``
    """
    return job(timeout).why()


def recent(cursors: Mapping[str, int] | None = None, timeout: float = 1.0) -> dict[str, Recent | Silence]:
    """Ask all workers of the job what they have done since an earlier question, from one of them.

    A worker takes note of its calls from the first question on, and until nobody has asked for ten seconds.

    Args:
        cursors: By worker, the ``cursor`` of its answer to that question. None for the first question.
        timeout: The seconds to wait for their answers.

    Returns:
        For each worker the sums of its calls and its last events, or why it did not answer.

    Raises:
        UsageError: This process is not a worker.

    Example:
        ``farprop.inspect.recent()["worker0"].stats``
    """
    from farprop.runtime.agent_registry import current_agent

    return current_agent().inspector.recent(cursors or {}, timeout)


def __dir__() -> list[str]:
    return __all__
