"""Where the threads of a process are."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

from farprop.runtime.python_threads import PythonThreads, stacks


def _recurse(depth: int, then: Any) -> None:
    if depth:
        _recurse(depth - 1, then)
    else:
        then()


def test_own_stack() -> None:
    found: list[Any] = []
    _recurse(3, lambda: found.append(stacks()[threading.get_ident()]))
    functions = [frame.function for frame in found[0]]
    assert functions[:6] == ["stacks", "<lambda>", "_recurse", "_recurse", "_recurse", "_recurse"]
    assert functions[6] == "test_own_stack"
    assert {frame.file for frame in found[0][1:7]} == {__file__}
    assert found[0][2].line == _recurse.__code__.co_firstlineno + 4


def test_stack_of_a_thread_that_waits() -> None:
    begun, end = threading.Event(), threading.Event()

    def wait_for_the_end() -> None:
        begun.set()
        end.wait()

    thread = threading.Thread(target=wait_for_the_end, name="waits")
    thread.start()
    begun.wait()
    threads = PythonThreads(shows=True)
    assert thread.ident is not None
    place = threads.place_of(thread.ident)
    described = threads.describe(thread.ident, None, None, with_frames=True)
    end.set()
    thread.join()
    assert place is not None
    assert (place.file, place.function) == (__file__, "wait_for_the_end")
    assert described.name == "waits"
    assert any(frame.code == "thread.start()" or frame.code == "end.wait()" for frame in described.frames)
    assert PythonThreads(shows=False).place_of(threading.get_ident()) is None


def test_names_that_are_not_ascii() -> None:
    namespace: dict[str, Any] = {"stacks": stacks}
    exec(compile("def größe():\n    return stacks()", "/naïve/日本/𝄞.py", "exec"), namespace)
    frame = namespace["größe"]()[threading.get_ident()][1]
    assert (frame.file, frame.function, frame.line) == ("/naïve/日本/𝄞.py", "größe", 2)


_STRESS = """
import sys, threading
from farprop.runtime.python_threads import stacks

def recurse(depth):
    try:
        if depth:
            return recurse(depth - 1)
        raise ValueError
    except ValueError as error:
        kept = error

def run():
    while going:
        threading.Thread(target=recurse, args=(5,)).start()
        recurse(20)

going = True
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=run) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(200):
    assert threading.main_thread().ident in stacks() or threading.active_count() > 50
going = False
for thread in threads:
    thread.join()
"""


def test_threads_that_go_on_while_they_are_looked_at() -> None:
    """The frame objects of other threads crashed the process: see the module."""
    subprocess.run([sys.executable, "-X", "faulthandler", "-c", _STRESS], check=True, timeout=120)
