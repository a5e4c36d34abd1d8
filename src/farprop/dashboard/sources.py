"""Where the picture of a job comes from: one of its workers, or outside of it."""

from __future__ import annotations

from typing import Protocol

import farprop.inspect
from farprop.errors import UsageError
from farprop.inspect import outside
from farprop.inspect.job import Job
from farprop.protocol.inspection import Recent, Silence

_SECONDS = 1.0  # for a worker to answer

Told = dict[str, Recent | Silence]


class JobEnded(Exception):
    """There is nothing to look at any more."""


class Source(Protocol):
    def look(self, cursors: dict[str, int]) -> tuple[Job, Told]:
        """What the workers do, and what each has done since the cursor.

        Raises:
            JobEnded: the job is no longer there.
            FarpropError: this look failed; the next one may not.
        """


class Inside:
    """This process is a worker of the job."""

    def look(self, cursors: dict[str, int]) -> tuple[Job, Told]:
        try:
            job = farprop.inspect.job(_SECONDS)
            return job, farprop.inspect.recent(cursors, _SECONDS)
        except UsageError as error:
            raise JobEnded(str(error)) from error


class Outside:
    """A job of this user on this host.

    When it has ended, a new job of the same name is taken for it: somebody has started it again.

    Args:
        job: its name, the beginning of its id, or the path of a job file. Empty for the only job.

    Raises:
        UsageError: there is no such job, or there are several.
    """

    def __init__(self, job: str, timeout: float = _SECONDS) -> None:
        self._timeout = timeout
        found = outside.find(job, timeout)
        self.name = found.name
        self._id = found.id

    def look(self, cursors: dict[str, int]) -> tuple[Job, Told]:
        try:
            return self._ask(self._id, cursors)
        except UsageError:
            pass
        try:
            job, told = self._ask(self.name, {})
        except UsageError as error:
            raise JobEnded(str(error)) from error
        self._id = job.id
        return job, told

    def _ask(self, job: str, cursors: dict[str, int]) -> tuple[Job, Told]:
        found = outside.find(job, self._timeout)
        return found, outside.recent(job, {name: cursors.get(name, 0) for name in found.answers}, self._timeout)
