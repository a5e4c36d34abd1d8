"""Answers those who look into this worker from outside of the job, such as the command ``farprop``.

An observer is no member of the group. It proves with a key of its own, which it finds in the worker's job file, that it
belongs to the same user, and may ask one kind of question: what does this worker do, and what do others say when it
asks them. With that key it can't make calls.

A thread of its own answers, so that an observer never waits for the program's calls, callbacks or threads.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Iterable

from farprop.errors import FarpropError
from farprop.protocol.handshake import PROVEN, READY, ListenerHandshake
from farprop.protocol.inspection import (
    CHANNEL,
    LENGTH,
    MAX_QUESTION,
    RECENT,
    Answer,
    JobFile,
    Question,
    Recent,
    Reply,
    from_json,
    to_json,
)
from farprop.protocol.recording import Measure, ObserversCommand, Refused, pack, unpack
from farprop.protocol.recording import Reply as RecordingReply
from farprop.protocol.roster import Identity
from farprop.runtime.inspector import Inspector
from farprop.runtime.job_files import OwnJobFile, find_files
from farprop.runtime.recording import Recordings
from farprop.transport.sockets import check_user

_log = logging.getLogger(__name__)

_PATIENCE = 2.0  # seconds for an observer to prove itself, and to ask
_OTHERS_SECONDS = 1.0
_NAME_LENGTH = 8


class Observers:
    """The socket and the job file of this worker.

    Args:
        inspector: says what this worker does.
        recordings: records it.
        identity: this worker's.
        key: what observers have to know.
        job_name: the name that the user gave the job, or "".
    """

    def __init__(
        self, inspector: Inspector, recordings: Recordings, identity: Identity, key: bytes, job_name: str
    ) -> None:
        self._inspector = inspector
        self._recordings = recordings
        self._identity = identity
        self._key = key
        self._job_name = job_name or inspector.snapshots.job[:_NAME_LENGTH]
        self._listener: socket.socket | None = None
        self._file: OwnJobFile | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Begin to answer. If there is no place for the job file, this worker can't be seen from outside."""
        name = f"farprop-inspect-{self._identity.instance}"
        try:
            self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind("\0" + name)
            listener.listen(8)
            own = self._identity.to_bytes().decode()
            snapshots = self._inspector.snapshots
            content = JobFile(snapshots.job, self._job_name, snapshots.member, own, name, self._key.hex())
            self._file = OwnJobFile(content)
        except (OSError, FarpropError) as error:
            _log.info("%s can't be inspected from outside of the job: %s", self._identity.name, error)
            self.close()
            return
        thread_name = f"farprop-inspect-{self._identity.name}"
        self._thread = threading.Thread(target=self._serve, args=(listener,), name=thread_name, daemon=True)
        self._thread.start()

    def _serve(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # closed
            with sock:
                try:
                    sock.settimeout(_PATIENCE)
                    check_user(sock)
                    self._answer(sock)
                except (OSError, FarpropError) as error:
                    _log.info("%s: an observer got no answer: %s", self._identity.name, error)
                except Exception:
                    _log.exception("farprop: unexpected error while answering an observer")

    def _answer(self, sock: socket.socket) -> None:
        machine = ListenerHandshake(self._key, self._identity.to_bytes(), CHANNEL, secrets.token_bytes(32))
        while machine.state != READY:
            data = sock.recv(4096)
            if not data:
                return
            sock.sendall(machine.receive(data))
            if machine.state == PROVEN:
                sock.sendall(machine.welcome())
                if machine.state != READY:
                    return
        length = int.from_bytes(_received(sock, LENGTH), "little")
        question = from_json(_received(sock, min(length, MAX_QUESTION)), Question)
        if question.record:
            data = pack(self._recorded(unpack(question.record, ObserversCommand), question.others))
        else:
            data = to_json(Reply.of(self._answers_to(question)))
        sock.sendall(len(data).to_bytes(LENGTH, "little") + data)

    def _answers_to(self, question: Question) -> Iterable[Answer | Recent]:
        inspector, snapshots = self._inspector, self._inspector.snapshots
        if question.detail == RECENT:
            if question.others:
                return inspector.recent(question.cursors, _OTHERS_SECONDS, question.others).values()
            return [snapshots.recent(question.cursors.get(self._identity.name, 0))]
        if question.others:
            return inspector.ask_all(question.detail, _OTHERS_SECONDS, question.others).values()
        return [snapshots.snapshot(question.detail)]

    def _recorded(self, command: ObserversCommand, others: list[str]) -> RecordingReply:
        """Do what an observer who records the job says, or have another worker do it."""
        try:
            if isinstance(command, Measure):
                return self._recordings.measure(others[0], _OTHERS_SECONDS)
            if others:
                return self._recordings.ask(others[0], command, _OTHERS_SECONDS)
        except (FarpropError, IndexError) as error:
            return Refused(str(error))
        return self._recordings.handle(command, "a process outside of the job")

    def close(self) -> None:
        """Answer nobody any more. A second time does no harm."""
        self._closed = True
        self.remove_file()
        listener, self._listener = self._listener, None
        if listener is not None:
            try:
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            except OSError:
                pass
            listener.close()
        thread, self._thread = self._thread, None
        if thread is not None and thread.ident is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)

    def remove_file(self) -> None:
        """The job is no longer found by this worker."""
        file, self._file = self._file, None
        if file is not None:
            file.remove()
            find_files()  # and those of workers that were killed go with it

    def abandon(self) -> None:
        """In a forked child, close the descriptors."""
        if self._listener is not None:
            self._listener.close()
        if self._file is not None:
            self._file.abandon()


def _received(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = sock.recv(length - len(data))
        if not more:
            raise ConnectionError("it went away")
        data += more
    return data
