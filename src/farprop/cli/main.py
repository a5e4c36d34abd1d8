"""The entry point of the command ``farprop``."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from farprop import __version__
from farprop.cli import bench, dashboard, demo, doctor, inspection, run, trace, version
from farprop.errors import FarpropError, UsageError

OK = 0
INCOMPLETE = 1  # it did what it could, and something is missing or wrong: a worker did not answer, a check failed
USAGE = 2  # the command was used wrongly, or there is no such job
INTERRUPTED = 130

_SECTIONS = {
    "start": (run, demo),
    "look into a running job": (inspection, dashboard, trace),
    "check": (doctor, bench, version),
}

_NOTES = """\
JOB is the job's name (FARPROP_JOB_NAME, else the first characters of its id),
the beginning of its id, or the path of a job file. It may be left out if one
job runs.

exit codes: 0 done; 1 something failed, or a worker did not answer; 2 wrong
usage, or no such job; 130 Ctrl-C. `farprop COMMAND --help` says more.

examples:
  farprop run -n 4 train.py  a program on four workers
  farprop demo               see it work: four workers train one model
  farprop doctor             is this machine all right?
  farprop ps                 the workers of the only job of this user here
  farprop why train          why calls of the job "train" have no answers
  farprop trace train        record it for five seconds, for Perfetto
  farprop --debug doctor     errors with their stack traces
"""


class _Section:
    """Takes the commands of one section of the help: argparse has none."""

    def __init__(self, commands: Any) -> None:
        self._commands = commands
        self.lines: list[str] = []

    def add_parser(self, name: str, *, help: str, **options: Any) -> argparse.ArgumentParser:
        self.lines.append(f"  {name:<10}  {help}")
        parser: argparse.ArgumentParser = self._commands.add_parser(name, **options)
        return parser


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="farprop",
        usage="farprop [--debug] COMMAND ...",
        description="Start jobs, look into them, and check where they run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"farprop {__version__}")
    parser.add_argument("--debug", action="store_true", help="stack traces of errors, and messages of libraries below")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(prog="farprop", metavar="COMMAND", help=argparse.SUPPRESS)
    texts = []
    for title, modules in _SECTIONS.items():
        section = _Section(commands)
        for module in modules:
            module.add(section)
        texts.append("\n".join([f"{title}:", *section.lines]))
    parser.epilog = "\n\n".join([*texts, _NOTES])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit code.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.print_help(sys.stderr)
        return USAGE
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
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        elif isinstance(error, FarpropError):
            print(f"farprop: {error}", file=sys.stderr)
        else:
            text = f"{type(error).__name__}: {error}. `farprop --debug` before the command shows where."
            print(f"farprop: {text}", file=sys.stderr)
        return USAGE if isinstance(error, UsageError) else INCOMPLETE
