"""``python -m tests.interrupts``: interrupts programs at all of their points; see ``--help``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.interrupts.programs import PROGRAMS
from tests.interrupts.sweep import Jobs, Result, sweep, sweep_shutdown

_SHUTDOWN = "shutdown"


def main() -> int:
    names = [*PROGRAMS, _SHUTDOWN]
    parser = argparse.ArgumentParser(description="Ctrl-C at every opcode of farprop's code, one at a time.")
    parser.add_argument("programs", nargs="*", metavar="program", help=f"by default all: {', '.join(names)}")
    parser.add_argument("--every", type=int, default=1, help="only every n-th point")
    parser.add_argument("--offset", type=int, default=0, help="begin with this point")
    arguments = parser.parse_args()
    total = Result()
    for name in arguments.programs or names:
        began = time.monotonic()
        if name == _SHUTDOWN:
            result = sweep_shutdown(arguments.every, arguments.offset)
        else:
            with Jobs() as jobs:
                result = sweep(jobs, name, arguments.every, arguments.offset)
        print(f"{name}: {result} ({time.monotonic() - began:.0f} s)", *result.failures, sep="\n  ", flush=True)
        total.add(result)
    print(f"all: {total}")
    return bool(total.failures)


if __name__ == "__main__":
    sys.exit(main())
