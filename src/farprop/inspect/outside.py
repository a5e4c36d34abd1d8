"""Finds jobs from outside of them, and asks their workers. Needs no torch, and is no member of the job."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from farprop.errors import AuthenticationError, ConnectionLostError, FarpropError, UsageError
from farprop.inspect.job import Job
from farprop.protocol.handshake import READY, DialerHandshake
from farprop.protocol.inspection import (
    CHANNEL,
    LENGTH,
    MAX_REPLY,
    OBSERVER,
    RECENT,
    STACKS,
    STATE,
    Answer,
    JobFile,
    Member,
    Question,
    Recent,
    Reply,
    Silence,
    Snapshot,
    from_json,
    to_json,
)
from farprop.runtime.job_files import find_files, read_file
from farprop.runtime.process_state import UNRESPONSIVE, silence_of

_RELAY_SECONDS = 1.5  # more than a worker takes to ask others that don't answer


def list_jobs() -> dict[str, list[Member]]:
    """Find the jobs of this user that have workers on this host.

    Returns:
        The workers on this host, by the job's name.

    Example:
        ``for name, workers in farprop.inspect.list_jobs().items(): print(name, len(workers))``
    """
    found: dict[str, list[Member]] = {}
    for _, file in find_files():
        found.setdefault(file.name, []).append(file.member)
    return {name: sorted(members, key=lambda member: member.rank) for name, members in found.items()}


def find(job: str = "", timeout: float = 1.0, stacks: bool = False) -> Job:
    """Ask the workers of a job what they do, from a process outside of it, on a host where some of them run.

    Args:
        job: The job's name, the beginning of its id, or the path of a worker's job file. Empty for the only job.
        timeout: The seconds to wait for the answers of workers.
        stacks: Whether to ask for the Python stacks of their threads, too.

    Returns:
        What the workers do.

    Raises:
        UsageError: There is no such job, or there are several.
        ConnectionLostError: No worker of it on this host answers.

    Example:
        ``farprop.inspect.find("train").why()``
    """
    files = files_of(job)
    detail = STACKS if stacks else STATE
    near: dict[str, Answer] = {}
    for reply in _ask_all(files, Question(detail), timeout):
        near |= reply.answers
    snapshots = [answer for answer in near.values() if isinstance(answer, Snapshot)]
    answers = dict(near)
    if snapshots:
        # Those of other hosts are asked by a worker of this one, as a member of the job.
        members = {member.name: member for member in snapshots[0].members}
        far = [name for name in members if name not in near]
        if far:
            relay = next(file for file in files if file.member.name == snapshots[0].name)
            try:
                answers.update(_ask(relay, Question(detail, far), timeout + _RELAY_SECONDS).answers)
            except (OSError, FarpropError) as error:
                answers.update({name: Silence(members[name], f"was not asked: {error}") for name in far})
    return Job(files[0].job, answers, files[0].name)


def recent(job: str, cursors: Mapping[str, int], timeout: float = 1.0) -> dict[str, Recent | Silence]:
    """Ask the workers of a job what they have done since an earlier question, from a process outside of it.

    Args:
        job: As for :func:`find`.
        cursors: By worker, the cursor in its answer to that question, or 0. Workers of other hosts are asked only if
            they are here: :func:`find` knows their names.
        timeout: The seconds to wait for the answers of workers.

    Returns:
        Their answers by name.

    Raises:
        UsageError: There is no such job, or there are several.

    Example:
        ``farprop.inspect.outside.recent("train", {"worker0": 0})["worker0"].stats``
    """
    files = files_of(job)
    cursors = dict(cursors)
    answers: dict[str, Recent | Silence] = {}
    for reply in _ask_all(files, Question(RECENT, cursors=cursors), timeout):
        answers |= reply.recent_answers
    far = [name for name in cursors if name not in answers]
    relay = next((file for file in files if isinstance(answers.get(file.member.name), Recent)), None)
    if far and relay is not None:
        try:
            answers |= _ask(relay, Question(RECENT, far, cursors), timeout + _RELAY_SECONDS).recent_answers
        except (OSError, FarpropError) as error:
            answers |= {name: Silence(Member(name, -1, "", 0, ""), f"was not asked: {error}") for name in far}
    return answers


def files_of(job: str) -> list[JobFile]:
    """The files of a job's workers on this host, by rank; raises ``UsageError`` unless one job is meant."""
    if "/" in job or job.endswith(".job"):
        try:
            file = read_file(Path(job))
        except OSError as error:
            raise UsageError(f"{job} can't be read: {error}.") from error
        if file is None:
            raise UsageError(f"{job} is left over: its worker has ended.")
        wanted = file.job
        return [found for _, found in find_files() if found.job == wanted] or [file]
    everything = [found for _, found in find_files()]
    matching = [found for found in everything if not job or found.name == job or found.job.startswith(job)]
    jobs = {found.job: found.name for found in matching}
    if len(jobs) == 1:
        return sorted(matching, key=lambda found: found.member.rank)
    running = ", ".join(sorted({found.name for found in everything}))
    if not everything:
        raise UsageError("No job of this user runs on this host.")
    if not jobs:
        raise UsageError(f"There is no job {job!r} of this user on this host. Jobs that run: {running}.")
    same = [f"{name} ({identifier[:12]})" for identifier, name in jobs.items()]
    raise UsageError(f"Several jobs run: {', '.join(sorted(same))}. Name one of them, or the beginning of its id.")


def _ask_all(files: Sequence[JobFile], question: Question, timeout: float) -> list[Reply]:
    replies: list[Reply] = []

    def ask(file: JobFile) -> None:
        member = file.member
        try:
            replies.append(_ask(file, question, timeout))
        except TimeoutError:
            silence = Silence(member, f"answers nothing: {silence_of(member) or UNRESPONSIVE}")
            replies.append(Reply.of([silence]))
        except (OSError, FarpropError) as error:
            replies.append(Reply.of([Silence(member, f"can't be asked: {silence_of(member) or error}")]))

    asking = [threading.Thread(target=ask, args=(file,), daemon=True) for file in files]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    return replies


def _ask(file: JobFile, question: Question, timeout: float) -> Reply:
    return from_json(exchange(file, question, timeout), Reply)


def exchange(file: JobFile, question: Question, timeout: float) -> bytes:
    """Ask a worker of this host; returns its reply as bytes.

    Raises:
        OSError: it can't be reached, or does not answer in time.
        FarpropError: it does not accept the key, or goes away.
    """
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        sock.connect("\0" + file.socket)
        machine = DialerHandshake(
            bytes.fromhex(file.key), OBSERVER, file.identity.encode(), CHANNEL, secrets.token_bytes(32)
        )
        to_send = machine.start()
        while machine.state != READY:
            if to_send:
                sock.sendall(to_send)
            data = _receive(sock, 4096, deadline)
            if not data:
                raise AuthenticationError(f"{file.member.name} does not accept the key of its job file")
            to_send = machine.receive(data)
        data = to_json(question)
        sock.sendall(len(data).to_bytes(LENGTH, "little") + data)
        length = int.from_bytes(_exactly(sock, LENGTH, deadline), "little")
        return _exactly(sock, min(length, MAX_REPLY), deadline)


def _exactly(sock: socket.socket, length: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    left = length
    while left:
        data = _receive(sock, min(left, 1 << 20), deadline)
        if not data:
            raise ConnectionLostError("it went away before it had answered")
        parts.append(data)
        left -= len(data)
    return b"".join(parts)


def _receive(sock: socket.socket, length: int, deadline: float) -> bytes:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)
    return sock.recv(length)
