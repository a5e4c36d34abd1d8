"""A simulated process: the real ``Agent``, with an event loop, a thread pool and sockets that are not real."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import CALLS, Keys
from farprop.runtime.agent import Agent, AgentOptions
from farprop.runtime.event_loop import HANGUP, IN
from farprop.runtime.gather import Gathers
from tests.simulation.job.network import Stream
from tests.simulation.job.scheduler import Mode, Timer, scheduler

if TYPE_CHECKING:
    from tests.simulation.job.world import World

_KEYS = Keys(b"k" * 32, "0" * 32, CALLS)
_SECRET = types.SimpleNamespace(was_found=True, let_go=lambda: None, remove_file=lambda: None, abandon=lambda: None)
_MAX_BYTES = 1 << 34


class Activity:
    """Nobody spins: that would take real time."""

    running = 0
    spin_seconds = 0.0

    def set_limit(self, seconds: float, workers: int) -> None:
        """It stays 0."""


class Loop:
    """Takes the place of ``EventLoop``."""

    def __init__(self) -> None:
        self.activity = Activity()
        self.on_pause: Callable[[], None] = lambda: None
        self.may_spin = self.called_from_outside = False
        self.process: Process = starting[0]
        self._handlers: dict[int, tuple[int, Callable[[int], None]]] = {}
        self._due: set[int] = set()
        self._is_closed = False

    def add(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = events, handler
        self._look(fd)

    def change(self, fd: int, events: int) -> None:
        if fd in self._handlers:
            self._handlers[fd] = events, self._handlers[fd][1]
            self._look(fd)

    def remove(self, fd: int) -> None:
        self._handlers.pop(fd, None)

    def notice(self, stream: Stream) -> None:
        self._look(stream.fd)

    def _look(self, fd: int) -> None:
        found = self._handlers.get(fd)
        if found is None or fd in self._due:
            return
        stream = self.process.world.network.streams[fd]
        if stream.has_ended or (found[0] & IN and stream.input):
            self._due.add(fd)
            self._soon(self._handle, fd)

    def _soon(self, action: Callable[..., None], *args: Any) -> None:
        scheduler.after(self.process.world.pause(), self.process, Mode.LOOP, action, *args)

    def _handle(self, fd: int) -> None:
        self._due.discard(fd)
        found = self._handlers.get(fd)
        if found is not None:
            stream = self.process.world.network.streams[fd]
            events, handler = found
            mask = (events & IN if stream.is_readable else 0) | (HANGUP if stream.has_ended else 0)
            if mask:
                handler(mask)
            self.on_pause()
            self._look(fd)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        return scheduler.after(max(0.0, when - scheduler.now), self.process, Mode.LOOP, self._call, callback)

    def _call(self, callback: Callable[[], None]) -> None:
        if not self._is_closed:
            callback()

    def call_at_lockfree(self, when: float, callback: Callable[[], None]) -> None:
        self.call_at(when, callback)

    def wake(self) -> None:
        """It does not sleep."""

    def close(self) -> None:
        self._is_closed = True
        self._handlers.clear()


class Pool:
    """Takes the place of ``ThreadPool``: everything runs on a thread of its own, after a moment."""

    requests = ()

    def __init__(self, name: str, limit: int, loop: Loop) -> None:
        self.loop = loop
        self._process = loop.process
        self._process.pool = self
        self._delivering = 0
        self.serving: dict[int, Any] = {}
        self.running = 0
        self._is_closed = False

    def start(self) -> None:
        """Threads are started when there is something to run."""

    def queued(self) -> list[Any]:
        """Requests that wait for a thread: there is always one."""
        return []

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        self._delivering += 1
        scheduler.after(self._process.world.pause(), self._process, Mode.POOL, self._deliver, function, args)

    push_answer = submit

    def _deliver(self, function: Callable[..., None], args: Any) -> None:
        try:
            function(*args)
        finally:
            self._delivering -= 1

    def submit_request(self, request: Any) -> None:
        self.running += 1
        scheduler.after(self._process.world.pause(), self._process, Mode.POOL, self._run, request)

    push_request = submit_request

    def _run(self, request: Any) -> None:
        _, function, args = request
        try:
            if not self._is_closed:  # the real one drops what has not begun
                function(*args)
        finally:
            self.running -= 1

    @property
    def delivers(self) -> bool:
        return self._delivering > 0

    def is_polling_thread(self) -> bool:
        return False

    def yield_polling(self) -> None:
        """No thread of it polls."""

    def blocked(self) -> Any:
        return nullcontext()

    def facts(self) -> dict[str, int]:
        return dict.fromkeys(("threads", "limit", "idle", "running", "queued"), 0)

    def close(self, timeout: float) -> None:
        self._is_closed = True
        self.loop.close()

    abandon = start


class Dialer:
    """Takes the place of the real one: see ``Network.dial``."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def dial(self, entry: Entry, deadline: float) -> Stream:
        return self._process.world.network.dial(self._process, entry, deadline)

    def is_near(self, _: Entry) -> bool:
        raise NotImplementedError  # no job calls many workers at once

    def prepare(self, _: Any) -> None:
        """There are no certificates."""

    def accepted(self, _: Any) -> Any:
        raise NotImplementedError  # ``Network`` lets peers in


