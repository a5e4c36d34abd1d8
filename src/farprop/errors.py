"""The errors a user can meet. The type says whose fault it was.

Every error is a ``RuntimeError``, because that is what code written for ``torch.distributed.rpc`` catches.
A function's own exception is not here: it arrives as its own type.
"""

from __future__ import annotations

import copy
from typing import TypeVar

_E = TypeVar("_E", bound=BaseException)


class FarpropError(RuntimeError):
    """Base of all errors that farprop itself raises."""


class UsageError(FarpropError):
    """Farprop was used wrongly here: not initialised, an unknown worker, a bad setting."""


class NotExposedError(UsageError):
    """A worker of a restricted job was asked to run, or to find, something that it does not expose."""


class NotDataError(UsageError, TypeError):
    """Something that is not data was to be sent in a restricted job. The text says what can be done instead."""


class RpcTimeoutError(FarpropError, TimeoutError):
    """No answer came within the call's deadline. The function may still run, or have run."""


class ConnectionLostError(FarpropError, ConnectionError):
    """The other worker could not be reached, or went away before it answered."""


class OverloadedError(FarpropError):
    """Too many requests wait at the other worker already, so this one was not run."""


class ReferenceLostError(ConnectionLostError):
    """The value of a remote reference can't be had any more: its owner died, or it was never made."""


class RemoteError(FarpropError):
    """A function raised on another worker and its exception could not be rebuilt here.

    ``worker`` is where it ran, ``type_name`` the exception's class, ``remote_traceback`` the text of both.
    """

    def __init__(self, message: str, worker: str = "", type_name: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.type_name = type_name
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.worker, self.type_name, self.remote_traceback)


class BackwardError(FarpropError):
    """A backward function or a hook raised during a distributed backward pass. The text says where and what."""


class CollectiveError(FarpropError):
    """A collective of a process group failed. The text says on which rank, and why."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A collective was not done in time: a rank has not called it, or is slow or gone."""


class CollectiveMismatchError(CollectiveError):
    """Ranks of a group called different things as the same collective. The text says which rank called what."""


class RankLostError(CollectiveError, ConnectionLostError):
    """A rank that a collective needs has died, has left its group, or can't be reached."""


class ReductionError(FarpropError):
    """DistributedDataParallel can't go on: gradients were not all reduced. The text names the parameters."""


class TorchVersionError(FarpropError):
    """This torch lacks a private name that what was used here needs. The text says which, and of what version."""


class TorchVersionWarning(UserWarning):
    """This torch is none that farprop was tried with, or lacks names that farprop uses. The text says what is off."""


class ProtocolError(FarpropError):
    """A peer sent bytes that break farprop's protocol. Only its connection is closed."""


class InjectedFaultError(FarpropError):
    """A message or a collective failed because a fault plan or a ``FaultyProcessGroup`` says so."""


class AuthenticationError(FarpropError):
    """A peer could not prove that it knows the job's secret, or refused our proof."""


class RendezvousError(FarpropError):
    """The workers of the job did not come together."""


def renewed(error: BaseException) -> BaseException:
    """A copy of an exception, to be raised in its place; itself if it can't be copied.

    An exception keeps the frames that it was raised through, and they keep all that they work with. One that is kept
    because it is raised at each use of something would keep that thing for ever.
    """
    try:
        made = copy.copy(error)
    except Exception:
        return error
    if type(made) is not type(error):
        return error
    if hasattr(error, "__notes__"):
        made.__notes__ = list(error.__notes__)
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made


def without_frames(error: _E) -> _E:
    """The exception, to be kept: it lets go of the frames that it and its causes were raised through."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = link.__context__ = None
        link = link.__cause__
    return error
