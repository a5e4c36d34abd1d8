"""The command ``demo``: four workers train one model that is split across them."""

from __future__ import annotations

import argparse
from typing import Any

_EPILOG = """\
The program is farprop/launch/demo.py: 180 lines to read and to start from.

exit codes: 0 done; 1 the model has not learned; 130 Ctrl-C

example:
  farprop demo
"""


def add(commands: Any) -> None:
    """Add this command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="four workers train one model that is split across them",
        description="Four workers on this host train one model that is split across them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    del arguments
    from farprop.launch.demo import main

    return main()