class Endpoint:
    """Takes the place of the real one: an identity and keys, and no sockets."""

    def __init__(self, store: Any, name: str, rank: int, purpose: str, settings: Any) -> None:
        process = starting[0]
        self.job = "simulated"
        self.inspection_key = b""
        self.keys = _KEYS
        self.secret = _SECRET
        self.identity = process.identity
        self.dialer = Dialer(process)

    def listen(self, _: str) -> list[Any]:
        return []

    def entry(self, world_size: int, **facts: Any) -> Entry:
        identity = self.identity
        return Entry(identity.name, identity.rank, world_size, identity.instance, ("", 1), "", "", "", 1, True, **facts)

    def on_all_joined(self) -> None:
        """There is no file with the secret."""


class Observers:
    """Takes the place of the real ones: nobody looks into a simulated job from outside."""

    def __init__(self, *_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    remove_file = close = start


class Store:
    """The job's store, which never fails."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found = self._values.get(key)
        if found is None and expected:
            return expected.encode()
        if found is None or found == expected.encode():
            self.set(key, desired)
            return desired.encode()
        return found

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, step: int) -> int:
        number = int(self._values.get(key, b"0")) + step
        self._values[key] = str(number).encode()
        return number

    def clone(self) -> Store:
        return self


starting: list[Process] = []  # the process whose agent is being made


class Process:
    """One start of a worker."""

    def __init__(self, world: World, name: str, rank: int) -> None:
        self.world = world
        self.name = name
        self.rank = rank
        instance = f"{name}.{len(world.processes)}"
        self.identity = Identity(name, rank, instance, _MAX_BYTES)
        self.is_dead = False
        self.has_vanished = False  # with its host: nobody is told
        self.has_left = False
        self.is_listening = False
        self.has_joined = False
        self.is_leaving = False
        self.is_settling = False  # its program is over, and calls that others make late keep no references
        self.programs = 0  # threads of its program that run
        self.held: list[tuple[int, Any]] = []  # tokens and references that the program can reach
        self.weight: torch.Tensor
        self.gathers = Gathers()
        self.pool: Pool
        self.installed: Agent | None = None  # what ``agent_registry`` has in this process
        world.processes.append(self)
        world.by_instance[instance] = self
        starting[:] = [self]
        size = world.size if world.is_static else None
        self.agent = Agent(world.store, name, rank, size, AgentOptions(rpc_timeout=60.0))  # type: ignore[arg-type]
        self.loop: Loop = self.agent._loop  # type: ignore[assignment]
        self.installed = self.agent
        self.is_listening = True

    def __str__(self) -> str:
        return self.identity.instance

    __repr__ = __str__

    @property
    def is_alive(self) -> bool:
        return not self.is_dead and not self.has_left

    def run(self, program: Callable[..., None], *args: Any) -> None:
        """Run a part of its program, on a thread of its own."""
        self.programs += 1
        self.world.busy += 1
        scheduler.after(self.world.pause(), self, Mode.PROGRAM, self._run, program, args)

    def _run(self, program: Callable[..., None], args: Any) -> None:
        program(*args)
        self.programs -= 1
        self.world.busy -= 1

    def die(self) -> None:
        self.is_dead = True
        self.world.busy -= self.programs
