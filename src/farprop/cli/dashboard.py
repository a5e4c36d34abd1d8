"""The command ``dashboard``: the live page of a job, served from outside of it."""

from __future__ import annotations

import argparse
import threading
from typing import Any


def add(commands: Any) -> None:
    """Add this command to the parser."""
    what = "a page in the browser that shows a job live"
    parser: argparse.ArgumentParser = commands.add_parser(
        "dashboard",
        help=what,
        description=f"Serve {what}, until Ctrl-C. Needs the extra: pip install 'farprop[dashboard]'.",
        epilog="example:\n  farprop dashboard train --port 8790",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", nargs="?", default="", metavar="JOB", help="name, beginning of the id, or job file")
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="the port (default: any that is free)")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="the address to listen on (default: this host alone)"
    )
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from farprop.dashboard.server import Server
    from farprop.dashboard.sources import Outside

    source = Outside(arguments.job)
    server = Server(source, arguments.host, arguments.port)
    try:
        print(f"The job {source.name} is at {server.url}", flush=True)
        if not server.is_loopback:
            print(
                "Whoever can read the network between here and the browser can read the page, and its token.",
                flush=True,
            )
        print("Ctrl-C stops it.", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()
    return 0
