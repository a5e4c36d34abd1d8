"""The command ``farprop trace``: one timeline of all workers of a job, from outside of it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from farprop.errors import UsageError
from farprop.profiler import trace

_EPILOG = """\
example:
  farprop trace train --seconds 10 -o trace.json, then open the file at https://ui.perfetto.dev
"""


def add(commands: Any) -> None:
    """Add this command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "trace",
        help="record all workers for a while, and write one timeline for Perfetto",
        description="Record all workers of a job for a while, and write one timeline for Perfetto. Ctrl-C ends it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", nargs="?", default="", metavar="JOB", help="name, beginning of the id, or job file")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to record (default: 5)")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="(trace.json)")
    parser.add_argument("--operators", action="store_true", help="torch's operators, too; slows small ones down")
    parser.add_argument("--slowest", type=int, default=5, metavar="N", help="show so many calls (default: 5)")
    parser.add_argument("--json", action="store_true", help="the summary as JSON")
    parser.add_argument(
        "--timeout", type=float, default=1.0, metavar="SECONDS", help="wait so long for a worker (default: 1)"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        found = trace(
            arguments.job,
            arguments.output,
            arguments.seconds,
            operators=arguments.operators,
            timeout=arguments.timeout,
        )
    except OSError as error:
        raise UsageError(str(error)) from error
    summary, slowest = found.summary(), found.slowest(arguments.slowest)
    if arguments.json:
        content = {"file": str(arguments.output), "summary": summary, "slowest": list(slowest)}
        json.dump(msgspec.to_builtins(content), sys.stdout, indent=1)
        print()
    else:
        print(f"{summary}\n\n{slowest}\n\n{arguments.output}: open it at https://ui.perfetto.dev")
    return int(bool(found.missing))
