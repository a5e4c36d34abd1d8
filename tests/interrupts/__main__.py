"""``python -m tests.interrupts``: interrupts every program at all of its points; see ``--help``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.interrupts.programs import PROGRAMS
from tests.interrupts.sweep import sweep, sweep_shutdown

SHUTDOWN = "shutdown"


def main() -> int:
    parser = argparse.ArgumentParser(description="Ctrl-C at every opcode.")
    parser.add_argument("programs", nargs="*", choices=[*PROGRAMS, SHUTDOWN, []], help="by default all")
    parser.add_argument("--every", type=int, default=1, help="only every n-th point")
    parser.add_argument("--offset", type=int, default=0, help="begin with this one")
    arguments = parser.parse_args()
    failures = []
    for name in arguments.programs or [*PROGRAMS, SHUTDOWN]:
        began = time.monotonic()
        sampled = arguments.every, arguments.offset
        result = sweep_shutdown(*sampled) if name == SHUTDOWN else sweep(name, *sampled)
        print(f"{name}: {result} ({time.monotonic() - began:.0f} s)", flush=True)
        for failure in result.failures:
            print(failure, flush=True)
        failures += result.failures
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
