"""The floor between hosts: bare TCP, `python -m bench.hosts.wire_side CALLER ANSWERER ADDRESS`.

The first two are network namespaces. A socket stays in the one in which it was made, so one process makes both ends.
"""

from __future__ import annotations

import socket
import sys

from bench import floor_side
from bench.channel import Sample, die_with_parent, serve, take_stdout
from tests.support.hosts import enter

SIZES = {"ping": floor_side.SIZE, "echo": 10 << 20}


def main(caller: str, answerer: str, address: str) -> None:
    die_with_parent()
    reply_fd = take_stdout()
    enter(answerer)
    with socket.create_server((address, 0)) as listener:
        enter(caller)

        def prepare(kind: str) -> Sample:
            return floor_side.ping_on(floor_side.connect(listener), SIZES[kind])

        serve(prepare, reply_fd)


if __name__ == "__main__":
    main(*sys.argv[1:])
