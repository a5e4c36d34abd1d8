"""See into a job: what its workers run, queue and wait for, and why.

:func:`job` asks all workers from one of them. :func:`find` finds a job of the same user on this host from any process,
as the command ``farprop`` does. Both return a :class:`Job`.
"""

from __future__ import annotations

from farprop.inspect.job import CallRow, Job
from farprop.inspect.outside import find, list_jobs
from farprop.protocol.inspection import (
    STACKS,
    STATE,
    AwaitedCall,
    CallId,
    ConnectionState,
    Frame,
    Member,
    Pass,
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
    return Job(inspector.job, inspector.ask_all(STACKS if stacks else STATE, timeout))


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
