"""The exceptions that farprop raises. The type says what failed: the program, a peer, the network or the job.

Every error is a ``RuntimeError``, because code written for ``torch.distributed.rpc`` catches that. An exception of a
called function is not wrapped: the caller gets its own type.
"""

from __future__ import annotations

import concurrent.futures
import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

_SHOWN = 5
_E = TypeVar("_E", bound=BaseException)


class FarpropError(RuntimeError):
    """Base class of all errors that farprop itself raises.

    Attributes:
        may_have_run: for the error of a call, False if the called function certainly has not run and will not. True if
            it may have run, or may still run.
        worker: for the error of a call, the worker that was called; for that of a backward pass, the worker that was
            lost. None where it is not known.
        function: the function that was called, or None.
        call_id: the id of the call, as ``farprop calls`` shows it, or None.
        first_failure: if another program of the job has failed before this and has said so, which one and with what; it
            is in the text, too. None otherwise.
    """

    may_have_run: bool = True
    worker: str | None = None
    function: str | None = None
    call_id: str | None = None
    first_failure: str | None = None


class UsageError(FarpropError):
    """This program used farprop wrongly: RPC is not initialised, a worker is unknown, a setting is invalid."""

    may_have_run = False


class NotExposedError(UsageError):
    """A worker of a restricted job was asked to call or look up something that it does not expose."""


class NotDataError(UsageError, TypeError):
    """A value that is not data can't be sent in a restricted job. The text says what to do instead."""


class RpcTimeoutError(FarpropError, TimeoutError):
    """No answer arrived before the call's deadline. The function may still run, or may have run."""


class ConnectionLostError(FarpropError, ConnectionError):
    """The other worker could not be reached, or the connection broke before it answered."""


class OverloadedError(FarpropError):
    """Too many requests wait at the other worker or are under way to it, so this one was not run."""

    may_have_run = False


class CallCancelledError(FarpropError, concurrent.futures.CancelledError):
    """This program has cancelled the call. What had not begun on the other worker will not run.

    ``await`` raises ``asyncio.CancelledError`` instead, which asyncio needs: see docs/asyncio.md.
    """


class ReferenceLostError(ConnectionLostError):
    """The value of a remote reference is lost: its owner died, or the value was never made."""


class RemoteError(FarpropError):
    """A function raised on another worker and its exception could not be rebuilt here.

    Args:
        message: the text.
        worker: see below.
        type_name: see below.
        remote_traceback: see below.

    Attributes:
        worker: the name of the worker on which the function ran.
        type_name: the name of the exception's class.
        remote_traceback: the exception and its traceback, as text.
    """

    def __init__(self, message: str, worker: str = "", type_name: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.type_name = type_name
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.worker, self.type_name, self.remote_traceback)


class GatherError(ExceptionGroup[Exception], FarpropError):
    """Some of the calls that ``rpc.gather`` waited for failed. As an ``ExceptionGroup`` it has their errors.

    Attributes:
        errors: the errors, by worker, or by place in the list of futures.
        results: the results of the other calls, in the same way.
    """

    errors: Mapping[Any, Exception] = {}
    results: Mapping[Any, Any] = {}

    @classmethod
    def of(cls, errors: Mapping[Any, Exception], results: Mapping[Any, Any]) -> GatherError:
        """The error for these outcomes.

        Args:
            errors: The errors, by worker or by place in the list of futures.
            results: The results of the other calls, in the same way.

        Returns:
            The error.
        """
        shown = "; ".join(f"{key}: {type(error).__name__}: {error}" for key, error in [*errors.items()][:_SHOWN])
        more = f"; and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
        made = cls(f"{len(errors)} of {len(errors) + len(results)} calls failed: {shown}{more}", [*errors.values()])
        made.errors, made.results = errors, results
        made.may_have_run = any(getattr(error, "may_have_run", True) for error in errors.values())
        return made

    def derive(self, errors: Sequence[Any], /) -> Any:
        """A part of it, as ``except*`` makes it.

        Args:
            errors: Some of its errors.

        Returns:
            A ``GatherError`` of these errors, and of all results.
        """
        made = GatherError(self.message, errors)
        kept = {id(error) for error in errors}
        made.errors = {key: error for key, error in self.errors.items() if id(error) in kept}
        made.results = self.results
        return made


class BackwardError(FarpropError):
    """A backward function or a hook raised during a distributed backward pass. The text says where and what."""


class PipelineError(FarpropError):
    """A step of a pipeline failed, and no worker goes on with it. The text says where; ``__cause__`` is what happened.

    Attributes:
        stage: the stage that failed, counted from 0, or None.
        micro_batch: the micro-batch that it had come to, counted from 0, or None if no stage had begun.
        worker: the worker that has the stage.
    """

    stage: int | None = None
    micro_batch: int | None = None


class CollectiveError(FarpropError):
    """A collective of a process group failed. The text says on which rank, and why."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A collective timed out: a rank has not called it, or is slow or gone."""


class CollectiveMismatchError(CollectiveError):
    """The ranks of a group called different collectives at the same point. The text says which rank called what."""


class RankLostError(CollectiveError, ConnectionLostError):
    """A rank that a collective needs has died, has left its group, or can't be reached."""


class ReductionError(FarpropError):
    """DistributedDataParallel can't go on: not all gradients were reduced. The text names the parameters."""


class TorchVersionError(FarpropError):
    """This version of torch lacks a private name that the used feature needs. The text names both."""


class TorchVersionWarning(UserWarning):
    """Farprop was not tested with this version of torch, or the version lacks names that farprop uses."""


class LostGradientWarning(UserWarning):
    """A backward pass ended at a tensor that another worker computed, because the call had no autograd context."""


class ProtocolError(FarpropError):
    """A peer sent bytes that break farprop's protocol. Only its connection is closed."""


class InjectedFaultError(FarpropError):
    """A fault plan or a ``FaultyProcessGroup`` made a message or a collective fail. The message was not sent."""

    may_have_run = False


class AuthenticationError(FarpropError):
    """A peer could not prove that it knows the job's secret, or refused our proof."""

    may_have_run = False


class RendezvousError(FarpropError):
    """The workers of the job could not form a group."""


def not_run(error: _E) -> _E:
    """Note that the function of the failed call has not run and will not; returns the error."""
    if isinstance(error, FarpropError):
        error.may_have_run = False
    return error


def renewed(error: BaseException) -> BaseException:
    """Copy an exception that is stored and raised many times; returns the exception itself if it can't be copied.

    A raised exception refers to the frames that it was raised through, and they refer to their local variables. A
    stored exception would keep them alive, so a copy is raised instead.
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
    """Drop the tracebacks and contexts of an exception and its causes before it is stored; returns the exception."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.__traceback__ = cause.__context__ = None
        cause = cause.__cause__
    return error
