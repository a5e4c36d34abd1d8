"""Valid frames with random heads in front of the pickle. A live worker survives them."""

from __future__ import annotations

import random

import pytest

from farprop.ids import GlobalId
from farprop.protocol.references.records import Fork
from farprop.wire.message import (
    ANSWER,
    CANCEL,
    CONTEXT,
    FAILURE,
    FAST,
    NOTICE,
    REFS,
    REMOTE,
    REQUEST,
    RETURNS,
    SYSTEM,
    TRACED,
)
from tests.security.raw import memory, proven, serves
from tests.support.raw_messages import pack, pack_fork, pack_forks
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport

NAMES = (b"builtins:abs", b"", b"\xff", b"no.such:thing", b"builtins:", b":", b"a:b:c")


def _random_message(chance: random.Random) -> bytes:
    """A random message that passes, or nearly passes, the checks of the header."""
    flags = 0
    for flag in (SYSTEM, TRACED, FAST, REFS, REMOTE, CONTEXT):
        flags |= flag * (chance.random() < 0.3)
    flags |= RETURNS * (chance.random() < 0.03)  # no worker sends that in a request
    meta = b""
    if flags & REFS and chance.random() < 0.7:
        # Owned by the worker itself, by worker 1 (the identity that we use), and by nobody.
        forks = [
            Fork(chance.choice([0, 1, 77]), _random_id(chance), _random_id(chance), chance.random() < 0.9)
            for _ in range(chance.choice([0, 1, 1, 2, 20]))
        ]
        meta += pack_forks(forks)
    if flags & REMOTE and chance.random() < 0.7:
        fork = Fork(chance.choice([0, 1, 77]), _random_id(chance), _random_id(chance), False)
        meta += pack_fork(fork) + chance.choice([b"\0\0", b"\3\0abc", b"\xff\xff", b""])
    if flags & CONTEXT:
        meta += chance.randbytes(chance.choice([0, 10, 24, 30]))
    meta += chance.choice([b"", b"\x80\x05K\x01\x85}\x86.", b"\x80\x05)}\x86.", chance.randbytes(20)])
    kind = chance.choice([REQUEST] * 20 + [CANCEL] * 10 + [ANSWER, FAILURE, NOTICE])
    table = [(chance.choice([1, 100]), chance.choice([0, 5]))] * (chance.random() < 0.1)
    call_id = chance.choice([chance.getrandbits(64), chance.randrange(20)])
    return pack(kind, flags, call_id, chance.choice([0.0, 1e-9, 5.0]), chance.choice(NAMES), meta, table)


def _random_id(chance: random.Random) -> GlobalId:
    return GlobalId(chance.choice([0, 1]), chance.getrandbits(40))


def test_worker_survives_random_messages_of_an_authenticated_peer() -> None:
    # The worker keeps state for references that nobody has, so leaks are not checked at the end.
    with cluster(2, check=False) as c:
        serves(c)
        before = memory(c.pid(0))
        for seed in range(60):
            chance = random.Random(seed)
            with proven(c) as connection:
                try:
                    for _ in range(chance.choice([1, 5, 50])):
                        connection.sendall(_random_message(chance))
                except ConnectionError:
                    pass
        serves(c)
        assert memory(c.pid(0)) - before < 50 << 20
        c.kill(1)
        c.kill(0)
