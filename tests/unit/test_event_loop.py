"""What the loop does between two events. Descriptors are real."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from farprop.runtime.event_loop import IN, EventLoop
from farprop.runtime.spinner import Activity, Events, Spinner


class CountingSpinner(Spinner):
    """Counts how often a thread would have spun."""

    __slots__ = ("spun",)

    def __init__(self) -> None:
        super().__init__()
        self.spun = 0

    def poll(self, poll: Callable[[int], Events], activity: Activity) -> Events:
        self.spun += 1
        return poll(0)


class World:
    def __init__(self) -> None:
        self.loop = EventLoop()
        self.spinner = self.loop._spinner = CountingSpinner()
        self.here, self.there = socket.socketpair()

    def poll_for_message(self) -> None:
        self.there.send(b"x")
        self.loop.poll()

    def close(self) -> None:
        self.loop.close()
        self.here.close()
        self.there.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_after_a_request_it_spins(world: World) -> None:
    def on_request(_: int) -> None:
        world.here.recv(1)
        world.loop.may_spin = True

    world.loop.add(world.here.fileno(), IN, on_request)
    for _ in range(3):
        world.poll_for_message()
    assert world.spinner.spun == 2  # before the first one it had no reason to


def test_after_other_events_it_sleeps(world: World) -> None:
    world.loop.add(world.here.fileno(), IN, lambda _: world.here.recv(1))
    for _ in range(3):
        world.poll_for_message()
    assert world.spinner.spun == 0


def test_call_of_the_program_ends_it(world: World) -> None:
    world.loop.add(world.here.fileno(), IN, lambda _: world.here.recv(1))
    world.loop.may_spin = world.loop.called_from_outside = True
    world.poll_for_message()
    world.loop.may_spin = True
    world.poll_for_message()
    assert world.spinner.spun == 1


def test_handler_that_had_to_wait_leaves_the_other_events_to_the_thread_that_polls_now(world: World) -> None:
    """Two threads must not read from one connection."""
    handled: list[str] = []
    one, other = socket.socketpair(), socket.socketpair()

    def handler(name: str, end: socket.socket) -> Callable[[int], None]:
        def handle(_: int) -> None:
            end.recv(1)
            handled.append(name)
            if len(handled) == 1:
                world.loop.poll()  # as the thread does that takes over

        return handle

    for name, (here, there) in {"one": one, "other": other}.items():
        world.loop.add(here.fileno(), IN, handler(name, here))
        there.send(b"x")
    world.loop.poll()
    assert sorted(handled) == ["one", "other"]
    for end in (*one, *other):
        world.loop.remove(end.fileno())
        end.close()
