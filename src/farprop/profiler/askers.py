"""How whoever records reaches the workers: as one of them, or from outside of the job."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from farprop.errors import FarpropError, RpcTimeoutError
from farprop.inspect.outside import exchange, files_of, find
from farprop.protocol.inspection import Member, Question
from farprop.protocol.recording import (
    ClockOffset,
    Measure,
    ObserversCommand,
    Ping,
    Refused,
    Reply,
    State,
    measure_offset,
    pack,
    unpack,
)
from farprop.runtime.process_state import UNRESPONSIVE, silence_of
from farprop.transport.sockets import network_namespace

if TYPE_CHECKING:
    from farprop.runtime.agent import Agent

_RELAY_SECONDS = 1.5  # more than a worker takes to ask another one that does not answer


def _why_silent(member: Member, error: Exception) -> str:
    state = silence_of(member)
    if state is not None:
        return f"did not answer: {state}"
    if isinstance(error, RpcTimeoutError | TimeoutError):
        return f"did not answer: {UNRESPONSIVE}"
    if isinstance(error, FarpropError | OSError):
        return f"could not be recorded: {error}"
    return f"could not be recorded: {type(error).__name__}: {error}"


class FromWorker:
    """A worker of the job records.

    Args:
        agent: its agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.clock = network_namespace()
        self.ask = agent.recordings.ask
        self.measure = agent.recordings.measure
        self.members = agent.recordings.members

    def why_silent(self, member: Member, error: Exception) -> str:
        return _why_silent(member, error)

    def blocked(self) -> AbstractContextManager[object]:
        return self._agent.blocked()


class FromOutside:
    """A process outside of the job records. Workers of other hosts are asked by one of this host.

    Args:
        job: the job's name, the beginning of its id, or the path of a job file.
        timeout: the seconds to wait for an answer.
    """

    def __init__(self, job: str, timeout: float) -> None:
        self.clock = network_namespace()
        self._timeout = timeout
        self._files = {file.member.name: file for file in files_of(job)}
        self._job = next(iter(self._files.values())).job

    def members(self) -> list[Member]:
        return [answer.member for answer in find(self._job, self._timeout).workers]

    def ask(self, worker: str, command: ObserversCommand, seconds: float) -> Reply:
        file = self._files.get(worker)
        question = Question(0, [] if file is not None else [worker], record=pack(command))
        relay = file or next(iter(self._files.values()))
        reply: Reply = unpack(exchange(relay, question, seconds + (0.0 if file else _RELAY_SECONDS)), Reply)
        return reply

    def measure(self, worker: str, seconds: float) -> ClockOffset:
        if worker in self._files:

            def ask() -> float:
                reply = self.ask(worker, Ping(), seconds)
                if not isinstance(reply, State):
                    raise FarpropError("it does not tell its clock")
                return reply.now

            return measure_offset(ask, time.monotonic)
        # The relay has our clock: it is on this host.
        reply = self.ask(worker, Measure(), seconds)
        if not isinstance(reply, ClockOffset):
            raise FarpropError(reply.reason if isinstance(reply, Refused) else "it does not tell its clock")
        return reply

    def why_silent(self, member: Member, error: Exception) -> str:
        return _why_silent(member, error)

    def blocked(self) -> AbstractContextManager[object]:
        return nullcontext()
