"""The command ``farprop run``: a program on several workers."""

from __future__ import annotations

import argparse
import os
from typing import Any

from farprop.cli.tables import has_colours
from farprop.errors import UsageError

_EPILOG = """\
Each worker runs the program; init_rpc() without arguments makes it worker0, worker1, ... If one fails, the others are
ended. Ctrl-C ends all, and a second one kills them. Options that are not given may come from torchrun's variables, such
as PET_NNODES.

exit codes: 0 done; that of the worker that failed first; 128 + n if it, or farprop run, was ended by signal n; 2 wrong
usage

examples:
  farprop run -n 4 train.py --epochs 3
  farprop run -n 4 -m package.train
  farprop run -n 4 --restarts 3 train.py
  farprop run --nnodes 2 -n 4 --rdzv-endpoint node1:29500 --secret-file farprop.secret train.py    (on both hosts)
"""

# Our options that torchrun has under the same name.
_TORCHRUN = ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_id", "local_addr", "rdzv_conf")


def add(commands: Any) -> None:
    """Add this command to the parser."""
    what = "a program on several workers, here or on several hosts"
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help=f"run {what}",
        description=f"Run {what}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="farprop run [option ...] PROGRAM [argument ...]",
    )
    parser.add_argument(
        "-n", "--nproc-per-node", metavar="N", help="workers on this host; or cpu, gpu, auto (default: 1)"
    )
    parser.add_argument("--restarts", metavar="N", help="start all again so often if one fails (default: 0)")
    parser.add_argument(
        "--nnodes", metavar="N", help="hosts; or MIN:MAX, for a job that starts with fewer (default: 1)"
    )
    parser.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="where the hosts meet: one of them, and a free port"
    )
    parser.add_argument("--rdzv-id", metavar="ID", help="the job's name there, if several meet at one place")
    parser.add_argument("--rdzv-conf", metavar="K=V,...", help="details of the meeting, as torchrun has them")
    parser.add_argument("--node-rank", metavar="N", help="with --master-addr: this host's number, from 0")
    parser.add_argument("--master-addr", metavar="HOST", help="instead of --rdzv-endpoint: the host with number 0")
    parser.add_argument("--master-port", metavar="PORT", help="a free port there (default: 29500)")
    parser.add_argument(
        "--local-addr", metavar="ADDRESS", help="this host's address, if the others can't resolve its name"
    )
    parser.add_argument("--secret-file", metavar="FILE", help="the job's secret; for several hosts, the same on each")
    parser.add_argument("--log-dir", metavar="DIR", help="write each worker's output to files there, too")
    parser.add_argument(
        "--shutdown-timeout", metavar="SECONDS", help="kill what has not ended after this (default: 30)"
    )
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as in python -m")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="a script, and its arguments")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        raise UsageError("farprop run needs a program, such as: farprop run -n 4 train.py")
    if not arguments.module and not os.path.isfile(program[0]):
        raise UsageError(f"There is no file {program[0]!r}. For a module, write -m before its name.")
    if arguments.secret_file:
        os.environ["FARPROP_SECRET_FILE"] = os.path.abspath(arguments.secret_file)
    options = _options(arguments)
    run = _imported(arguments.debug)

    program = ["-m", *program] if arguments.module else program
    code: int = run(options, program, arguments.log_dir, has_colours(), arguments.debug)
    return code


def _imported(debug: bool) -> Any:
    """Import the launcher, which imports torch. Its native code reads then what to print of failing connections."""
    name = "TORCH_CPP_LOG_LEVEL"
    is_ours = not debug and name not in os.environ
    if is_ours:
        os.environ[name] = "FATAL"  # errors say it in a sentence
    from farprop.launch.run import run

    if is_ours:
        del os.environ[name]  # the workers print as ever
    return run


def _options(arguments: argparse.Namespace) -> list[str]:
    """Torchrun's options."""
    given = {name: value for name in _TORCHRUN if (value := getattr(arguments, name)) is not None}
    nodes = given.get("nnodes") or os.environ.get("PET_NNODES") or "1"
    endpoint = given.get("rdzv_endpoint") or os.environ.get("PET_RDZV_ENDPOINT")
    master = given.get("master_addr") or os.environ.get("PET_MASTER_ADDR")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    if endpoint or not master:
        options.append("--rdzv-backend=farprop")  # c10d's, with signatures
    if not endpoint and not master:
        if nodes != "1":
            raise UsageError(
                f"--nnodes {nodes} needs a place where the hosts meet: --rdzv-endpoint HOST:PORT, the same on each of "
                "them. HOST is one of them, and PORT is free there."
            )
        options.append("--standalone")
    for name, value in (
        ("nproc-per-node", arguments.nproc_per_node),
        ("max-restarts", arguments.restarts),
        ("shutdown-timeout", arguments.shutdown_timeout),
    ):
        if value is not None:
            options.append(f"--{name}={value}")
    return options
