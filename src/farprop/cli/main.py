"""The entry point of the command ``farprop``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from farprop import __version__
from farprop.cli import dashboard, inspection, run, trace
from farprop.errors import FarpropError, UsageError

OK = 0
INCOMPLETE = 1  # it did what it could, and something is missing: a worker did not answer
USAGE = 2  # the command was used wrongly, or there is no such job
INTERRUPTED = 130

_EPILOG = """\
JOB is the job's name (FARPROP_JOB_NAME, else the first characters of its id), the beginning of its id, or the path of a
job file. It may be left out if one job runs.

exit codes: 0 done; 1 done, but a worker did not answer or something failed; 2 wrong usage, or no such job

examples:
  farprop ps                 the workers of the only job of this user on this host
  farprop why train          why calls of the job "train" have no answers
  farprop stacks train       the Python stacks of its workers
  farprop calls train --json
  farprop trace train        record it for five seconds, and write trace.json for Perfetto
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="farprop",
        description="See into running jobs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"farprop {__version__}")
    parser.add_argument("--debug", action="store_true", help="stack traces of errors, and messages of libraries below")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (run, inspection, dashboard, trace):
        module.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit code.
    """
    arguments = make_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as ``head``, has had enough. Python would complain at its end if it could not flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except FarpropError as error:
        if arguments.debug:
            raise
        print(f"farprop: {error}", file=sys.stderr)
        return USAGE if isinstance(error, UsageError) else INCOMPLETE
