"""Any bytes from a peer yield a value or a typed error. ``make fuzz`` runs longer."""

from __future__ import annotations

import importlib.util
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, seeds

# Inputs that once failed.
REGRESSIONS = {
    # A credit share of 2 to the power of minus two billion: to compare it with the whole would have taken 267 MB.
    ("messages", b"\2\5\0\0\x85\1\0\2\0\3\1\0\2\0\0\0\1\7\0\t\0\0\0\0"),
    ("messages", b"\2\xff\xff\xff\xff\1\0\0\0\3"),
    # A context head that is longer than the message.
    ("messages", b"\1" + bytes(20) + b"\xff\0\0\0"),
}
NAMES = [name for name in TARGETS if name != "data_codec" or importlib.util.find_spec("farprop.wire.data_codec")]


@contextmanager
def limited_memory() -> Iterator[None]:
    """Limits the process to 200 MiB more than it uses now. Beyond that, it gets a MemoryError, which fails the test."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes(name: str) -> None:
    run = TARGETS[name]()

    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=500))
    def check(data: bytes) -> None:
        run(data)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_mutated_seeds(name: str) -> None:
    """Valid inputs with some bytes changed, removed or repeated."""
    run = TARGETS[name]()
    change = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.sampled_from(["set", "cut", "twice"]))

    @settings(max_examples=300, deadline=None)
    @given(st.sampled_from(seeds(name)), st.lists(change, max_size=6))
    def check(seed: bytes, changes: list[tuple[float, int, str]]) -> None:
        data = bytearray(seed)
        for place, value, how in changes:
            at = int(place * len(data))
            if how == "set" and data:
                data[at] = value
            elif how == "cut":
                del data[at : at + value]
            else:
                data[at:at] = data[at : at + value]
        run(bytes(data))

    check()


@pytest.mark.parametrize(("name", "data"), sorted(REGRESSIONS))
def test_regressions(name: str, data: bytes) -> None:
    with limited_memory():
        TARGETS[name]()(data)
