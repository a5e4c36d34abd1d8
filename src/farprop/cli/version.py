"""The command ``version``: what is installed."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from typing import Any

from farprop import __version__


def add(commands: Any) -> None:
    """Add this command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "version",
        help="versions of farprop, torch and Python, for bug reports",
        description="Show the versions of farprop, torch, Python and the system.",
        epilog="example:\n  farprop version --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    versions = {
        "farprop": __version__,
        "torch": metadata.version("torch"),  # to import it takes seconds
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if arguments.json:
        print(json.dumps(versions, indent=1))
    else:
        print("\n".join(f"{name:<8}  {version}" for name, version in versions.items()))
    return 0
